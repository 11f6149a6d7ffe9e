"""Scatter plots: quality and rates against memory or the batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvjax.evaluation.report import groups
from kvjax.evaluation.report.figures import (
    FULL,
    GREY,
    KL_ZERO,
    MARKER,
    Mark,
    joined,
    legend,
    legend_rows,
    look,
    marks_by_rule,
    new_figure,
    new_panels,
    not_measured,
)
from kvjax.evaluation.report.groups import Quality, text
from kvjax.evaluation.report.records import Record

_PEAK, _DECODING = "kv_bytes_peak_per_seq", "kv_bytes_decode"
_SAME_PEAKS = 1.1  # the largest over the smallest of nearly equal peaks
_MOST_MOVES = 4  # in markers, of a point that would cover another
_OCTAVES = 8  # times the smallest cache: a linear axis would crowd the small ones
_FAR = 30  # times the slowest: a linear axis would hide it
_RECORDS_APART = 0.19  # inches between records of one batch
_METHODS_APART = 0.05  # inches between methods, whose memory is often the same
_ASIDE = 0.3  # inches between the first method and the last, at most
_FRONT = "#D55E00"
_FRONT_TEXT = "#8A3B00"
_SHORT = 6.0  # points across, of a marker in a crowd


def points_of(records: Sequence[Record], memory: str, key: str) -> np.ndarray:
    """Returns f[N, 2]: MB of KV cache per prompt, and `key`; NaN where unknown."""
    pairs = [(r.get(memory), r.get(key)) for r in records]
    return np.array(pairs, np.float64).reshape(-1, 2) / [1e6, 1]


# --- one run --------------------------------------------------------------------------


def quality_vs_memory(records: Sequence[Record]) -> Any:
    """Draws the score, and the distance from the full cache, against memory."""
    names, (memory, told) = groups.names_of(records), _memory(records)
    figure = new_figure((9, _height(names)), records)
    left, right = figure.subplots(1, 2)
    score = groups.score_of(records)
    _titles(left, score.title, told, score.axis, "better ↖")
    left.set_ylim(-0.05, 1.05)
    far = "Distance from full cache", told, "KL (nats per token)", "better ↙"
    alike = "Agreement with full cache", told, "top-1 (share)", "better ↖"
    if any(r.get("kl") is not None for r in records):
        _titles(right, *far)
        close = points_of(records, memory, "kl")
        log_axis(right, close[:, 1])
    else:
        _titles(right, *alike)
        close = points_of(records, memory, "top1_agreement")
        right.set_ylim(-0.05, 1.05)
    panels = [(left, points_of(records, memory, "score")), (right, close)]
    _fill(figure, panels, records, names)
    return figure


def throughput_vs_memory(records: Sequence[Record]) -> Any:
    """Draws end-to-end rates against memory, with each method's batch in the legend."""
    batches = [record.get("batch_size", "-") for record in records]
    each = zip(groups.names_of(records), batches, strict=True)
    names, (memory, told) = [f"{n}, batch {b}" for n, b in each], _memory(records)
    figure = new_figure((9, _height(names)), records)
    axes = figure.subplots()
    points = points_of(records, memory, "output_tokens_per_s")
    _titles(axes, "Throughput", told, "end to end (generated tokens/s)", "better ↖")
    axes.set_ylim(_from_zero(points[:, 1]))
    _fill(figure, [(axes, points)], records, names)
    return figure


def _memory(records: Sequence[Record]) -> tuple[str, str]:
    """Returns the memory that differs between methods and its name.

    It is the peak, or the memory while decoding if all peaks are nearly equal, as they
    are where every method prefills with all pairs.
    """
    peaks, left = ([r.get(key) for r in records] for key in (_PEAK, _DECODING))
    known = None not in (*peaks, *left)
    if len(records) > 2 and known and max(peaks) < _SAME_PEAKS * min(peaks):
        return _DECODING, "while decoding"
    return _PEAK, "peak"


def _height(names: Sequence[str]) -> float:
    """Returns the inches of a figure with one row of panels above its legend."""
    return 4.0 + 0.26 * max(legend_rows(names, 9), 2)


