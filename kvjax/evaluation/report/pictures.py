"""The pictures of a report: quality and throughput against memory."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.report import cells
from kvjax.evaluation.report.records import Record

# Okabe & Ito's palette, safe for colour-blind readers, without its yellow, too pale on
# white. Black is the full cache's. 6 colours and 7 shapes repeat after 42 methods.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SHAPES = ("o", "s", "D", "^", "v", "P", "X")
GREY = "#595959"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
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
    "xtick.color": GREY,
    "ytick.color": GREY,
}
_MARKER = 10.0  # points across
_MEMORY = "KV cache per prompt, peak (MB)"
KL_ZERO = 1e-4  # nats per token; what lies below is drawn as none


class Mark(NamedTuple):
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
      records: one per method, as `kvjax.evaluation.report.records` describes them.
      labels: what the pictures call each.
      full: the record of the full cache, drawn as a black star; empty if there is none.
      workdir: an existing folder.
    """
    import matplotlib

    marks = marks_of(records, full)
    with matplotlib.rc_context(STYLE):
        quality = _quality(records, marks, labels)
        quality.savefig(workdir / "quality_vs_memory.png")
        throughput = _throughput(records, marks, labels)
        throughput.savefig(workdir / "throughput_vs_memory.png")


def _quality(
    records: Sequence[Record], marks: Sequence[Mark], labels: Sequence[str]
) -> Any:
    figure, (left, right) = _figure(2)
    found, quality = _points(records, "accuracy"), cells.quality_of(records)
    _titles(left, quality.title, quality.axis, "better ↖")
    left.set_ylim(-0.05, 1.05)
    if any(r.get("kl") is not None for r in records):
        _titles(right, "Distance from full cache", "KL (nats per token)", "better ↙")
        close = log_axis(right, _points(records, "kl"))
    else:
        _titles(right, "Agreement with full cache", "top-1 (share)", "better ↖")
        close = _points(records, "top1_agreement")
        right.set_ylim(-0.05, 1.05)
    _fill(figure, [(left, found), (right, close)], marks, labels)
    return figure


def _throughput(
    records: Sequence[Record], marks: Sequence[Mark], labels: Sequence[str]
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
    marks: Sequence[Mark],
    labels: Sequence[str],
) -> None:
    """Draws points f[N, 2] into each panel, and one legend below them all."""
    legend(figure, marks, labels)
    for axes, points in panels:
        axes.set_xlim(_span(points[:, 0]))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, pixels keep their meaning
    for axes, points in panels:
        _scatter(axes, points, marks)


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    """A figure of panels side by side."""
    figure = new_figure((9, 4.6))
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _titles(axes: Any, title: str, y: str, hint: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(hint, loc="right", color=GREY)
    axes.set_xlabel(_MEMORY)
    axes.set_ylabel(y)


def marks_of(records: Sequence[Record], full: Record) -> list[Mark]:
    """A look of its own for each record; the full cache's is a black star."""
    coloured = itertools.count()
    return [
        Mark("black", "*") if record is full else _mark(next(coloured))
        for record in records
    ]


def _mark(index: int) -> Mark:
    return Mark(_COLOURS[index % len(_COLOURS)], _SHAPES[index % len(_SHAPES)])


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


def log_axis(axes: Any, points: np.ndarray) -> np.ndarray:
    """Makes y logarithmic, with a place for zero at its foot; returns what to draw."""
    y = points[:, 1]
    above = y[np.isfinite(y) & (y > KL_ZERO)]
    low = math.floor(math.log10(above.min())) if above.size else -1
    high = math.ceil(math.log10(above.max())) if above.size else 0
    foot = 10.0 ** (low - 1)
    axes.set_yscale("log")
    axes.set_ylim(foot / 1.6, 10.0 ** max(high, low + 1) * 1.3)
    decades = 10.0 ** np.arange(low, max(high, low + 1) + 1)
    axes.set_yticks([foot, *decades], ["0", *(f"{d:g}" for d in decades)])
    axes.tick_params(axis="y", which="minor", length=0)
    axes.axhline(foot * 10**0.5, color=GREY, lw=0.8, ls=":")  # zero is no decade
    return np.stack([points[:, 0], np.where(y <= KL_ZERO, foot, y)], axis=1)


def legend(
    figure: Any,
    marks: Sequence[Mark],
    labels: Sequence[str],
    extra: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes what marks stand for below all panels; `extra` are more lines' looks."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=label, **look(mark))
        for mark, label in zip(marks, labels, strict=True)
    ]
    handles += [Line2D([], [], **each) for each in extra]
    named = [handle.get_label() for handle in handles]
    columns = legend_columns(named, figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels stand side by side in a legend of `width` inches."""
    room = int(11 * width)  # letters, about
    return max(1, min(len(labels), room // (max(map(len, labels)) + 6)))


def legend_rows(labels: Sequence[str], width: float) -> int:
    """How many lines such a legend takes."""
    return math.ceil(len(labels) / legend_columns(labels, width))


def look(mark: Mark) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": mark.shape,
        "markersize": _MARKER * (1.5 if mark.shape == "*" else 1),
        "markerfacecolor": mark.colour,
        "markeredgecolor": "white",
    }


def _scatter(axes: Any, points: np.ndarray, marks: Sequence[Mark]) -> None:
    """Draws the known points; those that would hide each other stand side by side."""
    pixels = axes.transData.transform(points)
    pixels = _apart(pixels, _MARKER * axes.figure.dpi / 72)
    places = axes.transData.inverted().transform(pixels)
    known = np.flatnonzero(np.isfinite(places).all(axis=1))
    for index in known:
        axes.plot(*places[index], clip_on=False, zorder=3, **look(marks[index]))
    if not known.size:
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "not measured", color=GREY, **middle)


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


def new_figure(size: tuple[float, float]) -> Any:
    """A figure of so many inches, unknown to pyplot: nothing to close, no backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04)
    return figure
