"""Quality and rates against memory, and rates beside their rooflines."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvjax.evaluation.report import groups
from kvjax.evaluation.report.figures import (
    FULL,
    GREY,
    KL_ZERO,
    joined,
    legend,
    look,
    marks_by_policy,
    marks_of,
    new_figure,
    new_panels,
)
from kvjax.evaluation.report.groups import Quality, text
from kvjax.evaluation.report.records import Record

_PEAK, _DECODING = "kv_bytes_peak_per_seq", "kv_bytes_decode"
_SAME_PEAKS = 1.1  # the largest over the smallest of nearly equal peaks
_OCTAVES = 8  # times the smallest cache: a linear axis would crowd the small ones
_NEAR = 0.02  # of a panel's width: marks that may hide one another
_MARKER = 0.14  # inches, the width of a mark
_METHODS_APART = 0.05  # inches between methods, whose memory is often the same
_ASIDE = 0.3  # inches between the first method and the last, at most


class _Measure(NamedTuple):
    """A field of records, its title and its axis; `sign` is -1 where small is good."""

    key: str
    title: str
    axis: str
    sign: int = 1


_KL = _Measure("kl", "Distance from full cache", "KL (nats per token)", -1)
_RATE = _Measure("output_tokens_per_s", "Throughput", "end to end (generated tokens/s)")


def points_of(records: Sequence[Record], memory: str, key: str) -> np.ndarray:
    """Returns f[N, 2]: MB of KV cache per prompt, and `key`; NaN where unknown."""
    pairs = [(r.get(memory), r.get(key)) for r in records]
    return np.array(pairs, np.float64).reshape(-1, 2) / [1e6, 1]


# --- one run --------------------------------------------------------------------------


def quality_vs_memory(records: Sequence[Record]) -> Any:
    """Draws the score, and the distance from the full cache, against memory.

    Lines are the 95% intervals of the score of one task.
    """
    return _vs_memory(records, groups.names_of(records), _measures(records))


def _measures(records: Sequence[Record]) -> list[_Measure]:
    """Returns the score, and KL where it is known."""
    score = groups.score_of(records)
    known = any(r.get("kl") is not None for r in records)
    return [_Measure("score", score.title, score.axis), *([_KL] if known else [])]


def throughput_vs_memory(records: Sequence[Record]) -> Any:
    """Draws end-to-end rates against memory, with each method's batch in the legend."""
    batches = [record.get("batch_size", "-") for record in records]
    each = zip(groups.names_of(records), batches, strict=True)
    return _vs_memory(records, [f"{n}, batch {b}" for n, b in each], [_RATE])


def _vs_memory(
    records: Sequence[Record], names: Sequence[str], measures: Sequence[_Measure]
) -> Any:
    """Draws a panel per measure, and one legend under all panels."""
    memory, label = _memory(records)
    looks = list(map(look, marks_by_policy(records, groups.full_cache(records))))
    figure = new_figure((9, 4), records)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, measure in zip(panels, measures, strict=True):
        axes.set_title(measure.title, loc="left", fontweight="bold")
        better = "better ↖" if measure.sign > 0 else "better ↙"
        axes.set_title(better, loc="right", color=GREY)
        axes.set_xlabel(f"KV cache per prompt, {label} (MB)")
        axes.set_ylabel(measure.axis)
        points = points_of(records, memory, measure.key)
        _set_limits(axes, measure, points)
        near = np.inf if measure.key == "score" else 0.045  # intervals are high
        each = zip(records, points, looks, _apart(axes, points, near), strict=True)
        for record, point, style, place in each:
            axes.plot(*point, clip_on=False, zorder=3, transform=place, **style)
            ends = groups.only_task(record).get("interval") or ()
            if measure.key == "score" and ends:
                colour = style["markerfacecolor"]
                axes.vlines(point[0], *ends, color=colour, lw=1, transform=place)
        if not np.isfinite(points).all(axis=1).any():
            middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "not measured", color=GREY, **middle)
    legend(figure, looks, names)
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


