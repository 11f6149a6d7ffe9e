"""The report of joined runs, as Markdown, HTML and LaTeX, and the leaderboard."""

import base64
import html
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from kvjax.evaluation.report import (
    cells,
    joined_pictures,
    joined_tables,
    throughput_pictures,
    throughput_report,
)
from kvjax.evaluation.report.grids import latex, markdown
from kvjax.evaluation.report.joined_runs import (
    Quality,
    Source,
    Throughput,
    quality_groups,
    throughput_groups,
)
from kvjax.types import UserError

_READING = """\
- A score is the task's own metric, in points of 100; **bold** is the best of a budget,
  where methods differ. **Mean Δ** is the mean difference to the full cache in points,
  over the tasks that both have run; in brackets, of how many where some are missing.
- Few prompts tell little: one answer right or wrong moves a score by 100 points divided
  by **Prompts**. Scores that round to the same tenth of a point share their rank.
- **KV decoding** and **KV peak** are the bytes of KV cache that a prompt takes while
  tokens are generated, and at any time, as a share of the full cache's (mean over
  tasks), which is as large as the run's longest prompt. A schedule that compresses
  after the prompt holds all of it while it reads.
- **Cut** is how many prompts were too long and lost their middle."""

_READING_PICTURES = """\
- In the picture methods that compress after the prompt are hollow, the dotted line is
  the full cache, and methods are moved sideways a little so that none hides another."""

_READING_SURVIVORS = """\
- The maps of survivors show a task's first prompt when its answer is finished: the
  share of all heads' pairs that each layer still holds, along the prompt. Bright is
  kept."""

_STYLE = """\
body { font: 16px/1.5 sans-serif; color: #222; max-width: 75em; margin: 2em auto;
  padding: 0 1em; }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }
th, td { padding: 0.2em 0.7em; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #595959; }
img { max-width: 100%; }
code { background: #f3f3f3; padding: 0.1em 0.2em; overflow-wrap: anywhere; }"""


def write(sources: Sequence[Source], folder: str | os.PathLike) -> dict[str, Any]:
    """Writes report.md, report.html, joined_tables.tex and the pictures.

    Args:
      sources: what `runs.read` returns.
      folder: made if it is not there.

    Returns:
      What may stand in one line of JSON: the files, and each group's differences to the
      full cache or ratios to ED.

    Raises:
      UserError: two files answer one question, or the folder cannot be made.
    """
    qualities, speeds = quality_groups(sources), throughput_groups(sources)
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None
    parts = ["# Comparison of runs", _contents(sources, qualities, speeds)]
    for number, group in enumerate(qualities, 1):
        parts += _quality(group) + _draw_quality(group, folder, number)
    reading = [_READING, _READING_PICTURES]
    if any(map(joined_pictures.survivor_columns, qualities)):
        reading.append(_READING_SURVIVORS)
    parts += ["## How to read the scores", "\n".join(reading)] if qualities else []
    for number, group in enumerate(speeds, 1):
        name = f"throughput_{number}.png"
        throughput_pictures.draw(group.records, folder / name)
        parts += [*_throughput(group), f"![Throughput against batch]({name})"]
    parts += ["## How to read the rates", throughput_report.READING] if speeds else []
    text = "\n\n".join(parts) + "\n"
    tex = _latex(qualities, speeds)
    for name, content in (
        ("report.md", text),
        ("report.html", as_html(text, folder)),
        ("tables.tex", tex),
    ):
        (folder / name).write_text(content, encoding="utf-8")
    return {
        "report": str(folder / "report.md"),
        "html": str(folder / "report.html"),
        "latex": str(folder / "tables.tex"),
        "runs": [source.path for source in sources],
        "quality": [_told(group) for group in qualities],
        "throughput": [_told_speeds(group) for group in speeds],
    }


def leaderboard(sources: Sequence[Source]) -> str:
    """The page of all runs: scores, ranks, rates and where they are from."""
    qualities, speeds = quality_groups(sources), throughput_groups(sources)
    parts = [
        "# Leaderboard",
        "Made from the records named below each table, by `make leaderboard`.",
        _contents(sources, qualities, speeds),
    ]
    for group in qualities:
        parts += _quality(group)
    parts += ["## How to read the scores", _READING] if qualities else []
    for group in speeds:
        parts += _throughput(group)
    parts += ["## How to read the rates", throughput_report.READING] if speeds else []
    return "\n\n".join(parts) + "\n"


