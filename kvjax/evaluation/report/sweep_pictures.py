"""The pictures of a sweep: a heat map of all methods, and the Pareto fronts."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.report import cells
from kvjax.evaluation.report.pictures import (
    GREY,
    KL_ZERO,
    STYLE,
    Mark,
    log_axis,
    look,
    new_figure,
)
from kvjax.evaluation.report.records import Record

Setting = tuple[str, str]  # schedule and budget, as tables write them

_COLOUR_MAP = "cividis"  # looks alike to colour-blind readers; rises in lightness
_MISSING = "#EEEEEE"
_FRONT = "#D55E00"
_FRONT_TEXT = "#8A3B00"
_SHORT = 6.0  # of a marker in a crowd, points across


def draw(
    records: Sequence[Record],
    rows: Sequence[str],
    columns: Sequence[Setting],
    settings: Sequence[Setting],
    full: Record,
    workdir: pathlib.Path,
) -> None:
    """Writes heat_map.png and pareto.png.

    Args:
      records: one per method, as `kvjax.evaluation.report.records` describes them.
      rows: the row that each record belongs to.
      columns: the column that each record belongs to.
      settings: the columns to draw, in order; those of a schedule stand together.
      full: the record of the full cache; empty if there is none.
      workdir: an existing folder.
    """
    import matplotlib

    places = list(zip(rows, columns, strict=True))
    with matplotlib.rc_context(STYLE):
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
    order = np.lexsort((_means(np.log(kl + KL_ZERO)), -_means(accuracy)))
    labels = [labels[i] for i in order]
    figure = new_figure((10, 1.9 + 0.29 * len(labels)))
    left, right = figure.subplots(1, 2, sharey=True)
    reference = _reference(full, "accuracy", "; full cache {:.2f}")
    quality = cells.quality_of(records)
    left.set_title(f"{quality.title}{reference}", loc="left", pad=34, fontsize=11)
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
            color=GREY,
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
    """A column of two panels per schedule: quality above, KL below."""
    schedules = list(dict.fromkeys(schedule for schedule, _ in settings))
    figure = new_figure((1 + 4.5 * len(schedules), 8.4))
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
    above.set_ylabel(cells.quality_of(records).axis)
    above.set_ylim(-0.05, 1.12)
    below.set_ylabel("KL (nats per token)")
    for below in panels[1]:
        log_axis(below, _decoding(records, "kl"))
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
    y = np.where(points[:, 1] <= KL_ZERO, axes.get_yticks()[0], points[:, 1])
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
        axes.plot(*star, clip_on=False, zorder=3, **look(Mark("black", "*")))
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
