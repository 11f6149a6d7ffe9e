"""The picture of throughput records: rates against batch, measured and predicted."""

import pathlib
from collections.abc import Sequence

import numpy as np

from kvjax.evaluation.report import cells
from kvjax.evaluation.report.pictures import (
    GREY,
    STYLE,
    legend,
    legend_rows,
    look,
    marks_of,
    new_figure,
)
from kvjax.evaluation.report.records import Record

_FAR = 30  # times the slowest: a linear axis would hide it
_APART = 0.19  # inches between records of one batch


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Writes a panel per number of new tokens: generated tokens/s against the batch.

    What the roofline allows is hollow, above the measurement of the same colour. A
    record that lacks a batch, or other engines' a prediction, is left out there.

    Args:
      records: as `kvjax.evaluation.throughput` makes them, those of other engines included.
      path: of the picture.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        _figure(records).savefig(path)


def _figure(records: Sequence[Record]):
    news = list(dict.fromkeys(r.get("new_tokens") for r in records))
    methods: dict[str, Record] = {}
    for record in records:
        methods.setdefault(cells.text(record.get("method")), record)
    full = next((r for r in methods.values() if r.get("role") == "full"), {})
    marks = dict(zip(methods, marks_of(list(methods.values()), full), strict=True))
    predicted = {"label": "roofline's prediction", "ls": "none", "marker": "o"}
    extra = [predicted | {"mfc": "white", "mec": GREY, "markersize": 8}]
    width = 4.2 * max(2, len(news))
    named = [*marks, predicted["label"]]
    figure = new_figure((width, 4.2 + 0.28 * legend_rows(named, width)))
    panels = figure.subplots(1, len(news), squeeze=False)[0]
    for axes, new in zip(panels, news, strict=True):
        axes.set_title(f"{cells.text(new)} new tokens", loc="left", fontweight="bold")
        axes.set_xlabel("batch (prompts decoding at a time)")
        members = [r for r in records if r.get("new_tokens") == new]
        _axes(axes, members)
        _points(axes, members, marks)
    panels[0].set_ylabel("end to end (generated tokens/s)")
    legend(figure, list(marks.values()), list(marks), extra)
    return figure


def _axes(axes, records: Sequence[Record]) -> None:
    """Batches on a logarithmic axis; rates from zero, if they are of one size."""
    rates = [_rates(r) for r in records]
    known = [value for pair in rates for value in pair if np.isfinite(value)]
    if known and max(known) > _FAR * min(known):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.12 * max(known, default=1.0))
    batches = sorted({r["batch"] for r in records if r.get("batch")} or {1})
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    apart = [b for a, b in zip([0, *batches], batches, strict=False) if b > 1.1 * a]
    axes.set_xticks(apart, [str(batch) for batch in apart])
    axes.tick_params(axis="x", which="minor", length=0)


def _points(axes, records: Sequence[Record], marks: dict) -> None:
    """A post per record, measurement to prediction; those of a batch side by side."""
    from matplotlib.transforms import ScaledTranslation

    if not any(r.get("batch") and np.isfinite(_rates(r)[0]) for r in records):
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "not measured", color=GREY, **middle)
    for record in records:
        peers = [r for r in records if r.get("batch") == record.get("batch")]
        place = [r is record for r in peers].index(True) - (len(peers) - 1) / 2
        aside = ScaledTranslation(place * _APART, 0, axes.figure.dpi_scale_trans)
        mark = marks[cells.text(record.get("method"))]
        x, (y, limit) = record.get("batch") or np.nan, _rates(record)
        put = {"transform": axes.transData + aside, "clip_on": False}
        axes.plot([x, x], [y, limit], color=mark.colour, lw=0.8, zorder=2, **put)
        hollow = {"markerfacecolor": "white", "markeredgecolor": mark.colour}
        axes.plot(x, limit, **look(mark) | hollow, zorder=2.5, **put)
        axes.plot(x, y, **look(mark), zorder=3, **put)


def _rates(record: Record) -> tuple[float, float]:
    """Measured and predicted tokens per second; NaN where unknown."""
    keys = ("tokens_per_s", "predicted_tokens_per_s")
    values = [cells.finite(record.get(key)) for key in keys]
    return tuple(np.nan if value is None else value for value in values)