def _titles(axes: Any, title: str, memory: str, y: str, hint: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(hint, loc="right", color=GREY)
    axes.set_xlabel(f"KV cache per prompt, {memory} (MB)")
    axes.set_ylabel(y)


def _fill(
    figure: Any,
    panels: Sequence[tuple[Any, np.ndarray]],
    records: Sequence[Record],
    names: Sequence[str],
) -> None:
    """Draws points f[N, 2] in each panel, and one legend below all panels."""
    looks = list(map(look, marks_by_rule(records, groups.full_cache(records))))
    legend(figure, looks, names)
    for axes, points in panels:
        axes.set_xlim(_from_zero(points[:, 0]))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, pixels keep their meaning
    for axes, points in panels:
        pixels = axes.transData.transform(points)
        spots = apart(pixels, MARKER * figure.dpi / 72, axes.bbox.extents)
        places = axes.transData.inverted().transform(spots)
        known = np.flatnonzero(np.isfinite(places).all(axis=1))
        for index in known:
            moved = np.stack([points[index], places[index]])
            axes.plot(
                *moved.T, color=looks[index]["markerfacecolor"], lw=0.8, zorder=2.5
            )
            axes.plot(*places[index], clip_on=False, zorder=3, **looks[index])
        if not known.size:
            not_measured(axes)


def _from_zero(values: np.ndarray) -> tuple[float, float]:
    """Returns axis limits from zero, for values that are compared by length."""
    known = values[np.isfinite(values)]
    return 0.0, 1.12 * max(known.max(initial=0.0), 1e-9)


def apart(pixels: np.ndarray, size: float, box: np.ndarray) -> np.ndarray:
    """Moves points that would cover an earlier one to the nearest free spot in the box.

    A point moves by a few markers at most; if no spot is free, it stays where it is.
    """
    steps = np.arange(-_MOST_MOVES, _MOST_MOVES + 1)
    moves = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    nearest = np.lexsort([np.abs(moves[:, 1]), np.hypot(*moves.T)])
    placed = np.full_like(pixels, np.nan)
    for index in np.flatnonzero(np.isfinite(pixels).all(axis=1)):
        spots = pixels[index] + size * moves[nearest]
        within = ((spots >= box[:2]) & (spots <= box[2:])).all(axis=1)
        away = np.abs(placed - spots[:, None]).max(axis=2)
        near = (away < 0.8 * size).any(axis=1)  # False for NaN
        free = spots[within & ~near]
        placed[index] = free[0] if len(free) else pixels[index]
    return placed


def log_axis(axes: Any, values: np.ndarray) -> None:
    """Makes y logarithmic for these values, with zero at the bottom."""
    above = values[np.isfinite(values) & (values > KL_ZERO)]
    low = math.floor(math.log10(above.min())) if above.size else -1
    high = max(low + 1, math.ceil(math.log10(above.max())) if above.size else 0)
    axes.set_yscale("symlog", linthresh=10.0**low)
    axes.set_ylim(-0.2 * 10.0**low, 1.3 * 10.0**high)
    decades = 10.0 ** np.arange(low, high + 1)
    axes.set_yticks([0, *decades], ["0", *(f"{d:g}" for d in decades)])
    axes.tick_params(axis="y", which="minor", length=0)
    axes.axhline(0.5 * 10.0**low, color=GREY, lw=0.8, ls=":")  # zero is no decade


# --- several runs ---------------------------------------------------------------------


def task_scores(group: Quality) -> Any:
    """Draws each task's score against the KV cache of a prompt, a panel per task.

    A line joins the budgets of a method. Methods of one policy share its colour.
    Methods that evict after prefill are hollow: they hold the whole prompt until then.
    Methods are shifted sideways a little so that none hides another.
    """
    from matplotlib.transforms import ScaledTranslation

    key = ["series", "schedule", "codec"]
    full = group.full and (group.full.series, group.full.schedule, group.full.codec)
    marks = _marks(group, key, full)
    methods, names = list(marks), _names(list(marks))
    looks = {
        method: joined(mark, method[1].startswith(("after_prefill", "decode_only")))
        for method, mark in marks.items()
    }
    answers = group.answers.assign(
        decode=group.answers["decode"] / 1e6, score=100 * group.answers["score"]
    )
    figure, panels = new_panels(len(group.columns), (3.9, 3.0), answers["record"])
    rows = legend_rows(names, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + 0.25 * rows)
    step = min(_METHODS_APART, _ASIDE / len(methods))
    for axes, column in zip(panels, group.columns, strict=True):
        asked = answers[answers["column"] == column]
        title = axes.set_title(column, loc="left", fontweight="bold")
        title.set_in_layout(False)  # a long one would shrink the panels
        axes.set_xlabel("KV MB per prompt, decoding")
        axes.set_ylabel(f"{asked['task'].iloc[0]['metric']} (points)")
        for method, found in asked.dropna(subset=["decode", "score"]).groupby(key):
            points = found[["decode", "score"]].sort_values(["decode", "score"])
            place = 0 if method == full else methods.index(method) - len(methods) / 2
            aside = ScaledTranslation(place * step, 0, figure.dpi_scale_trans)
            put = {"transform": axes.transData + aside, "clip_on": False, "zorder": 3}
            axes.plot(*points.to_numpy().T, lw=1, **put, **looks[method])
            if method == full:
                axes.axhline(points["score"].iloc[0], color="black", lw=0.8, ls=":")
        _limits(axes)
    legend(figure, list(looks.values()), names)
    return figure


def _marks(group: Quality, key: list[str], full: tuple | None) -> dict[tuple, Mark]:
    """Returns each method's mark: the full cache first, then grouped by policy."""
    records = group.answers.drop_duplicates(key).set_index(key)["record"]
    every = dict.fromkeys((s, when, how) for s, when, _, how in group.rows)
    rules = [text(records[method].get("policy")) for method in every]
    place = dict(zip(every, map(rules.index, rules), strict=True))
    methods = sorted(every, key=lambda method: (method != full, place[method]))
    marks = marks_by_rule([records[m] for m in methods], full and records[full])
    return dict(zip(methods, marks, strict=True))


def _names(methods: Sequence[tuple]) -> list[str]:
    """Returns the series, and what distinguishes methods of one series."""
    frame = pd.DataFrame([m[1:] for m in methods], index=[m[0] for m in methods])
    varied = frame.groupby(level=0).nunique() > 1
    told = [np.array(rest)[varied.loc[name].to_numpy()] for name, *rest in methods]
    rest = zip(methods, told, strict=True)
    return [groups.joined(name, *apart) for (name, *_), apart in rest]


def _limits(axes: Any) -> None:
    """Sets axis limits: at least 10 points high, so that noise does not look large.

    Memory starts at zero, or is logarithmic where sizes differ widely.
    """
    methods = [line for line in axes.lines if line.get_marker() != "None"]
    data = [line.get_xydata() for line in methods if len(line.get_xydata())]
    points = np.concatenate(data) if data else np.zeros((1, 2))
    known = points[:, 0][points[:, 0] > 0]
    if known.size and known.max() > _OCTAVES * known.min():
        axes.set_xscale("log", base=2)
        axes.set_xlim(known.min() / 1.3, 1.3 * known.max())
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, 1.1 * max(points[:, 0].max(), 1e-9))
    axes.set_ylim(-0.5, max(10.0, 1.12 * points[:, 1].max()))


