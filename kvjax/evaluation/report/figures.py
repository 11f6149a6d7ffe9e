"""Figures: their common style, marks, legends and panels, and the maps.

Functions return figures; `save` writes them and sets the style. matplotlib is imported
where it is used, because most users of the package draw nothing.
"""

import itertools
import math
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvjax.evaluation import files
from kvjax.evaluation.report import groups, tables
from kvjax.evaluation.report.groups import Quality
from kvjax.evaluation.report.records import Record

# Okabe & Ito's palette, safe for colour-blind readers, without its yellow, too pale on
# white. Black is the full cache's. 6 colours and 11 shapes repeat after 66 methods.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SHAPES = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p", "d")
GREY = "#595959"
_STYLE = pathlib.Path(__file__).with_suffix(".mplstyle")
_COLOUR_MAP = "cividis"  # safe for colour-blind readers; monotonic in lightness
KL_ZERO = 1e-4  # nats per token; smaller values are drawn as zero


class Mark(NamedTuple):
    """The colour and shape of a method in every picture."""

    colour: str
    shape: str


FULL = Mark("black", "*")


def save(path: str | os.PathLike, figure_of: Callable[..., Any], *args: Any) -> None:
    """Writes the figure that a function returns, in the common style."""
    from matplotlib import style

    with style.context(_STYLE), files.written(path) as partial:
        figure_of(*args).savefig(partial)


def new_figure(size: tuple[float, float], records: Iterable[Record]) -> Any:
    """Returns a figure of `size` inches with the records' model and memory limit."""
    records = list(records)
    model = next((r["model"] for r in records if r.get("model")), "unknown model")
    limits = dict.fromkeys(tables.megabytes(r.get("memory_bytes")) for r in records)
    return figure_about(size, f"{model}, memory limit {' / '.join(limits)} MB")


def figure_about(size: tuple[float, float], about: str) -> Any:
    """Returns a figure of `size` inches with a line of text at the top right.

    pyplot does not know the figure: it need not be closed and sets no backend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04)
    figure.suptitle(about, x=0.99, ha="right", fontsize=8, color=GREY)
    return figure


def new_panels(
    count: int, size: tuple[float, float], records: Iterable[Record], most: int = 3
) -> tuple[Any, Sequence[Any]]:
    """Returns a figure of `count` panels of `size` inches, at most `most` in a row."""
    across = min(count, most)
    down = math.ceil(count / across)
    figure = new_figure((max(7.5, across * size[0]), 0.9 + down * size[1]), records)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


# --- marks and legends ----------------------------------------------------------------


def marks_of(methods: Sequence[Any]) -> list[Mark]:
    """Returns a distinct mark for each method."""
    return [
        Mark(_COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)])
        for i in range(len(methods))
    ]


def marks_by_policy(records: Sequence[Record], full: Record | None) -> list[Mark]:
    """Returns a distinct mark for each record; the full cache (by identity) is a star.

    Where several methods share a policy, they share its colour, if colours suffice.
    """
    others = [record for record in records if record is not full]
    policies, *more = (
        [str(record.get(name)) for record in others]
        for name in ("policy", "codec", "budget_rule", "schedule")
    )
    crossed = (_crossed(policies, traits) for traits in more)
    marks = iter(next(filter(None, crossed), marks_of(others)))
    return [FULL if record is full else next(marks) for record in records]


def _crossed(policies: Sequence[str], traits: Sequence[str]) -> list[Mark] | None:
    """Returns a colour for each policy, and a shape for each value of another trait.

    None if the two do not distinguish all methods, if every method has a policy of its
    own, or if colours or shapes do not suffice.
    """
    colours = dict(zip(dict.fromkeys(policies), _COLOURS, strict=False))
    shapes = dict(zip(dict.fromkeys(traits), _SHAPES, strict=False))
    methods = list(zip(policies, traits, strict=True))
    known = colours.keys() >= {*policies} and shapes.keys() >= {*traits}
    if not known or not len({*methods}) == len(methods) > len(colours):
        return None
    return [Mark(colours[policy], shapes[trait]) for policy, trait in methods]


def look(mark: Mark, hollow: bool = False) -> dict[str, Any]:
    """Returns a mark as properties of matplotlib's `Line2D`."""
    return {
        "linestyle": "none",
        "marker": mark.shape,
        "markersize": 15 if mark == FULL else 10,
        "markerfacecolor": "white" if hollow else mark.colour,
        "markeredgecolor": mark.colour if hollow else "white",
    }


