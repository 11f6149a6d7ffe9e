"""The pictures of a report: quality and throughput against memory; those of a sweep."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Record = dict[str, Any]

# Okabe & Ito's palette, safe for colour-blind readers, without its yellow, too pale on
# white. Black is the full cache's. 6 colours and 7 shapes repeat after 42 methods.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SHAPES = ("o", "s", "D", "^", "v", "P", "X")
_GREY = "#595959"
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GREY,
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "savefig.dpi": 200,
    "savefig.facecolor": "white",
    "text.usetex": False,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}
_MARKER = 10.0  # points across
_MEMORY = "KV cache per prompt, peak (MB)"
_KL_ZERO = 1e-4  # nats per token; what lies below is drawn as none


class _Mark(NamedTuple):
    """How a method looks in every picture."""

    colour: str
    shape: str


def draw(
    records: Sequence[Record],
    labels: Sequence[str],
    full: Record,
    workdir: pathlib.Path,
) -> None:
    """Writes quality_vs_memory.png and throughput_vs_memory.png.

    Args:
      records: one per method, as `kvjax.report` describes them.
      labels: what the pictures call each.
      full: the record of the full cache, drawn as a black star; empty if there is none.
      workdir: an existing folder.
    """
    import matplotlib

    marks = _marks(records, full)
    with matplotlib.rc_context(_STYLE):
        quality = _quality(records, marks, labels)
        quality.savefig(workdir / "quality_vs_memory.png")
        throughput = _throughput(records, marks, labels)
        throughput.savefig(workdir / "throughput_vs_memory.png")


def _quality(
    records: Sequence[Record], marks: Sequence[_Mark], labels: Sequence[str]
) -> Any:
    figure, (left, right) = _figure(2)
    found = _points(records, "accuracy")
    _titles(left, "Needle retrieval", "accuracy (share of prompts)", "better ↖")
    left.set_ylim(-0.05, 1.05)
    if any(r.get("kl") is not None for r in records):
        _titles(right, "Distance from full cache", "KL (nats per token)", "better ↙")
        close = _log_axis(right, _points(records, "kl"))
    else:
        _titles(right, "Agreement with full cache", "top-1 (share)", "better ↖")
        close = _points(records, "top1_agreement")
        right.set_ylim(-0.05, 1.05)
    _fill(figure, [(left, found), (right, close)], marks, labels)
    return figure


def _throughput(
    records: Sequence[Record], marks: Sequence[_Mark], labels: Sequence[str]
) -> Any:
    figure, (axes,) = _figure(1)
    points = _points(records, "tokens_per_s")
    _titles(axes, "Throughput", "end to end (generated tokens/s)", "better ↖")
    axes.set_ylim(_span(points[:, 1]))
    labels = [
        f"{label}, batch {record.get('batch', '-')}"
        for label, record in zip(labels, records, strict=True)
    ]
    _fill(figure, [(axes, points)], marks, labels)
    return figure


def _fill(
    figure: Any,
    panels: Sequence[tuple[Any, np.ndarray]],
    marks: Sequence[_Mark],
    labels: Sequence[str],
) -> None:
    """Draws points f[N, 2] into each panel, and one legend below them all."""
    _legend(figure, marks, labels)
    for axes, points in panels:
        axes.set_xlim(_span(points[:, 0]))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, pixels keep their meaning
    for axes, points in panels:
        _scatter(axes, points, marks)


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    """A figure of panels side by side."""
    figure = _new_figure((9, 4.6))
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _titles(axes: Any, title: str, y: str, hint: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(hint, loc="right", color=_GREY)
    axes.set_xlabel(_MEMORY)
    axes.set_ylabel(y)


def _marks(records: Sequence[Record], full: Record) -> list[_Mark]:
    coloured = itertools.count()
    return [
        _Mark("black", "*") if record is full else _mark(next(coloured))
        for record in records
    ]


def _mark(index: int) -> _Mark:
    return _Mark(_COLOURS[index % len(_COLOURS)], _SHAPES[index % len(_SHAPES)])


def _points(records: Sequence[Record], key: str) -> np.ndarray:
    """f[N, 2]: MB of KV cache per prompt, and `key`; NaN where unknown."""
    pairs = [(r.get("kv_bytes_per_row"), r.get(key)) for r in records]
    return np.array(pairs, np.float64) / [1e6, 1]


def _span(values: np.ndarray) -> tuple[float, float]:
    """Limits around positive values, wide enough not to blow up small differences."""
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = values.min(), values.max()
    room = max(high - low, 0.4 * high, 1e-9)
    middle = (low + high) / 2
    return max(0.0, middle - 0.7 * room), middle + 0.7 * room


def _log_axis(axes: Any, points: np.ndarray) -> np.ndarray:
    """Makes y logarithmic, with a place for zero at its foot; returns what to draw."""
    y = points[:, 1]
    above = y[np.isfinite(y) & (y > _KL_ZERO)]
    low = math.floor(math.log10(above.min())) if above.size else -1
    high = math.ceil(math.log10(above.max())) if above.size else 0
    foot = 10.0 ** (low - 1)
    axes.set_yscale("log")
    axes.set_ylim(foot / 1.6, 10.0 ** max(high, low + 1) * 1.3)
    decades = 10.0 ** np.arange(low, max(high, low + 1) + 1)
    axes.set_yticks([foot, *decades], ["0", *(f"{d:g}" for d in decades)])
    axes.tick_params(axis="y", which="minor", length=0)
    axes.axhline(foot * 10**0.5, color=_GREY, lw=0.8, ls=":")  # zero is no decade
    return np.stack([points[:, 0], np.where(y <= _KL_ZERO, foot, y)], axis=1)


def _legend(figure: Any, marks: Sequence[_Mark], labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=label, **_look(mark))
        for mark, label in zip(marks, labels, strict=True)
    ]
    columns = max(1, min(len(labels), 100 // (max(map(len, labels)) + 6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _look(mark: _Mark) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": mark.shape,
        "markersize": _MARKER * (1.5 if mark.shape == "*" else 1),
        "markerfacecolor": mark.colour,
        "markeredgecolor": "white",
    }


def _scatter(axes: Any, points: np.ndarray, marks: Sequence[_Mark]) -> None:
    """Draws the known points; those that would hide each other stand side by side."""
    pixels = axes.transData.transform(points)
    pixels = _apart(pixels, _MARKER * axes.figure.dpi / 72)
    places = axes.transData.inverted().transform(pixels)
    known = np.flatnonzero(np.isfinite(places).all(axis=1))
    for index in known:
        axes.plot(*places[index], clip_on=False, zorder=3, **_look(marks[index]))
    if not known.size:
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "not measured", color=_GREY, **middle)


def _apart(pixels: np.ndarray, size: float) -> np.ndarray:
    """Moves points that would cover an earlier one sideways by whole markers."""
    placed = np.full_like(pixels, np.nan)
    for index in np.flatnonzero(np.isfinite(pixels).all(axis=1)):
        for step in range(2 * len(pixels)):
            side = (step + 1) // 2 * (1 if step % 2 else -1)
            spot = pixels[index] + [side * size, 0]
            near = np.abs(placed - spot).max(axis=1) < 0.8 * size  # False for NaN
            if not near.any():
                placed[index] = spot
                break
    return placed


# --- sweeps -------------------------------------------------------------------------

Setting = tuple[str, str]  # schedule and budget, as tables write them

_COLOUR_MAP = "cividis"  # looks alike to colour-blind readers; rises in lightness
_MISSING = "#EEEEEE"
_FRONT = "#D55E00"
_FRONT_TEXT = "#8A3B00"
_SHORT = 6.0  # of a marker in a crowd, points across


def draw_sweep(
    records: Sequence[Record],
    rows: Sequence[str],
    columns: Sequence[Setting],
    settings: Sequence[Setting],
    full: Record,
    workdir: pathlib.Path,
) -> None:
    """Writes heat_map.png and pareto.png.

    Args:
      records: one per method, as `kvjax.report` describes them.
      rows: the row that each record belongs to.
      columns: the column that each record belongs to.
      settings: the columns to draw, in order; those of a schedule stand together.
      full: the record of the full cache; empty if there is none.
      workdir: an existing folder.
    """
    import matplotlib

    places = list(zip(rows, columns, strict=True))
    with matplotlib.rc_context(_STYLE):
        heat_map = _heat_map(records, places, settings, full)
        heat_map.savefig(workdir / "heat_map.png")
        pareto = _pareto(records, places, settings, full)
        pareto.savefig(workdir / "pareto.png")


def _heat_map(
    records: Sequence[Record],
    places: Sequence[tuple[str, Setting]],
    settings: Sequence[Setting],
    full: Record,
) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    found = {p: r for p, r in zip(places, records, strict=True) if p[1] in settings}
    labels = list(dict.fromkeys(row for row, _ in found))
    accuracy, kl = (_grid(found, labels, settings, k) for k in ("accuracy", "kl"))
    order = np.lexsort((_means(np.log(kl + _KL_ZERO)), -_means(accuracy)))
    labels = [labels[i] for i in order]
    figure = _new_figure((10, 1.9 + 0.29 * len(labels)))
    left, right = figure.subplots(1, 2, sharey=True)
    reference = _reference(full, "accuracy", "; full cache {:.2f}")
    left.set_title(f"Needle accuracy{reference}", loc="left", pad=34, fontsize=11)
    _cells(left, accuracy[order], settings, Normalize(0, 1), "{:.2f}", False)
    right.set_title(
        "KL from full cache (nats per token)", loc="left", pad=34, fontsize=11
    )
    above = kl[np.isfinite(kl) & (kl > 0)]
    low, high = (above.min(), above.max()) if above.size else (0.1, 1.0)
    scale = LogNorm(max(low, 1e-3), max(high, 2 * max(low, 1e-3)), clip=True)
    _cells(right, kl[order], settings, scale, "{:.2g}", True)
    left.set_yticks(range(len(labels)), labels, color="black")
    return figure


def _grid(
    found: dict[tuple[str, Setting], Record],
    labels: Sequence[str],
    settings: Sequence[Setting],
    key: str,
) -> np.ndarray:
    """f[labels, settings], NaN where there is no such record."""
    cells = [[found.get((label, s), {}).get(key) for s in settings] for label in labels]
    return np.array(cells, np.float64)


def _means(grid: np.ndarray) -> np.ndarray:
    """Of each row's known values; +inf where none is known, which sorts last."""
    known = np.isfinite(grid)
    total = np.sum(grid, axis=1, where=known)
    count = known.sum(axis=1)
    return np.where(count, total / np.maximum(count, 1), np.inf)


