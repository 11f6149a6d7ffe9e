"""Reports: of one run's records, of several runs joined, and the leaderboard.

Words and order are the templates', in the folder of that name.
"""

import base64
import html
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from kvjax.evaluation import files
from kvjax.evaluation.report import figures, groups, scatters, tables
from kvjax.evaluation.report.groups import Quality, Throughput
from kvjax.evaluation.report.records import PROBES, Record, Source
from kvjax.types import UserError

_SUMMARY = (
    "policy",
    "schedule",
    "budget",
    "budget_rule",
    "budget_share",
    "mean_slots",
    "smallest_slots",
    "largest_slots",
    "codec",
    "batch_size",
    "score",
    "kl",
    "top1_agreement",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "output_tokens_per_s",
    *PROBES,
    "kv_bytes_peak_per_seq",
)
_SETTING = (
    "model",
    "device",
    "memory_bytes",
    "prompt_tokens",
    "max_new_tokens",
    "seed",
)
_OF_SIZES = "Slots of every KV head, for methods whose heads differ"
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
      over the full cache's at as many new tokens, None where the probes beside both
      differ by more than a tenth, `kv_ratio` the same for KV bytes per
      prompt, and `full_cache` the first one's name; of each task there are the score,
      among how many prompts, and its interval of 95%. What differs between records is
      a list. What is unknown is None, and so is what JSON cannot hold, and a budget of
      all pairs.
    """
    first, names = groups.full_cache(records), groups.names_of(records)
    fulls = [groups.full_cache(groups.as_many_new(r, records)) for r in records]
    methods = {
        name: {
            **{key: groups.finite(record.get(key)) for key in _SUMMARY},
            "tasks": {
                name: {key: task.get(key) for key in _TASK_SUMMARY}
                for name, task in (record.get("tasks") or {}).items()
            },
            "speedup": groups.speedup(record, full),
            "kv_ratio": groups.ratio(record, full, "kv_bytes_peak_per_seq"),
        }
        for name, record, full in zip(names, records, fulls, strict=True)
    }
    named = (name for name, r in zip(names, records, strict=True) if r is first)
    return {
        **{key: _value(records, key) for key in _SETTING},
        "budgets": _values(records, "budget"),
        "full_cache": next(named, None),
        "methods": methods,
        "report": str(path) if path else None,
        "pictures": [str(p) for p in _pictures(records, path).values()] if path else [],
        "versions": tables.versions(records),
    }


def _value(records: Sequence[Record], key: str) -> Any:
    """A field's one value, or a list of those that it has."""
    found = _values(records, key)
    return found if len(found) > 1 else next(iter(found), None)


def _values(records: Sequence[Record], key: str) -> list[Any]:
    """A field's values, each once; None only where a record says so."""
    found = [record[key] for record in records if key in record]
    return [value for i, value in enumerate(found) if value not in found[:i]]


def _pictures(
    records: Sequence[Record], path: pathlib.Path
) -> dict[Callable[..., Any], pathlib.Path]:
    """The functions that draw a report's pictures, and where each goes."""
    drawn = list(_REPORTS[_kind(records)][1])
    if scatters.throughput_vs_memory in drawn and not _timed(records):
        drawn.remove(scatters.throughput_vs_memory)
    if figures.with_sizes(records):
        drawn.append(figures.head_sizes)
    return {each: path.with_name(f"{each.__name__}.png") for each in drawn}


def _timed(records: Sequence[Record]) -> bool:
    """Whether a run took the time, as those layer by layer do not."""
    return any(record.get("output_tokens_per_s") is not None for record in records)