# --- throughput -----------------------------------------------------------------------


def throughput_vs_batch(records: Sequence[Record]) -> Any:
    """Draws generated tokens/s against the batch, a panel per number of new tokens.

    The roofline's rate is hollow, above the measurement of the same colour. Records
    without a batch are left out, and so are predictions that other engines lack.
    Methods that differ in their batch alone share a mark.
    """
    news = list(dict.fromkeys(r.get("new_tokens") for r in records))
    marks, drawn, named = _marks_and_names(records)
    predicted = look(Mark(GREY, "o"), hollow=True) | {"markersize": 8}
    named.append("roofline's prediction")
    width = 4.2 * max(2, len(news))
    figure = new_figure((width, 4.2 + 0.28 * legend_rows(named, width)), records)
    panels = figure.subplots(1, len(news), squeeze=False)[0]
    for axes, new in zip(panels, news, strict=True):
        axes.set_title(f"{text(new)} new tokens", loc="left", fontweight="bold")
        axes.set_xlabel("batch (prompts decoding at a time)")
        members = [r for r in records if r.get("new_tokens") == new]
        _batch_axes(axes, members)
        _posts(axes, members, marks)
    panels[0].set_ylabel("end to end (generated tokens/s)")
    legend(figure, [*map(look, drawn), predicted], named)
    return figure


