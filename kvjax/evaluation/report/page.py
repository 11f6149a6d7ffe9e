"""Reports: of one run's records, of several runs joined, and the leaderboard.

The folder `templates` holds their words and their order.
"""

import base64
import functools
import html
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from kvjax.evaluation import files
from kvjax.evaluation.report import figures, grids, groups, scatters, tables
from kvjax.evaluation.report.groups import Quality, Throughput
from kvjax.evaluation.report.records import PROBES, Record, Source
from kvjax.types import UserError

_SUMMARY = (
    *("policy", "schedule", "budget", "budget_rule", "budget_share", "mean_slots"),
    *("smallest_slots", "largest_slots", "codec", "batch_size", "score", "kl"),
    *("top1_agreement", "prefill_tokens_per_s", "decode_tokens_per_s"),
    *("output_tokens_per_s", *PROBES, "kv_bytes_peak_per_seq"),
)
_SETTING = "model", "device", "memory_bytes", "prompt_tokens", "max_new_tokens", "seed"
_TASK_SUMMARY = ("metric", "score", "num_examples", "interval", "interval_method")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "Δ": r"$\Delta$",
        "†": r"\textdagger{}",
        "‡": r"\textdaggerdbl{}",
        **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    }
)
_LATEX_TAGS = {
    "block_start_string": "((*",
    "block_end_string": "*))",
    "variable_start_string": "((",
    "variable_end_string": "))",
}


# --- one run --------------------------------------------------------------------------


def summary(
    records: Sequence[Record], path: pathlib.Path | None = None
) -> dict[str, Any]:
    """Returns each method's numbers, also relative to the full cache.

    Args:
      records: of a run.
      path: of its report, if one was written.

    Returns:
      {"model", "device", "memory_bytes", "prompt_tokens", "max_new_tokens", "budgets",
      "seed", "full_cache": name or None, "methods": {name: {..., "tasks", "speedup",
      "kv_ratio"}}, "report", "pictures", "versions"}. `speedup` is end-to-end tokens/s
      over the full cache's at the same number of new tokens, None where the probes
      beside them differ by more than a tenth; `kv_ratio` is the same for KV bytes per
      prompt. A field that differs between records is a list. Unknown values, values
      that JSON cannot hold, and the budget of the full cache are None.
    """
    first, names = groups.full_cache(records), groups.names_of(records)
    methods = {}
    for name, record in zip(names, records, strict=True):
        full = groups.full_cache(groups.with_same_new(record, records))
        methods[name] = {
            **{key: groups.finite(record.get(key)) for key in _SUMMARY},
            "tasks": {
                name: {key: task.get(key) for key in _TASK_SUMMARY}
                for name, task in (record.get("tasks") or {}).items()
            },
            "speedup": groups.speedup(record, full),
            "kv_ratio": groups.ratio(record, full, "kv_bytes_peak_per_seq"),
        }
    named = (name for name, r in zip(names, records, strict=True) if r is first)
    setting = {key: _values(records, key) for key in _SETTING}
    return {
        **{k: v if len(v) > 1 else next(iter(v), None) for k, v in setting.items()},
        "budgets": _values(records, "budget"),
        "full_cache": next(named, None),
        "methods": methods,
        "report": str(path) if path else None,
        "pictures": [str(p) for p in _pictures(records, path).values()] if path else [],
        "versions": tables.versions(records),
    }


def _values(records: Sequence[Record], key: str) -> list[Any]:
    """Returns a field's distinct values, None included if a record holds it."""
    found = [record[key] for record in records if key in record]
    return [value for i, value in enumerate(found) if value not in found[:i]]


def _pictures(
    records: Sequence[Record], path: pathlib.Path
) -> dict[Callable[..., Any], pathlib.Path]:
    """Returns the functions that draw a report's pictures, and the path of each."""
    drawn = list(_REPORTS[_kind(records)][1])
    if scatters.throughput_vs_memory in drawn and not _timed(records):
        drawn.remove(scatters.throughput_vs_memory)
    if figures.with_sizes(records):
        drawn.append(figures.head_sizes)
    return {each: path.with_name(f"{each.__name__}.png") for each in drawn}


def _timed(records: Sequence[Record]) -> bool:
    """Returns whether a run measured rates; layer-by-layer runs do not."""
    return any(record.get("output_tokens_per_s") is not None for record in records)