def _reference(full: Record, key: str, form: str) -> str:
    return form.format(full[key]) if full.get(key) is not None else ""


def _cells(
    axes: Any,
    grid: np.ndarray,
    settings: Sequence[Setting],
    scale: Any,
    form: str,
    reverse: bool,
) -> None:
    """One panel: coloured cells with their numbers, bright where it is good."""
    import matplotlib

    colours = matplotlib.colormaps[_COLOUR_MAP + ("_r" if reverse else "")]
    colours = colours.with_extremes(bad=_MISSING)
    axes.imshow(np.ma.masked_invalid(grid), norm=scale, cmap=colours, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        red, green, blue, _ = colours(scale(value)) if known else (1, 1, 1, 1)
        bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        axes.text(
            column,
            row,
            _cell(value, form) if known else "-",
            color="black" if bright else "white",
            fontsize=9,
            ha="center",
            va="center",
        )
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.set_xticks(range(len(settings)), [budget for _, budget in settings])
    _groups(axes, settings)


def _cell(value: float, form: str) -> str:
    return "<.001" if 0 < value < 1e-3 else form.format(value)


def _groups(axes: Any, settings: Sequence[Setting]) -> None:
    """Names of schedules over their columns, and a gap between two of them."""
    start = 0
    for schedule, group in itertools.groupby(settings, lambda setting: setting[0]):
        count = len(list(group))
        middle = start + (count - 1) / 2
        place = {"xytext": (0, 18), "textcoords": "offset points", "ha": "center"}
        axes.annotate(
            f"{schedule}, |kv| =",
            (middle, 1),
            xycoords=("data", "axes fraction"),
            fontsize=9,
            color=_GREY,
            **place,
        )
        start += count
        if start < len(settings):
            axes.axvline(start - 0.5, color="white", lw=5)


def _pareto(
    records: Sequence[Record],
    places: Sequence[tuple[str, Setting]],
    settings: Sequence[Setting],
    full: Record,
) -> Any:
    """A column of two panels per schedule: needle accuracy above, KL below."""
    schedules = list(dict.fromkeys(schedule for schedule, _ in settings))
    figure = _new_figure((1 + 4.5 * len(schedules), 8.4))
    panels = figure.subplots(2, len(schedules), squeeze=False, sharey="row")
    drawn = []
    for column, schedule in enumerate(schedules):
        chosen = [i for i, (_, (s, _)) in enumerate(places) if s == schedule]
        members = [records[i] for i in chosen]
        names = [places[i][0] for i in chosen]
        above, below = panels[:, column]
        above.set_title(schedule, loc="left", fontweight="bold")
        below.set_xlabel("KV cache per prompt while decoding (MB)")
        for axes, key, sign in ((above, "accuracy", 1), (below, "kl", -1)):
            points = _decoding(members, key)
            drawn.append((axes, points, sign, names, _decoding([full], key)[0]))
    above, below = panels[:, 0]
    above.set_ylabel("needle accuracy (share of prompts)")
    above.set_ylim(-0.05, 1.12)
    below.set_ylabel("KL (nats per token)")
    for below in panels[1]:
        _log_axis(below, _decoding(records, "kl"))
    for each in drawn:
        _panel(*each)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, pixels keep their meaning
    for axes, points, sign, names, _ in drawn:
        _name_front(axes, _shown(axes, points), _front(points, sign), sign, names)
    return figure


def _decoding(records: Sequence[Record], key: str) -> np.ndarray:
    """f[N, 2]: MB of KV cache per prompt while decoding, and `key`; NaN if unknown."""
    pairs = [(r.get("kv_bytes_decode"), r.get(key)) for r in records]
    return np.array(pairs, np.float64).reshape(-1, 2) / [1e6, 1]


def _front(points: np.ndarray, sign: int) -> list[int]:
    """Points that none beats with as little memory, by rising memory.

    Those on one spot are all on it. `sign` is 1 where large is good, -1 where small is.
    """
    known = [i for i in range(len(points)) if np.isfinite(points[i]).all()]
    front, best = [], -math.inf
    by_memory = sorted(known, key=lambda i: (points[i, 0], -sign * points[i, 1]))
    for _, group in itertools.groupby(by_memory, lambda i: points[i, 0]):
        group = list(group)
        value = sign * points[group[0], 1]
        if value > best:
            front += [i for i in group if sign * points[i, 1] == value]
            best = value
    return front


def _shown(axes: Any, points: np.ndarray) -> np.ndarray:
    """Where points are drawn: on a logarithmic axis, zero at its foot."""
    if axes.get_yscale() != "log":
        return points
    y = np.where(points[:, 1] <= _KL_ZERO, axes.get_yticks()[0], points[:, 1])
    return np.stack([points[:, 0], y], axis=1)


def _panel(
    axes: Any,
    points: np.ndarray,
    sign: int,
    names: Sequence[str],
    reference: np.ndarray,
) -> None:
    """Every point in grey, the front as steps, the full cache as a star."""
    seen = _shown(axes, points)
    crowd = {"linestyle": "none", "markersize": _SHORT, "clip_on": False}
    axes.plot(*seen.T, marker="o", color="#B0B0B0", mec="white", **crowd)
    front = _front(points, sign)
    if front:
        steps = {"where": "post", "color": _FRONT, "lw": 1.5}
        axes.step(*seen[front].T, **steps)
        axes.plot(*seen[front].T, marker="o", color=_FRONT, mec="white", **crowd)
    if np.isfinite(reference).all():
        star = _shown(axes, reference[None])[0]
        axes.plot(*star, clip_on=False, zorder=3, **_look(_Mark("black", "*")))
        side = {"xytext": (9, -9 * sign), "textcoords": "offset points", "ha": "right"}
        axes.annotate("full cache", star, va="top" if sign > 0 else "bottom", **side)
    axes.set_xlim(0, 1.08 * np.nanmax([*points[:, 0], reference[0], 1e-9]))


def _name_front(
    axes: Any,
    points: np.ndarray,
    front: Sequence[int],
    sign: int,
    names: Sequence[str],
) -> None:
    """Writes the front's names on its good side, where no other point can be."""
    taken = [text.get_window_extent() for text in axes.texts]
    spots: dict[tuple[float, float], list[str]] = {}
    for i in front:
        spots.setdefault(tuple(points[i]), []).append(names[i])
    for spot, found in spots.items():
        taken.append(_name(axes, spot, _listed(found), sign, taken))


def _name(
    axes: Any, spot: tuple[float, float], name: str, sign: int, taken: Sequence[Any]
) -> Any:
    """Writes a name beside a spot where it covers none of the boxes `taken`."""
    from matplotlib.patheffects import withStroke

    offset = {"textcoords": "offset points", "xytext": (0, 0)}
    halo = [withStroke(linewidth=2.5, foreground="white")]
    style = {"fontsize": 9, "color": _FRONT_TEXT, "path_effects": halo}
    text = axes.annotate(name, spot, **offset, **style)
    for dx, dy, across, down in _places(sign):
        text.set(position=(dx, dy), ha=across, va=down)
        box = text.get_window_extent()
        free = not any(box.overlaps(other) for other in taken)
        if free and axes.bbox.x0 < box.x0 and axes.bbox.y0 < box.y0:
            break
    if dy:
        line = {"arrowstyle": "-", "color": _FRONT_TEXT, "lw": 0.7, "shrinkB": 3}
        offset["xytext"] = (dx, dy)
        axes.annotate("", spot, **offset, arrowprops=line | {"shrinkA": 0})
    return box


def _places(sign: int) -> list[tuple[float, float, str, str]]:
    """Where a name may go: points from the spot, and which of its corners goes there.

    To the left first, then further up (or down, where small is good), then right.
    """
    down = {1: "bottom", -1: "top"}[sign]
    away = [(dy, down) for dy in (8, 20, 32, 44, 56, 68, 80, 92)]
    return [
        (dx, sign * dy, across, v)
        for dx, across in ((-7, "right"), (-3, "left"), (7, "left"))
        for dy, v in [(0, "center"), *away][dx == -3 :]
    ]


def _listed(names: Sequence[str]) -> str:
    """At most three names, a line each, and how many more there are."""
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return "\n".join([*names[:3], *more])


def _new_figure(size: tuple[float, float]) -> Any:
    """A figure of so many inches, unknown to pyplot: nothing to close, no backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04)
    return figure