_REPORTS = {  # by what records are of: the table for a screen, the pictures
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
    """The table that fits on a screen, in Markdown: of a sweep, the best methods.

    A second one where |kv| was searched.

    Args:
      records: of a run.
      width: see `tables.markdown`.
    """
    kind = _kind(records)
    table, _ = _REPORTS[kind]
    shown = tables.markdown(table(records), width)
    if any(record.get("tried") for record in records):
        shown += "\n\n" + tables.markdown(tables.search_table(records), width)
    shown += tables.note(records) if kind == "throughput" else ""
    return shown + (tables.probe_note(records) if kind != "sweep" else "")


def write_report(records: Sequence[Record], workdir: str | os.PathLike) -> pathlib.Path:
    """Writes report.md and its pictures.

    They are heat_map.png and pareto.png for a sweep, throughput_vs_batch.png for
    throughput, and otherwise quality_vs_memory.png and, where runs were timed,
    throughput_vs_memory.png; and head_sizes.png, where heads of a method keep different
    numbers of pairs.

    Args:
      records: what to show, in this order.
      workdir: an existing folder.

    Returns:
      The path of report.md.

    Raises:
      ValueError: there are no records.
    """
    if not records:
        raise ValueError("there are no records to report")
    kind, path = _kind(records), pathlib.Path(workdir) / "report.md"
    for picture, place in _pictures(records, path).items():
        figures.save(place, picture, records)
    template = "throughput.md" if kind == "throughput" else "run.md"
    page = _render(
        template,
        records=records,
        overview=overview(records),
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
    """The values of a field, each once; bytes in MB."""

    def told(value):
        if key.endswith("bytes"):
            return tables.megabytes(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    found = [record[key] for record in records if record.get(key) is not None]
    return " / ".join(dict.fromkeys(map(told, found))) or "unknown"


# --- several runs ---------------------------------------------------------------------


def write_comparison(
    sources: Sequence[Source], folder: str | os.PathLike
) -> dict[str, Any]:
    """Writes report.md, report.html, tables.tex and the pictures.

    Args:
      sources: what `sources.read` returns.
      folder: made if it is not there.

    Returns:
      What may stand in one line of JSON: the files, and each group's differences to the
      full cache or ratios to ED.

    Raises:
      UserError: two files answer one question, or the folder cannot be made.
    """
    qualities, speeds = (
        groups.quality_groups(sources),
        groups.throughput_groups(sources),
    )
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None
    pictures = [_draw_quality(g, folder, n) for n, g in enumerate(qualities, 1)]
    for number, group in enumerate(speeds, 1):
        name = f"throughput_{number}.png"
        figures.save(folder / name, scatters.throughput_vs_batch, group.records)
        pictures.append({name: "Throughput against batch"})
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
        "quality": [_told(group) for group in qualities],
        "throughput": [_told_rates(group) for group in speeds],
    }


def leaderboard(sources: Sequence[Source]) -> str:
    """The page of all runs: scores, ranks, rates and where they are from."""
    qualities, speeds = (
        groups.quality_groups(sources),
        groups.throughput_groups(sources),
    )
    return _comparison(sources, qualities, speeds, None)


def comparison_overview(sources: Sequence[Source], width: int | None = None) -> str:
    """The tables of scores and rates, in Markdown; `width` as in `tables.markdown`."""
    scores = [tables.score_table(group) for group in groups.quality_groups(sources)]
    speeds = groups.throughput_groups(sources)
    rates = [overview(group.records, width) for group in speeds]
    return "\n\n".join([*(tables.markdown(each, width) for each in scores), *rates])


def _comparison(
    sources: Sequence[Source],
    qualities: Sequence[Quality],
    speeds: Sequence[Throughput],
    pictures: Sequence[dict[str, str]] | None,
) -> str:
    """The page, with the pictures of each group by their names; None is without."""
    return _render(
        "comparison.md",
        sources=sources,
        count=sum(len(source.records) for source in sources),
        qualities=qualities,
        speeds=speeds,
        pictures=pictures,
        survivors=any(map(figures.survivor_columns, qualities)),
    )


def _draw_quality(group: Quality, folder: pathlib.Path, number: int) -> dict[str, str]:
    """Draws a group; returns what each picture shows, by the name of its file."""
    told = {f"quality_{number}.png": "Quality against KV memory"}
    figures.save(folder / f"quality_{number}.png", scatters.task_scores, group)
    records = list(group.answers["record"])
    if figures.with_sizes(records):
        name = f"head_sizes_{number}.png"
        told[name] = _OF_SIZES
        figures.save(folder / name, figures.head_sizes, records)
    for task in figures.needle_tasks(group):
        name = f"{_plain(task)}_{number}.png"
        told[name] = f"{task}: score by depth and length of the prompt"
        figures.save(folder / name, figures.needle_map, group, task)
    for column in figures.survivor_columns(group):
        name = f"survivors_{_plain(column)}_{number}.png"
        told[name] = f"{column}: what is left of a prompt, layer by layer"
        figures.save(folder / name, figures.survivors, group, column)
    return told


def _plain(name: str) -> str:
    """A name that files may have."""
    return re.sub(r"[^\w-]+", "_", name)


def _told(group: Quality) -> dict[str, Any]:
    methods = {}
    for row, each in group.differences.iterrows():
        scores = group.scores.loc[row].astype(object)
        methods[" ".join(row[:3] if row[3] == "identity" else row)] = {
            "scores": scores.where(scores.notna(), None).to_dict(),
            "difference": None if not each["count"] else float(each["mean"]),
            "tasks": int(each["count"]),
        }
    return {"model": group.model, "device": group.device, "methods": methods}


def _told_rates(group: Throughput) -> dict[str, Any]:
    records, methods = group.records, {}
    for name, record in zip(groups.names_of(records), records, strict=True):
        methods[name] = {
            "output_tokens_per_s": groups.finite(record.get("output_tokens_per_s")),
            "times_ed": groups.times(record, records, "ed"),
            "times_full": groups.times(record, records, "full"),
        }
    return {"model": group.model, "device": group.device, "methods": methods}


# --- templates ------------------------------------------------------------------------


def latex(parts: Sequence[tuple[str, tables.Table, str]]) -> str:
    """For a document that loads booktabs: where tables are from, they, captions."""
    return _render("tables.tex", parts=parts)


def _latex_parts(
    qualities: Sequence[Quality], speeds: Sequence[Throughput]
) -> Iterator[tuple[str, tables.Table, str]]:
    for group in qualities:
        metrics = ", ".join(f"{r[0]} ({r[1]})" for r in tables.task_table(group).rows)
        caption = f"{group.model} on {group.device}: {metrics}, in points of 100"
        told = any(map(tables.between, group.answers["task"]))
        caption += "; in brackets, intervals of 95%." if told else "."
        yield tables.provenance(group), tables.score_table(group), caption
    for group in speeds:
        caption = f"Throughput of {group.model} on {group.device}."
        caption += " ".join(["", *tables.note(group.records).split()])
        caption += " ".join(["", *tables.probe_note(group.records).split()])
        table = tables.throughput_table(group.records)
        yield tables.provenance(group), table, caption


def as_html(page: str, folder: pathlib.Path) -> str:
    """A page of Markdown as HTML that needs nothing else: pictures lie in it."""

    def inlined(found):
        content = (folder / html.unescape(found[1])).read_bytes()
        return f'src="data:image/png;base64,{base64.b64encode(content).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    body = re.sub(r'src="([^":]+\.png)"', inlined, body)
    title = page.partition("\n")[0].lstrip("# ")
    return _render("page.html", title=title, body=body)


def escaped(text: str) -> str:
    """Text with LaTeX's special signs written so that they print as they are."""
    return text.translate(_LATEX)


def _render(template: str, **told: Any) -> str:
    """A template filled in; LaTeX's have tags that LaTeX does not use."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvjax.evaluation.report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(_LATEX_TAGS if template.endswith("tex") else {}),
    )
    environment.filters |= {
        "markdown": tables.markdown,
        "megabytes": tables.megabytes,
        "tex": escaped,
    }
    shared = {"known": _known, "tables": tables}
    return environment.get_template(f"{template}.j2").render(**told, **shared)