def joined(mark: Mark, hollow: bool = False) -> dict[str, Any]:
    """Returns a smaller mark with a line of its colour."""
    style = look(mark, hollow)
    style["markersize"] *= 0.8
    return style | {"color": mark.colour, "linestyle": "-"}


def legend(figure: Any, looks: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Adds a legend under the figure, which `save` makes room for."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], **each | {"label": name, "linestyle": "none"})
        for each, name in zip(looks, names, strict=True)
    ]
    letters = int(11 * figure.get_figwidth())  # that fit in a line, about
    columns = max(1, min(len(names), letters // (max(map(len, names)) + 6)))
    under = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    figure.legend(handles=handles, ncols=columns, **under)


# --- maps -----------------------------------------------------------------------------


def heat_map(records: Sequence[Record]) -> Any:
    """Draws a sweep's score and KL, if known, a panel per measure and schedule.

    Series are sorted by their mean score, then by their mean KL; budgets are columns.
    """
    from matplotlib.colors import Normalize

    frame, full = groups.sweep(records), groups.full_cache(records)
    means = frame.assign(kl=np.log(frame["kl"] + KL_ZERO)).groupby("series", sort=False)
    means = means[["score", "kl"]].mean().round(9)  # equal but for their last bits
    best = means.sort_values(["score", "kl"], ascending=[False, True], kind="stable")
    score = groups.score_of(records).title
    if full.get("score") is not None:
        score += f"; full cache {full['score']:.2f}"
    measures = {"score": (score, Normalize(0, 1), "{:.2f}")}
    if frame["kl"].notna().any():
        kl = "KL from full cache (nats per token)"
        measures["kl"] = kl, _kl_scale(frame["kl"]), "{:.2g}"
    columns = frame.groupby("setting", sort=False)["slots"].unique()
    widths = [max(1.8, 0.62 * len(slots)) for slots in columns] * len(measures)
    size = 1.8 + sum(widths), 1.6 + 0.29 * len(best)
    figure = new_figure(size, records)
    panels = figure.subplots(
        1, len(widths), sharey=True, squeeze=False, width_ratios=widths
    )[0]
    cells = frame.drop_duplicates(["series", "setting", "slots"])
    each = itertools.product(measures, columns.items())
    for axes, width, (key, (name, slots)) in zip(panels, widths, each, strict=True):
        title, scale, form = measures[key]
        grid = cells[cells["setting"] == name].pivot(
            index="series", columns="slots", values=key
        )
        grid = grid.reindex(index=best.index, columns=slots).to_numpy()
        _cells(axes, grid, scale, form, reverse=key == "kl")
        _title(axes, width, title, name)
        axes.tick_params(top=False, labeltop=True, labelbottom=False)
        axes.set_xticks(range(len(slots)), slots)
        axes.set_xlabel("KV slots", color=GREY)
    panels[0].set_yticks(range(len(best)), best.index, color="black")
    return figure


def _kl_scale(kl: pd.Series) -> Any:
    """Returns a logarithmic colour scale between the smallest and the largest KL."""
    from matplotlib.colors import LogNorm

    above = kl[kl > 0]
    low, high = (above.min(), above.max()) if above.size else (0.1, 1.0)
    low = max(low, 1e-3)
    return LogNorm(low, max(high, 2 * low), clip=True)


def _cells(
    axes: Any, grid: np.ndarray, scale: Any, form: str, reverse: bool = False
) -> None:
    """Draws coloured cells with their numbers; bright is good."""
    import matplotlib

    colours = matplotlib.colormaps[_COLOUR_MAP + ("_r" if reverse else "")]
    colours = colours.with_extremes(bad="#EEEEEE")
    _image(axes, np.ma.masked_invalid(grid), norm=scale, cmap=colours)
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        shown = "<.001" if 0 < value < 1e-3 else form.format(value) if known else "-"
        red, green, blue, _ = colours(scale(value)) if known else (1, 1, 1, 1)
        bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        style = {"fontsize": 9, "ha": "center", "va": "center"}
        axes.text(column, row, shown, color="black" if bright else "white", **style)


def _image(axes: Any, grid: Any, **style: Any) -> Any:
    """Draws an array as cells that fill the panel, without grid, frame and ticks."""
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.imshow(grid, aspect="auto", interpolation="nearest", **style)


def _title(axes: Any, width: float, *lines: str) -> None:
    """Writes lines above a panel, wrapped to its `width` in inches."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, int(13 * width))]
    axes.set_title("\n".join(wrapped), loc="left", fontsize=9)


def needle_tasks(group: Quality) -> list[str]:
    """Returns the tasks with scores by depth and length of the prompt."""
    return list(_needle_cells(group)["name"].unique())


def needle_map(group: Quality, task: str) -> Any:
    """Draws the score by depth and length, a panel per method and budget."""
    from matplotlib.colors import Normalize

    cells = _needle_cells(group)
    cells = cells[cells["name"] == task]
    grid = cells.groupby([*groups.ROW, "depth", "length"])["score"].mean()
    depths, lengths = (sorted(cells[key].unique()) for key in ("depth", "length"))
    known = set(cells[groups.ROW].itertuples(index=False, name=None))
    found = [row for row in group.rows if row in known]
    size = max(2.7, 1.4 + 0.5 * len(lengths)), max(1.9, 1.1 + 0.28 * len(depths))
    figure, panels = new_panels(len(found), size, group.answers["record"], 4)
    for axes, row in zip(panels, found, strict=True):
        shown = grid.loc[row].unstack().reindex(index=depths, columns=lengths)
        _cells(axes, shown.to_numpy(), Normalize(0, 1), "{:.0%}")
        series, schedule, budget, codec = row
        _title(axes, size[0] - 1, series, groups.joined(budget, schedule, codec))
        axes.set_xticks(range(len(lengths)), [f"{n:,.0f}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_xlabel("prompt (tokens)")
        axes.set_ylabel("depth of the key")
    return figure


def _needle_cells(group: Quality) -> pd.DataFrame:
    """Returns a row per prompt of known depth and length, with its mean score."""
    cells = [
        {key: answer[key] for key in (*groups.ROW, "name")}
        | {"length": answer["prompt_tokens"]}
        | {key: each[key] for key in ("depth", "length", "score") if key in each}
        for answer in group.answers.to_dict("records")
        for each in answer["task"].get("breakdown", ())
        for _ in range(each.get("num_examples", 1))
    ]
    known = [*groups.ROW, "name", "depth", "length", "score"]
    return pd.DataFrame(cells, columns=known).dropna(subset=["depth", "length"])


def with_sizes(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Returns one record per set of unequal head sizes, with its methods' names."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.get("sizes"):
            found.setdefault(str(record["sizes"]), {})[record["method"]] = record
    return [("; ".join(same), next(iter(same.values()))) for same in found.values()]


def head_sizes(records: Sequence[Record]) -> Any:
    """Draws slots by layer and head, a panel per set of unequal head sizes."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator, NullLocator

    names, found = zip(*with_sizes(records), strict=True)
    grids = [np.asarray(record["sizes"]) for record in found]
    down, across = np.max([grid.shape for grid in grids], axis=0)
    size = max(3.4, 1.2 + 0.25 * across), 1.4 + 0.13 * down
    figure, panels = new_panels(len(found), size, found)
    least, most = min(map(np.min, grids)), max(map(np.max, grids))
    far = most > 4 * least
    scale = (LogNorm if far else Normalize)(least, most)
    for axes, name, record, grid in zip(panels, names, found, grids, strict=True):
        shown = _image(axes, grid, norm=scale, cmap=_COLOUR_MAP)
        _title(axes, size[0] - 1, name, f"slots: {groups.spread(record)}")
        axes.set_xticks(range(0, grid.shape[1], math.ceil(grid.shape[1] / 8)))
        axes.set_xlabel("KV head")
        axes.set_ylabel("layer")
    thin = max(20, 4 * figure.get_figheight())  # as wide for many panels as for few
    bar = figure.colorbar(
        shown, ax=list(panels), label="slots per head", aspect=thin, format="{x:,.0f}"
    )
    if far:
        bar.ax.yaxis.set_major_locator(LogLocator(2))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    return figure