_REPORTS = {  # the table for a screen and the pictures, by the kind of a run
    "throughput": (tables.throughput_table, [scatters.throughput_vs_batch]),
    "sweep": (tables.best_table, [figures.heat_map, scatters.pareto]),
    "run": (
        tables.run_table,
        [scatters.quality_vs_memory, scatters.throughput_vs_memory],
    ),
}


def _kind(records: Sequence[Record]) -> str:
    if groups.is_throughput(records):
        return "throughput"
    return "sweep" if groups.is_sweep(records) else "run"


def overview(records: Sequence[Record], width: int | None = None) -> str:
    """Returns a run's main table in Markdown: of a sweep, the best methods.

    A second table follows where |kv| was searched. `width`: see `grids.markdown`.
    """
    kind = _kind(records)
    table, _ = _REPORTS[kind]
    shown = grids.markdown(table(records), width)
    if any(record.get("tried") for record in records):
        shown += "\n\n" + grids.markdown(tables.search_table(records), width)
    shown += tables.note(records) if kind == "throughput" else ""
    return shown + (tables.probe_note(records) if kind != "sweep" else "")


def write_report(records: Sequence[Record], workdir: str | os.PathLike) -> pathlib.Path:
    """Writes report.md and its pictures into an existing folder; returns its path.

    The pictures are heat_map.png and pareto.png for a sweep, throughput_vs_batch.png
    for throughput, and otherwise quality_vs_memory.png and, where rates were measured,
    throughput_vs_memory.png. head_sizes.png is added where heads of a method differ in
    size.

    Raises:
      ValueError: there are no records.
    """
    if not records:
        raise ValueError("there are no records to report")
    kind, path = _kind(records), pathlib.Path(workdir) / "report.md"
    for picture, place in _pictures(records, path).items():
        figures.save(place, picture, records)
    page = _render(
        "throughput.md" if kind == "throughput" else "run.md",
        records=records,
        overview=overview(records, grids.PAGE),
        score=groups.score_of(records),
        several=len(groups.metrics_of(records)) > 1,
        sweep=kind == "sweep",
        timed=_timed(records),
        probed=any(record.get(key) for record in records for key in PROBES),
        on_host=any(record.get("host_bytes_per_seq") for record in records),
    )
    with files.written(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def _known(records: Sequence[Record], key: str) -> str:
    """Returns a field's distinct known values, bytes in MB."""

    def shown(value):
        if key.endswith("bytes"):
            return tables.megabytes(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    found = [record[key] for record in records if record.get(key) is not None]
    return " / ".join(dict.fromkeys(map(shown, found))) or "unknown"


# --- several runs ---------------------------------------------------------------------


def write_comparison(
    sources: Sequence[Source], folder: str | os.PathLike
) -> dict[str, Any]:
    """Writes report.md, report.html, tables.tex and pictures; makes the folder.

    Returns:
      The files, and each group's differences to the full cache or ratios to ED; it fits
      in one line of JSON.

    Raises:
      UserError: two files answer one question, or the folder cannot be made.
    """
    qualities = groups.quality_groups(sources)
    speeds = groups.throughput_groups(sources)
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None
    pictures = [_draw_quality(g, folder, n) for n, g in enumerate(qualities, 1)]
    for number, group in enumerate(speeds, 1):
        name = f"throughput_{number}.png"
        figures.save(folder / name, scatters.throughput_vs_batch, group.records)
        pictures.append({name: "Throughput by method and batch"})
    page = _comparison(sources, qualities, speeds, pictures)
    texts = {
        "report.md": page,
        "report.html": as_html(page, folder),
        "tables.tex": latex(list(_latex_parts(qualities, speeds))),
    }
    for name, content in texts.items():
        with files.written(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")
    return {
        "report": str(folder / "report.md"),
        "html": str(folder / "report.html"),
        "latex": str(folder / "tables.tex"),
        "runs": [source.path for source in sources],
        "quality": [_quality_summary(group) for group in qualities],
        "throughput": [_throughput_summary(group) for group in speeds],
    }


def leaderboard(sources: Sequence[Source]) -> str:
    """Returns the page of all runs: scores, ranks, rates and provenance."""
    qualities = groups.quality_groups(sources)
    speeds = groups.throughput_groups(sources)
    return _comparison(sources, qualities, speeds, None)


def comparison_overview(sources: Sequence[Source], width: int | None = None) -> str:
    """Returns the tables of scores and rates; `width` as in `grids.markdown`."""
    scores = [tables.score_table(group) for group in groups.quality_groups(sources)]
    speeds = groups.throughput_groups(sources)
    rates = [overview(group.records, width) for group in speeds]
    return "\n\n".join([*(grids.markdown(each, width) for each in scores), *rates])


def _comparison(
    sources: Sequence[Source],
    qualities: Sequence[Quality],
    speeds: Sequence[Throughput],
    pictures: Sequence[dict[str, str]] | None,
) -> str:
    """Returns the page; `pictures` are each group's file names and captions, if any."""
    return _render(
        "comparison.md",
        sources=sources,
        count=sum(len(source.records) for source in sources),
        qualities=qualities,
        speeds=speeds,
        pictures=pictures,
    )


def _draw_quality(group: Quality, folder: pathlib.Path, number: int) -> dict[str, str]:
    """Draws the pictures of a group; returns their captions by file name."""
    captions: dict[str, str] = {}

    def draw(name: str, caption: str, picture: Callable[..., Any], *args: Any) -> None:
        file = re.sub(r"[^\w-]+", "_", name) + f"_{number}.png"
        figures.save(folder / file, picture, *args)
        captions[file] = caption

    draw("quality", "Quality against KV memory", scatters.task_scores, group)
    records = list(group.answers["record"])
    if figures.with_sizes(records):
        caption = "Slots of every KV head, for methods whose heads differ"
        draw("head_sizes", caption, figures.head_sizes, records)
    for task in figures.needle_tasks(group):
        caption = f"{task}: score by depth and length of the prompt"
        draw(task, caption, figures.needle_map, group, task)
    return captions


def _quality_summary(group: Quality) -> dict[str, Any]:
    methods = {}
    for row, each in group.differences.iterrows():
        scores = group.scores.loc[row].astype(object)
        methods[" ".join(row[:3] if row[3] == "identity" else row)] = {
            "scores": scores.where(scores.notna(), None).to_dict(),
            "difference": None if not each["count"] else float(each["mean"]),
            "tasks": int(each["count"]),
        }
    return {"model": group.model, "device": group.device, "methods": methods}


def _throughput_summary(group: Throughput) -> dict[str, Any]:
    records = group.records
    methods = {
        name: {
            "output_tokens_per_s": groups.finite(record.get("output_tokens_per_s")),
            "times_ed": groups.times(record, records, "ed"),
            "times_full": groups.times(record, records, "full"),
        }
        for name, record in zip(groups.names_of(records), records, strict=True)
    }
    return {"model": group.model, "device": group.device, "methods": methods}


# --- templates ------------------------------------------------------------------------


def latex(parts: Sequence[tuple[str, grids.Table, str]]) -> str:
    """Returns (provenance, table, caption) parts for a document with booktabs."""
    return _render("tables.tex", parts=parts)


def _latex_parts(
    qualities: Sequence[Quality], speeds: Sequence[Throughput]
) -> Iterator[tuple[str, grids.Table, str]]:
    for group in qualities:
        metrics = ", ".join(f"{r[0]} ({r[1]})" for r in tables.task_table(group).rows)
        caption = f"{group.model} on {group.device}: {metrics}, in points of 100"
        known = any(map(tables.interval, group.answers["task"]))
        caption += "; in brackets, 95% intervals." if known else "."
        yield tables.provenance(group), tables.score_table(group), caption
    for group in speeds:
        notes = tables.note(group.records) + tables.probe_note(group.records)
        caption = f"Throughput of {group.model} on {group.device}. {notes}"
        table = tables.throughput_table(group.records)
        yield tables.provenance(group), table, " ".join(caption.split())


def as_html(page: str, folder: pathlib.Path) -> str:
    """Returns a page of Markdown as one HTML file with its pictures inlined."""

    def inlined(found):
        content = (folder / html.unescape(found[1])).read_bytes()
        return f'src="data:image/png;base64,{base64.b64encode(content).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    body = re.sub(r'src="([^":]+\.png)"', inlined, body)
    title = page.partition("\n")[0].lstrip("# ")
    return _render("page.html", title=title, body=body)


def escaped(text: str) -> str:
    """Returns text with LaTeX's special characters escaped."""
    return text.translate(_LATEX)


def _render(template: str, **values: Any) -> str:
    """Fills in a template; LaTeX's use tags that do not occur in LaTeX."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvjax.evaluation.report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(_LATEX_TAGS if template.endswith("tex") else {}),
    )
    environment.filters |= {
        "markdown": functools.partial(grids.markdown, width=grids.PAGE),
        "megabytes": tables.megabytes,
        "tex": escaped,
    }
    shared = {"known": _known, "tables": tables}
    return environment.get_template(f"{template}.j2").render(**values, **shared)