def _marks_and_names(
    records: Sequence[Record],
) -> tuple[dict[str, Mark], list[Mark], list[str]]:
    """Returns each method's mark, the distinct marks, and their names in the legend."""
    methods: dict[str, Record] = {}
    for record in records:
        methods.setdefault(text(record.get("method")), record)
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, r in methods.items():
        kind = groups.series(r), groups.setting(r), groups.slots(r)
        kinds.setdefault(kind, []).append(name)
    firsts = [methods[names[0]] for names in kinds.values()]
    full = next((r for r in firsts if r.get("batch_rule") == "full"), {})
    drawn = marks_by_rule(firsts, full)
    each = zip(drawn, kinds.values(), strict=True)
    marks = {name: mark for mark, names in each for name in names}
    called = [k[0] if len(names) > 1 else names[0] for k, names in kinds.items()]
    return marks, drawn, called


def _batch_axes(axes: Any, records: Sequence[Record]) -> None:
    """Sets a logarithmic batch axis; rates start at zero unless they vary widely."""
    known = [rate for r in records for rate in _rates(r) if np.isfinite(rate)]
    if known and max(known) > _FAR * min(known):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.12 * max(known, default=1.0))
    batches = sorted({r["batch_size"] for r in records if r.get("batch_size")} or {1})
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    ticks = [b for a, b in zip([0, *batches], batches, strict=False) if b > 1.1 * a]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.tick_params(axis="x", which="minor", length=0)


def _posts(axes: Any, records: Sequence[Record], marks: dict[str, Mark]) -> None:
    """Draws a line per record from measurement to prediction."""
    from matplotlib.transforms import ScaledTranslation

    if not any(r.get("batch_size") and np.isfinite(_rates(r)[0]) for r in records):
        not_measured(axes)
    for record in records:
        batch = record.get("batch_size")
        peers = [r for r in records if r.get("batch_size") == batch]
        place = [r is record for r in peers].index(True) - (len(peers) - 1) / 2
        shift = place * _RECORDS_APART, 0, axes.figure.dpi_scale_trans
        put = {"transform": axes.transData + ScaledTranslation(*shift)}
        mark = marks[text(record.get("method"))]
        x, (y, limit) = batch or np.nan, _rates(record)
        post = {"color": mark.colour, "lw": 0.8, "clip_on": False}
        axes.plot([x, x], [y, limit], zorder=2, **post, **put)
        axes.plot(x, limit, zorder=2.5, clip_on=False, **look(mark, True), **put)
        axes.plot(x, y, zorder=3, clip_on=False, **look(mark), **put)


def _rates(record: Record) -> tuple[float, float]:
    """Returns measured and predicted tokens per second; NaN where unknown."""
    keys = ("output_tokens_per_s", "predicted_tokens_per_s")
    values = [groups.finite(record.get(key)) for key in keys]
    return tuple(np.nan if value is None else value for value in values)


# --- sweeps ---------------------------------------------------------------------------


def pareto(records: Sequence[Record]) -> Any:
    """Draws quality, and KL if known, against memory, a column per schedule."""
    frame, full = groups.sweep(records), groups.full_cache(records)
    settings = list(frame["setting"].unique())
    shown = [("score", 1, groups.score_of(records).axis)]
    if frame["kl"].notna().any():
        shown.append(("kl", -1, "KL (nats per token)"))
    figure = new_figure((1 + 4.5 * len(settings), 4.2 * len(shown)), records)
    panels = figure.subplots(len(shown), len(settings), squeeze=False, sharey="row")
    drawn = []
    for name, column in zip(settings, panels.T, strict=True):
        members = frame[frame["setting"] == name]
        column[0].set_title(name, loc="left", fontweight="bold")
        column[-1].set_xlabel("KV cache per prompt while decoding (MB)")
        for axes, (key, sign, _) in zip(column, shown, strict=True):
            points = members[["decode", key]].to_numpy() / [1e6, 1]
            star = points_of([full], "kv_bytes_decode", key)[0]
            drawn.append((axes, points, sign, list(members["series"]), star))
    for row, (_, _, axis) in zip(panels, shown, strict=True):
        row[0].set_ylabel(axis)
    panels[0, 0].set_ylim(-0.05, 1.12)
    for below in panels[1:].flat:
        log_axis(below, points_of(records, _PEAK, "kl")[:, 1])
    for axes, points, sign, _, star in drawn:
        _crowd(axes, points, sign, star)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, pixels keep their meaning
    for axes, points, sign, names, _ in drawn:
        _name_front(axes, points, sign, names)
    return figure


