"""The pictures of joined runs: quality against memory, needles, what survives."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.report import survivors
from kvjax.evaluation.report.joined_runs import Column, Quality, Row
from kvjax.evaluation.report.pictures import (
    GREY,
    STYLE,
    Mark,
    legend,
    legend_rows,
    look,
    marks_of,
    new_figure,
)

_COLOUR_MAP = "cividis"
_PANELS = 3  # side by side
_APART = 0.05  # inches between methods, whose memory is often the same
_ASIDE = 0.3  # inches, what all of them may take


def draw_quality(group: Quality, path: pathlib.Path) -> None:
    """Writes a panel per task: its score against the KV cache of a prompt.

    Budgets of a method are joined by a line. Methods whose schedule compresses after
    the prompt are hollow: they hold all of it while they read. So that none hides
    another, methods are moved sideways a little.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        _quality(group).savefig(path)


def _quality(group: Quality) -> Any:
    from matplotlib.transforms import ScaledTranslation

    methods = list(dict.fromkeys((row.label, row.schedule) for row in group.rows))
    whole = group.full and (group.full.label, group.full.schedule)
    full = next((m for m in methods if m == whole), None)
    marks = marks_of(methods, full)
    looks = {m: _look(mark, m[1]) for m, mark in zip(methods, marks, strict=True)}
    names = [m[0] if m == full else ", ".join(m) for m in methods]
    figure, panels = _panels(len(group.columns), (3.9, 3.0))
    rows = legend_rows(names, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + 0.25 * rows)
    step = min(_APART, _ASIDE / len(methods))
    for axes, (column, name) in zip(panels, group.columns.items(), strict=True):
        title = axes.set_title(name, loc="left", fontweight="bold")
        title.set_in_layout(False)  # a long one would shrink the panels
        axes.set_xlabel("KV MB per prompt, decoding")
        task = next(f.task for (_, c), f in group.found.items() if c == column)
        axes.set_ylabel(f"{task['metric']} (points)")
        for index, method in enumerate(methods):
            points = _points(group, column, method)
            if not len(points):
                continue  # an empty line would upset the layout
            place = 0 if method == full else index - len(methods) / 2
            aside = ScaledTranslation(place * step, 0, figure.dpi_scale_trans)
            put = {"transform": axes.transData + aside, "clip_on": False}
            axes.plot(*points.T, lw=1, zorder=3, **put, **looks[method])
            if method == full:
                axes.axhline(points[0, 1], color="black", lw=0.8, ls=":")
        _limits(axes)
    extra = [
        looks[method] | {"label": name, "linestyle": "none"}
        for method, name in zip(methods, names, strict=True)
    ]
    legend(figure, [], [], extra)
    return figure


def _look(mark: Mark, schedule: str) -> dict[str, Any]:
    style = look(mark) | {"color": mark.colour, "linestyle": "-"}
    style["markersize"] *= 0.8
    if schedule == "after_prefill":
        style |= {"markerfacecolor": "white", "markeredgecolor": mark.colour}
    return style


def _points(group: Quality, column: Column, method: tuple[str, str]) -> np.ndarray:
    """f[budgets, 2]: MB of KV cache per prompt while decoding, and points of 100."""
    found = [
        (each.record.get("kv_bytes_decode"), group.score(row, column))
        for (row, c), each in group.found.items()
        if c == column and (row.label, row.schedule) == method
    ]
    known = sorted(pair for pair in found if None not in pair)
    return np.array(known, np.float64).reshape(-1, 2) / [1e6, 0.01]


def _limits(axes: Any) -> None:
    """From zero on; at least 10 points high, so that little does not look like much."""
    data = [line.get_xydata() for line in axes.lines if len(line.get_xydata())]
    points = np.concatenate(data) if data else np.zeros((1, 2))
    axes.set_xlim(0, 1.1 * max(points[:, 0].max(), 1e-9))
    axes.set_ylim(-0.5, max(10.0, 1.12 * points[:, 1].max()))


def needle_tasks(group: Quality) -> list[str]:
    """The tasks that tell their scores by depth and length of the prompt."""
    names = dict.fromkeys(column.task for column in group.columns)
    return [n for n in names if any(_cells(group, row, n) for row in group.rows)]