def overview(sources: Sequence[Source]) -> str:
    """The tables of scores and rates, for a terminal."""
    scores = [
        markdown(joined_tables.scores(group)) for group in quality_groups(sources)
    ]
    speeds = [throughput_report.table(g.records) for g in throughput_groups(sources)]
    return "\n\n".join(scores + speeds)


def _contents(sources, qualities, speeds) -> str:
    count = sum(len(source.records) for source in sources)
    files = "1 file" if len(sources) == 1 else f"{len(sources)} files"
    line = f"{count} records of {files}."
    if len(qualities) > 1 or len(speeds) > 1:
        line += " What differs in model or device, or for rates in memory or prompts, "
        line += "stands in a table of its own."
    return line


def _quality(group: Quality) -> list[str]:
    return [
        f"## Quality: {group.model} on {group.device}",
        markdown(joined_tables.scores(group)),
        joined_tables.provenance(group.sources, group.model, group.device),
        "### Ranks",
        markdown(joined_tables.leaderboard(group)),
        "### Tasks",
        markdown(joined_tables.tasks(group)),
    ]


def _draw_quality(group: Quality, folder: pathlib.Path, number: int) -> list[str]:
    name = f"quality_{number}.png"
    joined_pictures.draw_quality(group, folder / name)
    parts = ["### Pictures", f"![Quality against KV memory]({name})"]
    for task in joined_pictures.needle_tasks(group):
        name = f"{_plain(task)}_{number}.png"
        joined_pictures.draw_needles(group, task, folder / name)
        parts.append(f"![{task}: score by depth and length of the prompt]({name})")
    for column in joined_pictures.survivor_columns(group):
        task = group.columns[column]
        name = f"survivors_{_plain(task)}_{number}.png"
        joined_pictures.draw_survivors(group, column, folder / name)
        parts.append(f"![{task}: what is left of a prompt, layer by layer]({name})")
    return parts


def _plain(name: str) -> str:
    """A name that files may have."""
    return re.sub(r"[^\w-]+", "_", name)


def _throughput(group: Throughput) -> list[str]:
    memory = cells.megabytes(group.memory_bytes)
    tokens = cells.text(group.prompt_tokens)
    return [
        f"## Throughput: {group.model} on {group.device} in {memory} MB, prompts of "
        f"{tokens} tokens",
        throughput_report.table(group.records),
        joined_tables.provenance(group.sources, group.model, group.device),
    ]


def _latex(qualities: Sequence[Quality], speeds: Sequence[Throughput]) -> str:
    """Each table, after a comment that says where it is from."""
    parts = ["% Needs \\usepackage{booktabs}."]
    for group in qualities:
        metrics = ", ".join(
            row[0] + f" ({row[1]})" for row in joined_tables.tasks(group).rows
        )
        caption = f"{group.model} on {group.device}: {metrics}, in points of 100."
        parts += [_comment(group), latex(joined_tables.scores(group), caption)]
    for group in speeds:
        caption = f"Throughput of {group.model} on {group.device}."
        grid = throughput_report.grid(group.records)
        parts += [_comment(group), latex(grid, caption)]
    return "\n\n".join(parts) + "\n"


def _comment(group: Quality | Throughput) -> str:
    told = joined_tables.provenance(group.sources, group.model, group.device)
    return "\n".join(f"% {line}".rstrip() for line in told.splitlines())


def as_html(text: str, folder: pathlib.Path) -> str:
    """A page of Markdown as HTML that needs nothing else: pictures lie in it."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(
        r'src="([^":]+\.png)"',
        lambda found: f'src="{_inlined(folder / html.unescape(found[1]))}"',
        body,
    )
    title = html.escape(text.partition("\n")[0].lstrip("# "))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"{body}</body>\n</html>\n"
    )


def _inlined(path: pathlib.Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _told(group: Quality) -> dict[str, Any]:
    methods = {}
    for row in group.rows:
        difference, count = group.difference(row)
        methods[" ".join(row)] = {
            "scores": {n: group.score(row, c) for c, n in group.columns.items()},
            "difference": difference,
            "tasks": count,
        }
    return {"model": group.model, "device": group.device, "methods": methods}


def _told_speeds(group: Throughput) -> dict[str, Any]:
    labels = cells.labels_of(group.records)
    methods = {
        label: {
            "tokens_per_s": cells.finite(record.get("tokens_per_s")),
            "times_ed": throughput_report.times(record, group.records, "ed"),
            "times_full": throughput_report.times(record, group.records, "full"),
        }
        for label, record in zip(labels, group.records, strict=True)
    }
    return {"model": group.model, "device": group.device, "methods": methods}