def _set_limits(axes: Any, measure: _Measure, points: np.ndarray) -> None:
    """Sets axes that start at zero; KL is logarithmic, and shares end at 1."""
    most = np.nanmax(np.vstack([points, [[1e-9, 1e-9]]]), axis=0)
    axes.set_xlim(0, 1.12 * most[0])
    if measure.key == "kl":
        log_axis(axes, points[:, 1])
    elif measure is _RATE:
        axes.set_ylim(0, 1.12 * most[1])
    else:
        axes.set_ylim(-0.05, 1.05)


def _apart(axes: Any, points: np.ndarray, near: float) -> Iterator[Any]:
    """Yields the transform of each point; side by side if they cover one another.

    They do where they are closer than `near`, a share of the panel's height.
    """
    from matplotlib.transforms import ScaledTranslation

    places = (axes.transScale + axes.transLimits).transform(points)
    for index, place in enumerate(places):
        peers = (np.abs(places - place) < (_NEAR, near)).all(axis=1)  # False for NaN
        step = _MARKER * (peers[:index].sum() - (peers.sum() - 1) / 2)
        aside = ScaledTranslation(step, 0, axes.figure.dpi_scale_trans)
        yield axes.transData + aside


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


# --- sweeps ---------------------------------------------------------------------------


def pareto(records: Sequence[Record]) -> Any:
    """Draws quality, and KL if known, against memory, a column per schedule.

    Series on a front have a mark each; all other points are grey.
    """
    frame, full = groups.sweep(records), groups.full_cache(records)
    frame = frame.assign(decode=frame["decode"] / 1e6)
    measures = _measures(records)
    settings = list(frame["setting"].unique())
    size = 1 + 4.5 * len(settings), 4.2 * len(measures)
    figure = new_figure(size, records)
    shape = len(measures), len(settings)
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey="row")
    best = {}
    for measure, row in zip(measures, panels, strict=True):
        row[0].set_ylabel(measure.axis)
        _set_limits(row[0], measure, points_of(records, _DECODING, measure.key))
        for name, axes in zip(settings, row, strict=True):
            found = frame[frame["setting"] == name].reset_index(drop=True)
            points = found[["decode", measure.key]].to_numpy()
            axes.plot(*points.T, "o", color="#C8C8C8", ms=5, mec="white", zorder=1)
            best[axes] = found.loc[front(points, measure.sign)], measure.key
    named = list(
        dict.fromkeys(s for found, _ in best.values() for s in found["series"])
    )
    looks = dict(zip(named, map(look, marks_of(named)), strict=True))
    for axes, (found, key) in best.items():
        points = found[["decode", key]].to_numpy()
        axes.step(*points.T, where="post", color=GREY, lw=1.2, zorder=2)
        each = zip(points, found["series"], _apart(axes, points, 0.03), strict=True)
        for point, name, place in each:
            axes.plot(
                *point, zorder=3, transform=place, **looks[name] | {"markersize": 8}
            )
        star = points_of([full], _DECODING, key)[0]
        axes.plot(*star, clip_on=False, zorder=3, **look(FULL))
    for name, axes in zip(settings, panels[0], strict=True):
        axes.set_title(name, loc="left", fontweight="bold")
    for axes in panels[-1]:
        axes.set_xlabel("KV cache per prompt while decoding (MB)")
    legend(figure, [look(FULL), *looks.values()], ["full cache", *looks])
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
    records = group.answers.drop_duplicates(key).set_index(key)["record"]
    methods = list(dict.fromkeys((row[0], row[1], row[3]) for row in group.rows))
    policies = {m: text(records[m].get("policy")) for m in methods}
    order = list(dict.fromkeys(policies.values()))
    methods.sort(key=lambda method: (method != full, order.index(policies[method])))
    marks = marks_by_policy([records[m] for m in methods], full and records[full])
    hollow = [m[1].startswith(("after_prefill", "decode_only")) for m in methods]
    looks = dict(zip(methods, map(joined, marks, hollow), strict=True))
    answers = group.answers.assign(
        decode=group.answers["decode"] / 1e6, score=100 * group.answers["score"]
    )
    figure, panels = new_panels(len(group.columns), (3.9, 3.0), answers["record"])
    step = min(_METHODS_APART, _ASIDE / len(methods))
    for axes, column in zip(panels, group.columns, strict=True):
        of_task = answers[answers["column"] == column]
        title = axes.set_title(column, loc="left", fontweight="bold")
        title.set_in_layout(False)  # a long one would shrink the panels
        axes.set_xlabel("KV MB per prompt, decoding")
        axes.set_ylabel(f"{of_task['task'].iloc[0]['metric']} (points)")
        known = of_task.dropna(subset=["decode", "score"])
        for method, found in known.groupby(key):
            points = found[["decode", "score"]].sort_values(["decode", "score"])
            place = 0 if method == full else methods.index(method) - len(methods) / 2
            aside = ScaledTranslation(place * step, 0, figure.dpi_scale_trans)
            put = {"transform": axes.transData + aside, "clip_on": False, "zorder": 3}
            axes.plot(*points.to_numpy().T, lw=1, **put, **looks[method])
            if method == full:
                axes.axhline(points["score"].iloc[0], color="black", lw=0.8, ls=":")
        _limit_task(axes, known)
    rest = groups.distinctions(*zip(*((m[0], m[1:]) for m in methods), strict=True))
    each = zip(methods, rest, strict=True)
    names = [groups.joined(method[0], *parts) for method, parts in each]
    legend(figure, list(looks.values()), names)
    return figure