def front(points: np.ndarray, sign: int) -> list[int]:
    """Returns the indices of the Pareto front, by rising memory.

    Coinciding points are all on it. `sign` is 1 where large is good, -1 where small is.
    """
    frame = pd.DataFrame(points, columns=["memory", "value"]).dropna() * [1, sign]
    best = frame.groupby("memory")["value"].max()
    before = best.cummax().shift(fill_value=-np.inf)  # with less memory
    of_memory = frame["memory"]
    on = (frame["value"] == of_memory.map(best)) & (
        frame["value"] > of_memory.map(before)
    )
    return list(frame[on].sort_values("memory", kind="stable").index)


def _crowd(axes: Any, points: np.ndarray, sign: int, star: np.ndarray) -> None:
    """Draws every point in grey, the front as steps, the full cache as a star."""
    crowd = {"linestyle": "none", "markersize": _SHORT, "clip_on": False}
    axes.plot(*points.T, marker="o", color="#B0B0B0", mec="white", **crowd)
    best = points[front(points, sign)]
    if len(best):
        axes.step(*best.T, where="post", color=_FRONT, lw=1.5)
        axes.plot(*best.T, marker="o", color=_FRONT, mec="white", **crowd)
    if np.isfinite(star).all():
        axes.plot(*star, clip_on=False, zorder=3, **look(FULL))
        side = {"xytext": (9, -9 * sign), "textcoords": "offset points", "ha": "right"}
        axes.annotate("full cache", star, va="top" if sign > 0 else "bottom", **side)
    axes.set_xlim(0, 1.08 * np.nanmax([*points[:, 0], star[0], 1e-9]))


def _name_front(axes: Any, points: np.ndarray, sign: int, names: Sequence[str]) -> None:
    """Writes the front's names on its better side, where no other point can be."""
    taken = [each.get_window_extent() for each in axes.texts]
    spots: dict[tuple[float, float], list[str]] = {}
    for i in front(points, sign):
        spots.setdefault(tuple(points[i]), []).append(names[i])
    for spot, found in spots.items():
        more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
        name = "\n".join([*found[:3], *more])
        taken.append(_name(axes, spot, name, sign, taken))


def _name(
    axes: Any, spot: tuple[float, float], name: str, sign: int, taken: Sequence[Any]
) -> Any:
    """Writes a name beside a spot where it covers none of the boxes `taken`."""
    from matplotlib.patheffects import withStroke

    offset = {"textcoords": "offset points", "xytext": (0, 0)}
    halo = [withStroke(linewidth=2.5, foreground="white")]
    style = {"fontsize": 9, "color": _FRONT_TEXT, "path_effects": halo}
    written = axes.annotate(name, spot, **offset, **style)
    for dx, dy, across, down in _places(sign):
        written.set(position=(dx, dy), ha=across, va=down)
        box = written.get_window_extent()
        free = not any(box.overlaps(other) for other in taken)
        if free and axes.bbox.x0 < box.x0 and axes.bbox.y0 < box.y0:
            break
    if dy:
        line = {"arrowstyle": "-", "color": _FRONT_TEXT, "lw": 0.7, "shrinkB": 3}
        offset["xytext"] = (dx, dy)
        axes.annotate("", spot, **offset, arrowprops=line | {"shrinkA": 0})
    return box


def _places(sign: int) -> list[tuple[float, float, str, str]]:
    """Returns candidate places of a name: the offset in points, and its alignment.

    Left comes first, then further up (or down, where small is good), then right.
    """
    down = {1: "bottom", -1: "top"}[sign]
    away = [(dy, down) for dy in (8, 20, 32, 44, 56, 68, 80, 92)]
    return [
        (dx, sign * dy, across, v)
        for dx, across in ((-7, "right"), (-3, "left"), (7, "left"))
        for dy, v in [(0, "center"), *away][dx == -3 :]
    ]
