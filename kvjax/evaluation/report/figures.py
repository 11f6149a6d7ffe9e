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
from kvjax.evaluation.report.records import Record, survivor_shares

# Okabe & Ito's palette, safe for colour-blind readers, without its yellow, too pale on
# white. Black is the full cache's. 6 colours and 11 shapes repeat after 66 methods.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SHAPES = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p", "d")
GREY = "#595959"
_STYLE = pathlib.Path(__file__).with_suffix(".mplstyle")
_COLOUR_MAP = "cividis"  # safe for colour-blind readers; monotonic in lightness
_MISSING = "#EEEEEE"
MARKER = 10.0  # points across
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
    return figure_about(size, _about(list(records)))


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


def _about(records: Sequence[Record]) -> str:
    model = next((r["model"] for r in records if r.get("model")), "unknown model")
    limits = dict.fromkeys(tables.megabytes(r.get("memory_bytes")) for r in records)
    return f"{model}, memory limit {' / '.join(limits)} MB"


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


def marks_by_rule(records: Sequence[Record], full: Record | None) -> list[Mark]:
    """Returns a distinct mark for each record; the full cache (by identity) is a star.

    Where several methods share a policy, they share its colour, if colours suffice.
    """
    others = [record for record in records if record is not full]
    policies, *more = (
        [str(record.get(name)) for record in others]
        for name in ("policy", "codec", "budget_rule", "schedule")
    )
    marks = iter(_crossed(policies, *more) or marks_of(others))
    return [FULL if record is full else next(marks) for record in records]


def _crossed(policies: Sequence[str], *others: Sequence[Any]) -> list[Mark] | None:
    """Returns a colour for each policy, and a shape for each value of another trait.

    It uses the first of `others` that distinguishes methods of one policy; None if none
    does, or if colours or shapes do not suffice.
    """
    for traits in others:
        methods = list(zip(policies, traits, strict=True))
        colours = dict(zip(dict.fromkeys(policies), _COLOURS, strict=False))
        shapes = dict(zip(dict.fromkeys(traits), _SHAPES, strict=False))
        known = colours.keys() >= set(policies) and shapes.keys() >= set(traits)
        if known and len(set(methods)) == len(methods) > len(colours):
            return [Mark(colours[policy], shapes[trait]) for policy, trait in methods]
    return None


def look(mark: Mark, hollow: bool = False) -> dict[str, Any]:
    """Returns a mark as properties of matplotlib's `Line2D`."""
    return {
        "linestyle": "none",
        "marker": mark.shape,
        "markersize": MARKER * (1.5 if mark.shape == "*" else 1),
        "markerfacecolor": "white" if hollow else mark.colour,
        "markeredgecolor": mark.colour if hollow else "white",
    }


def joined(mark: Mark, hollow: bool = False) -> dict[str, Any]:
    """Returns a smaller mark with a line of its colour."""
    style = look(mark, hollow)
    style["markersize"] *= 0.8
    return style | {"color": mark.colour, "linestyle": "-"}