def _limit_task(axes: Any, known: pd.DataFrame) -> None:
    """Sets axis limits: at least 10 points high, so that noise does not look large.

    Memory starts at zero, or is logarithmic where sizes differ widely.
    """
    sizes = known["decode"][known["decode"] > 0]
    if len(sizes) and sizes.max() > _OCTAVES * sizes.min():
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes.min() / 1.3, 1.3 * sizes.max())
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, 1.1 * max(sizes, default=1.0))
    axes.set_ylim(-0.5, max(10.0, 1.12 * known["score"].max()))


# --- throughput -----------------------------------------------------------------------


def throughput_vs_batch(records: Sequence[Record]) -> Any:
    """Draws generated tokens/s as bars, a panel per number of new tokens.

    Each bar names its method and batch. The roofline's prediction is a hollow bar, of
    the methods that have one.
    """
    news = list(dict.fromkeys(r.get("new_tokens") for r in records))
    members = [[r for r in records if r.get("new_tokens") == new] for new in news]
    size = 9, 1.2 + sum(0.8 + 0.34 * len(each) for each in members)
    figure = new_figure(size, records)
    panels = figure.subplots(
        len(news), 1, squeeze=False, height_ratios=[2 + len(m) for m in members]
    )[:, 0]
    for axes, new, shown in zip(panels, news, members, strict=True):
        names = [f"{r['method']}, batch {text(r.get('batch_size'))}" for r in shown]
        measured, predicted = (
            np.array([groups.finite(r.get(key)) for r in shown], float)
            for key in ("output_tokens_per_s", "predicted_tokens_per_s")
        )
        at = range(len(shown))
        colours = ["black" if groups.is_full(r) else "#0072B2" for r in shown]
        labels = ["not measured" if np.isnan(x) else f"{x:.3g}" for x in measured]
        bars = axes.barh(at, np.nan_to_num(measured), color=colours, height=0.7)
        axes.barh(at, predicted, fill=False, edgecolor=GREY, height=0.7)
        axes.bar_label(bars, labels, padding=4)
        axes.set_yticks(at, names, color="black")
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.1)
        axes.set_title(f"{text(new)} new tokens", loc="left", fontweight="bold")
    panels[-1].set_xlabel("end to end (generated tokens/s); hollow: predicted")
    return figure