def draw_needles(group: Quality, task: str, path: pathlib.Path) -> None:
    """Writes a panel per method and budget: the score by depth and by length."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        _needles(group, task).savefig(path)


def _needles(group: Quality, task: str) -> Any:
    found = {row: cells for row in group.rows if (cells := _cells(group, row, task))}
    lengths = sorted({length for cells in found.values() for length, _ in cells})
    depths = sorted({depth for cells in found.values() for _, depth in cells})
    size = 1.4 + 0.5 * len(lengths), 1.1 + 0.28 * len(depths)
    figure, panels = _panels(len(found), (max(2.7, size[0]), max(1.9, size[1])), 4)
    for axes, (row, cells) in zip(panels, found.items(), strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for (length, depth), score in cells.items():
            grid[depths.index(depth), lengths.index(length)] = score
        _map(axes, grid, row)
        axes.set_xticks(range(len(lengths)), [f"{n:,.0f}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for axes in panels:
        axes.set_xlabel("prompt (tokens)")
        axes.set_ylabel("depth of the key")
    return figure


def _cells(group: Quality, row: Row, task: str) -> dict[tuple[float, float], float]:
    """A task's mean scores by length and depth, over all lengths that were asked."""
    scores: dict[tuple[float, float], list[float]] = {}
    for (found_row, column), found in group.found.items():
        if (found_row, column.task) != (row, task):
            continue
        for cell in found.task.get("cells", ()):
            length = cell.get("length", column.prompt_tokens)
            if "depth" in cell and length:
                repeated = [cell["score"]] * cell.get("examples", 1)
                scores.setdefault((length, cell["depth"]), []).extend(repeated)
    return {place: float(np.mean(each)) for place, each in scores.items()}


def survivor_columns(group: Quality) -> list[Column]:
    """The tasks of which runs wrote down what is left of a prompt."""
    told = {c for (_, c), found in group.found.items() if found.task.get("survivors")}
    return [column for column in group.columns if column in told]


def draw_survivors(group: Quality, column: Column, path: pathlib.Path) -> None:
    """Writes a panel per method and budget: share of pairs kept, by layer and place."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        _survivors(group, column).savefig(path)


def _survivors(group: Quality, column: Column) -> Any:
    found = {row: group.found.get((row, column)) for row in group.rows}
    told = {row: f.task.get("survivors") for row, f in found.items() if f}
    maps = {row: drawing for row, drawing in told.items() if drawing}
    figure, panels = _panels(len(maps), (3.4, 2.4))
    for axes, (row, drawing) in zip(panels, maps.items(), strict=True):
        kept = survivors.shares(drawing)
        shown = axes.imshow(
            kept,
            vmin=0,
            vmax=1,
            cmap=_COLOUR_MAP,
            aspect="auto",
            interpolation="nearest",
            extent=(0, 100, len(kept) - 0.5, -0.5),
        )
        _title(axes, row)
        axes.set_xlabel("place in the prompt (%)")
        axes.set_ylabel("layer")
    figure.colorbar(shown, ax=panels, label="share of pairs kept")
    return figure


def _map(axes: Any, grid: np.ndarray, row: Row) -> None:
    """One panel: bright where the key is found, the share written into each cell."""
    import matplotlib

    colours = matplotlib.colormaps[_COLOUR_MAP].with_extremes(bad="#EEEEEE")
    axes.imshow(np.ma.masked_invalid(grid), vmin=0, vmax=1, cmap=colours, aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        style = {"ha": "center", "va": "center", "fontsize": 9}
        style["color"] = "black" if not value < 0.6 else "white"
        axes.text(j, i, f"{value:.0%}" if np.isfinite(value) else "-", **style)
    _title(axes, row)


def _title(axes: Any, row: Row) -> None:
    """Above a panel: the method, and under it budget and schedule."""
    axes.set_title(row.label, loc="left", fontsize=11, fontweight="bold", pad=18)
    note = {"xytext": (0, 5), "textcoords": "offset points", "color": GREY}
    axes.annotate(
        f"{row.budget}, {row.schedule}",
        (0, 1),
        **note,
        xycoords="axes fraction",
        size=9,
    )
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _panels(
    count: int, size: tuple[float, float], most: int = _PANELS
) -> tuple[Any, Sequence[Any]]:
    """A figure of so many panels of that many inches, a few in a row."""
    across = min(count, most)
    down = math.ceil(count / across)
    figure = new_figure((max(7.5, across * size[0]), 0.9 + down * size[1]))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]