def legend(figure: Any, looks: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Adds a legend below all panels."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], **each | {"label": name, "linestyle": "none"})
        for each, name in zip(looks, names, strict=True)
    ]
    columns = legend_columns(names, figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def legend_columns(names: Sequence[str], width: float) -> int:
    """Returns the number of columns of a legend of `width` inches."""
    letters = int(11 * width)  # about
    return max(1, min(len(names), letters // (max(map(len, names)) + 6)))


def legend_rows(names: Sequence[str], width: float) -> int:
    """Returns the number of lines of such a legend."""
    return math.ceil(len(names) / legend_columns(names, width))


def not_measured(axes: Any) -> None:
    """Writes "not measured" in the middle of an empty panel."""
    middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.text(0.5, 0.5, "not measured", color=GREY, **middle)


# --- maps -----------------------------------------------------------------------------


def heat_map(records: Sequence[Record]) -> Any:
    """Draws a sweep's score and KL, if known: series by schedules and budgets."""
    from matplotlib.colors import Normalize

    frame, full = groups.sweep(records), groups.full_cache(records)
    settings = frame[["setting", "slots"]].drop_duplicates()
    means = frame.assign(kl=np.log(frame["kl"] + KL_ZERO)).groupby("series", sort=False)
    means = (
        means[["score", "kl"]].mean().round(9)
    )  # equal means may differ in the last bits
    best = means.sort_values(["score", "kl"], ascending=[False, True], kind="stable")
    names, across = best.index, list(map(tuple, settings.to_numpy()))
    cells = frame.drop_duplicates(["series", "setting", "slots"])
    cells = cells.set_index(["series", "setting", "slots"])[["score", "kl"]]
    cells = cells.unstack(["setting", "slots"])
    score, kl = (cells[key].loc[names, across].to_numpy() for key in ("score", "kl"))
    count = 1 + bool(frame["kl"].notna().any())
    width = max(3.5, 0.4 * len(across))
    over = _ColumnNames(list(settings["setting"]), width / len(across))
    size = (1.5 + width) * count, 1.5 + over.height / 72 + 0.29 * len(names)
    figure = new_figure(size, records)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    known = full.get("score") is not None
    reference = f"; full cache {full['score']:.2f}" if known else ""
    title = {"loc": "left", "pad": 22 + over.height, "fontsize": 11}
    panels[0].set_title(groups.score_of(records).title + reference, **title)
    _cells(panels[0], score, Normalize(0, 1), "{:.2f}")
    for axes in panels[1:]:
        axes.set_title("KL from full cache (nats per token)", **title)
        _cells(axes, kl, _kl_scale(kl), "{:.2g}", reverse=True)
    for axes in panels:
        axes.tick_params(top=False, labeltop=True, labelbottom=False)
        axes.set_xticks(range(len(settings)), settings["slots"])
        over.write(axes)
    panels[0].set_yticks(range(len(names)), names, color="black")
    return figure


def _kl_scale(kl: np.ndarray) -> Any:
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
    colours = colours.with_extremes(bad=_MISSING)
    axes.imshow(np.ma.masked_invalid(grid), norm=scale, cmap=colours, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        shown = "<.001" if 0 < value < 1e-3 else form.format(value) if known else "-"
        red, green, blue, _ = colours(scale(value)) if known else (1, 1, 1, 1)
        bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        style = {"fontsize": 9, "ha": "center", "va": "center"}
        axes.text(column, row, shown, color="black" if bright else "white", **style)
    _plain(axes)


def _plain(axes: Any) -> None:
    """Removes grid, frame and ticks."""
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


class _ColumnNames:
    """Names of settings above their columns, with a gap between settings.

    All names are vertical if one would be wider than its columns of `width` inches.

    Attributes:
      height: of the highest name, in points.
    """

    def __init__(self, settings: Sequence[str], width: float):
        same = [(name, len(list(run))) for name, run in itertools.groupby(settings)]
        letter = 0.07  # inches, about
        self._columns = [count for _, count in same]
        self._names = [_over_columns(name) for name, _ in same]
        self._vertical = any(
            letter * max(map(len, name.split("\n"))) > 0.5 + count * width
            for name, count in zip(self._names, self._columns, strict=True)
        )
        if self._vertical:
            self._names = [name.replace("\n", " ") for name in self._names]
            self.height = 72 * letter * max(map(len, self._names))
        else:
            self.height = 12 * max(1 + name.count("\n") for name in self._names)

    def write(self, axes: Any) -> None:
        """Writes the names above a map."""
        start = 0
        for name, count in zip(self._names, self._columns, strict=True):
            axes.annotate(
                name,
                (start + (count - 1) / 2, 1),
                (0, 18),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if self._vertical else 0,
                fontsize=9,
                color=GREY,
            )
            start += count
            if start < sum(self._columns):
                axes.axvline(start - 0.5, color="white", lw=5)


def _over_columns(setting: str) -> str:
    """Returns a schedule's name, with a budget rule on a separate line."""
    return f"{setting}, |kv| =".replace(", ", ",\n" if ", " in setting else ", ")


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
        _title(axes, row)
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


def survivor_columns(group: Quality) -> list[str]:
    """Returns the tasks whose records have survivor maps."""
    told = [bool(task.get("survivors")) for task in group.answers["task"]]
    return [c for c in group.columns if c in set(group.answers["column"][told])]


def survivors(group: Quality, column: str) -> Any:
    """Draws the share of pairs kept by layer and position, a panel per method."""
    found = group.answers[group.answers["column"] == column]
    rows = found[groups.ROW].itertuples(index=False, name=None)
    maps = {r: t.get("survivors") for r, t in zip(rows, found["task"], strict=True)}
    maps = {row: maps[row] for row in group.rows if maps.get(row)}
    figure, panels = new_panels(len(maps), (3.4, 2.4), found["record"])
    for axes, (row, drawn) in zip(panels, maps.items(), strict=True):
        kept = survivor_shares(drawn)
        shown = axes.imshow(
            kept,
            vmin=0,
            vmax=1,
            cmap=_COLOUR_MAP,
            aspect="auto",
            interpolation="nearest",
            extent=(0, 100, len(kept) - 0.5, -0.5),
        )
        _plain(axes)
        _title(axes, row)
        axes.set_xlabel("place in the prompt (%)")
        axes.set_ylabel("layer")
    _bar(shown, panels, "share of pairs kept")
    return figure


def with_sizes(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Returns one record per set of unequal head sizes, with its methods' names."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.get("sizes"):
            found.setdefault(str(record["sizes"]), {})[record["method"]] = record
    return [("; ".join(same), next(iter(same.values()))) for same in found.values()]


def head_sizes(records: Sequence[Record]) -> Any:
    """Draws slots by layer and head, a panel per set of unequal head sizes."""
    names, found = zip(*with_sizes(records), strict=True)
    grids = [np.asarray(record["sizes"]) for record in found]
    down, across = np.max([grid.shape for grid in grids], axis=0)
    size = max(3.4, 1.2 + 0.25 * across), 1.4 + 0.13 * down
    figure, panels = new_panels(len(found), size, found)
    scale, ticks = _scale_of_sizes(grids)
    for axes, name, record, grid in zip(panels, names, found, grids, strict=True):
        style = {"cmap": _COLOUR_MAP, "aspect": "auto", "interpolation": "nearest"}
        shown = axes.imshow(grid, norm=scale, **style)
        _plain(axes)
        _over(axes, name, f"slots: {groups.spread(record)}")
        axes.set_xticks(range(0, grid.shape[1], math.ceil(grid.shape[1] / 8)))
        axes.set_xlabel("KV head")
        axes.set_ylabel("layer")
    bar = _bar(shown, panels, "slots per head")
    bar.minorticks_off()
    bar.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    return figure


def _scale_of_sizes(grids: Sequence[np.ndarray]) -> tuple[Any, list[int]]:
    """Returns a colour scale over head sizes, logarithmic if they are far apart.

    Its ticks are both ends, and between them fifths, or powers of two.
    """
    from matplotlib.colors import LogNorm, Normalize

    least, most = min(map(np.min, grids)), max(map(np.max, grids))
    if most <= 4 * least:
        return Normalize(least, most), np.linspace(least, most, 6).astype(int).tolist()
    powers = [1 << n for n in range(int(most).bit_length())]
    apart = [each for each in powers if 1.3 * least < each < most / 1.3]
    return LogNorm(least, most), [int(least), *apart, int(most)]


def _bar(shown: Any, panels: Sequence[Any], label: str) -> Any:
    """Adds a colour bar beside all panels, of the same width for many and for few."""
    figure = panels[0].figure
    thin = max(20, 4 * figure.get_figheight())
    return figure.colorbar(shown, ax=panels, label=label, aspect=thin)


def _title(axes: Any, row: tuple) -> None:
    """Writes the method above a panel, and under it budget, schedule and codec."""
    series, schedule, budget, codec = row
    _over(axes, series, groups.joined(budget, schedule, codec))


def _over(axes: Any, title: str, details: str) -> None:
    """Writes a title above a panel and details under it, no wider than the panel."""
    columns = axes.get_subplotspec().get_gridspec().ncols
    inches = axes.figure.get_figwidth() / columns
    titles = textwrap.wrap(title, int(8.5 * inches))
    lines = textwrap.wrap(details, int(12 * inches))
    below, height = 5 + 12 * len(lines), 15 * len(titles)  # points
    style = {"fontsize": 11, "fontweight": "bold", "pad": below}
    over = axes.set_title("\n".join(titles), loc="left", **style)
    at = {"xycoords": "axes fraction", "textcoords": "offset points", "size": 9}
    note = axes.annotate("\n".join(lines), (0, 1), (0, 5), color=GREY, **at)
    axes.annotate(" ", (0, 1), (0, below + height - 12), **at)  # keeps room for them,
    over.set_in_layout(False)  # as they may stand over the next panel's numbers
    note.set_in_layout(False)
