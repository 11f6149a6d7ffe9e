"""Writes docs/policies.md: each policy's idea, cost, and a picture of what it keeps.

    python experiments/gallery/policy_gallery.py                  # a few minutes
    python experiments/gallery/policy_gallery.py --only=tova,snapkv  # only these
    python experiments/gallery/policy_gallery.py --text_only  # the page, no model

Each policy runs on one prompt that hides a pass key. The positions it keeps go into
docs/data/gallery.json; pictures and page are made from that file and from the policies'
docstrings. Tables that other commands measure are included where their data exist. The
last line on stdout is JSON.
"""

import importlib
import inspect
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gallery_runs as runs
import numpy as np
from absl import flags, logging
from gallery_pictures import SCHEDULES, Data, draw_overview, draw_policy
from gallery_words import (
    COSTS,
    Shape,
    by_cost,
    cost_of,
    defaults,
    doc_of,
    padding_table,
)
from tqdm import tqdm

from kvjax import policies
from kvjax.cli import command
from kvjax.engine import compiled
from kvjax.evaluation.report.records import Record, read_records
from kvjax.models.weights import load
from kvjax.types import UserError

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COMBINATORS = [
    "protect",
    "mix",
    "smooth",
    "chunked",
    "shared_heads",
    "per_head",
    "by_size",
]


def define_flags() -> None:
    flags.DEFINE_string("model", "smollm2-135m-instruct", "a name kvjax.load knows")
    flags.DEFINE_list("only", [], "policies to run and draw; none: all")
    flags.DEFINE_bool("text_only", False, "write only the page")
    flags.DEFINE_bool("redraw", False, "draw and write from the data of earlier runs")


# ------------------------------------------------------------------------------ page

_INTRO = """\
# Policies

A policy ranks the KV pairs of a cache; the lowest-ranked are evicted. This page lists
every policy that `kvjax.policies.make` knows: what it keeps, what it costs, its source,
and a picture of what it keeps of a real prompt. The texts are the docstrings, and one
command writes the page:

```
python experiments/gallery/policy_gallery.py
```
"""
_OVERVIEW = """\
![Which parts of a prompt each policy keeps](policies/overview.png)

`{model}` reads a prompt of {tokens:,} tokens with a budget of {budget} KV pairs per
head. A pass key, the needle, is at positions {first} to {last}, and the end of the
prompt asks for it. A row shows what a policy has kept after the prompt: at the left,
{block} pairs at a time were evicted during prefill (`prefill_and_decode`), at the right
all were evicted at its end (`after_prefill`). The numbers are the shares of the
needle's tokens that are kept, over all layers and heads; a dot says that the model then
wrote the right key (with the full cache it {full}). One prompt is an illustration, not
a score.
"""
_TABLE = """\
## All policies

*Bytes*: statistics that a policy stores beside the KV pairs, per pair of each head, and
per row of the batch in each layer. Shapes are those of `{model}`, where a
pair takes {pair} bytes in float32. {order}{time}
"""
_TIME = (
    " *Time*: seconds of a whole run over those of `{base}` with the same budget, "
    "schedule and batch; median."
)
_COMBINATORS = """\
## Combinators

A combinator takes policies and returns a policy, so they nest:
`protect(smooth(tova(), kernel=5), sinks=4, recent=32)`.
"""
_GOLDEN = """\
Our policies and other implementations get the same queries, keys and values; the kept
indices are compared one by one (`tests/testing/golden_cases.py`).
"""
_PADDED = """\
Short prompts in a batch with longer ones, compared with each prompt alone: a cache of
fixed shape may keep padding in the place of text (`docs/data/padding.json`).
"""
_GALLERY = """\
## Gallery

The prompt and the runs of the picture at the top, in layers {layers} of {num_layers};
each layer has a line per KV head. Kept positions are blue, those of the needle
vermilion, those of the question green; evicted ones are pale. The numbers at the right
are the shares of the needle's tokens that the layer keeps.
"""


def page(data: Data, docs: pathlib.Path) -> str:
    """Returns the page; a section without data is omitted, with a line on stderr."""
    spec = Shape(**data["setting"]["shape"])
    records = read_records(docs / "data" / "policy_sweep.jsonl")
    parts = [
        _INTRO,
        _overview(data, docs),
        _rules(spec, data["setting"], records),
        _COMBINATORS,
        *(section(name, 3) for name in COMBINATORS),
        _sweep(records, docs),
        _included("Against other people's code", _GOLDEN, _golden),
        _included("Padding", _PADDED, lambda: _padding(docs)),
        _GALLERY.format(
            layers=_listed(data["setting"]["layers"]),
            num_layers=data["setting"]["num_layers"],
        ),
        *(_entry(name, data, spec, docs) for name in policies.names()),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _overview(data: Data, docs: pathlib.Path) -> str:
    shared = data["setting"]
    if not (docs / "policies" / "overview.png").exists():
        return _missing("the overview picture")
    first, last = shared["needle"]
    full = "does" if data["full"]["found"] else "does not"
    return _OVERVIEW.format(**shared, first=first, last=last - 1, full=full)


def _rules(spec: Shape, shared: Data, records: Sequence[Record]) -> str:
    """Returns the table of all policies, with the times that a sweep measured."""
    base, times = relative_times(records)
    rows = []
    for name in by_cost(spec):
        policy, doc = policies.make(name), doc_of(name)
        cost, asked = cost_of(policy, spec), sorted(policy.required_stats)
        row = {
            "policy": f"[`{name}`](#{name})",
            "keeps": markdown(doc.summary.rstrip(".")),
            "needs": ", ".join(f"`{each}`" for each in asked) or "-",
            "cost class": COSTS[cost.kind],
            "bytes per pair": f"{cost.pair_bytes:,}",
            "per row": f"{cost.row_bytes:,}",
            "time": f"{times[name]:.2f}" if name in times else "-",
            "source": markdown(short_source(doc.source)),
        }
        if not times:
            del row["time"]
        rows.append(row)
    words = _TABLE.format(
        model=shared["model"],
        pair=2 * 4 * spec.head_dim,
        order="Cheap classes first.",
        time=_TIME.format(base=base) if times else "",
    )
    right = ("bytes per pair", "per row", "time")
    return words + "\n" + table(rows, right)


def relative_times(records: Sequence[Record]) -> tuple[str, dict[str, float]]:
    """Returns the baseline policy of a sweep, and every policy's time over its time."""

    def place(record):
        return json.dumps([record.get(k) for k in ("schedule", "budget", "batch_size")])

    rates = {}
    for each in records:
        name = _label(each)
        if each.get("output_tokens_per_s") and name in policies.names():
            rates.setdefault(name, {})[place(each)] = each["output_tokens_per_s"]
    base = next((name for name in ("recency", "streaming") if name in rates), "")
    ratios = {
        name: [rates[base][at] / mine[at] for at in mine if at in rates[base]]
        for name, mine in (rates.items() if base else ())
    }
    return base, {
        name: statistics.median(each) for name, each in ratios.items() if each
    }


def section(name: str, level: int, picture: str = "") -> str:
    """Returns a factory's docstring in Markdown, with its parameters as a table."""
    doc, parameters = doc_of(name), defaults(name)
    rows = [
        {
            "parameter": f"`{key}`",
            "default": "" if value is inspect.Parameter.empty else f"`{value!r}`",
            "meaning": markdown(doc.args.get(key, "")),
        }
        for key, value in parameters.items()
    ]
    parts = [
        f"{'#' * level} `{name}`",
        markdown(doc.summary),
        f"```text\n{doc.formula}\n```" if doc.formula else "",
        *map(markdown, doc.text),
        table(rows) if rows else "",
        f"*Needs* {markdown(doc.needs)}" if doc.needs else "",
        f"*Source* {markdown(doc.source)}" if doc.source else "",
        picture,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _entry(name: str, data: Data, spec: Shape, docs: pathlib.Path) -> str:
    """Returns a policy's section of the gallery."""
    cost = cost_of(policies.make(name), spec)
    reads = f"; an eviction reads {' and '.join(cost.reads)}" if cost.reads else ""
    words = (
        f"*Cost* {COSTS[cost.kind]}{reads}. Statistics: {cost.pair_bytes:,} bytes per "
        f"pair, {cost.row_bytes:,} per row and layer."
    )
    picture = docs / "policies" / f"{name}.png"
    if name not in data["policies"] or not picture.exists():
        return section(name, 3, words + _missing(f"the picture of {name}"))
    done = data["policies"][name]
    lines = [
        f"![Positions that {name} keeps](policies/{name}.png)",
        f"`{done['call']}`, budget {data['setting']['budget']}. "
        + " ".join(_outcome(done["runs"][phases], phases) for phases in SCHEDULES),
    ]
    return section(name, 3, "\n\n".join([words, *lines]))


def _outcome(run: Data, phases: str) -> str:
    found = "the key was found" if run["found"] else "the key was not found"
    return (
        f"`{phases}`: {run['pairs']:.0f} pairs per head on average, "
        f"{run['needle']:.0%} of the needle over all layers, {found}."
    )


def _sweep(records: Sequence[Record], docs: pathlib.Path) -> str:
    """Returns the sweep's pictures, its best policies, and the text about it."""
    if not records:
        return _missing("the sweep (docs/data/policy_sweep.jsonl)")
    pictures = {
        "heat_map": "Needle accuracy of each policy, budget and schedule",
        "pareto": "Quality against memory",
    }
    shown = [
        f"![{words}](policies/{name}.png)"
        for name, words in pictures.items()
        if (docs / "policies" / f"{name}.png").exists()
    ]
    reading = docs / "data" / "policy_sweep_reading.md"
    words = reading.read_text().strip() if reading.exists() else ""
    return "\n\n".join(
        part for part in ("## Which is best", words, *shown, best(records)) if part
    )


def best(records: Sequence[Record]) -> str:
    """Returns the best policies by score and KL, for each schedule and budget."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for each in records:
        if each.get("budget") is not None:
            key = str(each.get("schedule")), json.dumps(each["budget"])
            groups.setdefault(key, []).append(each)
    rows = [
        {
            "schedule": f"`{schedule}`",
            "budget": budget,
            "most needles found": _leaders(group, "score", max, "{:.2f}"),
            "least KL to the full cache": _leaders(group, "kl", min, "{:.3f}"),
        }
        for (schedule, budget), group in sorted(
            groups.items(), key=lambda item: (item[0][0], _size(item[0][1]))
        )
    ]
    return table(rows, ("budget",))


def _size(budget: str) -> float:
    return float(np.mean(json.loads(budget)))


def _leaders(
    group: Sequence[Record], key: str, choose: Callable, form: str, most: int = 4
) -> str:
    known = [each for each in group if each.get(key) is not None]
    if not known:
        return "-"
    top = choose(each[key] for each in known)
    names = sorted({f"`{_label(each)}`" for each in known if each[key] == top})
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}: {form.format(top)}"


def _label(each: Record) -> str:
    """Returns the name of a record's policy in its sweep."""
    return str(each.get("series") or each.get("policy"))


def _included(title: str, words: str, make: Callable[[], str]) -> str:
    """Returns a section whose table `make` returns, or omits it if that fails."""
    try:
        return f"## {title}\n\n{words}\n{make().strip()}"
    except (AttributeError, ImportError, OSError) as error:
        return _missing(f"the section {title!r} ({error})")


def _golden() -> str:
    return _module("tests/testing", "golden_cases").table()


def _padding(docs: pathlib.Path) -> str:
    found = json.loads((docs / "data" / "padding.json").read_text())
    labels = _module("experiments", "baselines.presses").LABELS
    return padding_table(found["records"], labels)


def _module(folder: str, name: str) -> Any:
    place = str(ROOT / folder)
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module(name)


def _missing(what: str) -> str:
    print(f"left out: {what}", file=sys.stderr)
    return ""


def markdown(words: str) -> str:
    """Escapes Markdown's signs in prose, except in backticks."""
    parts = re.split(r"(`[^`]*`)", words)
    parts[::2] = [re.sub(r"([*<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def short_source(source: str) -> str:
    """Returns a source up to its year."""
    year = re.match(r".*?\(?\b\d{4}\b\)?", source)
    return (year[0] if year else source).rstrip(".")


def table(rows: Sequence[dict[str, str]], right: Sequence[str] = ()) -> str:
    """Returns a Markdown table; `right` names the columns that align right."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, ["--:" if key in right else "---" for key in head]]
    lines += [[row[key].replace("|", "\\|") for key in head] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


# ------------------------------------------------------------------------------ main


def main(_):
    logging.set_verbosity(logging.WARNING)
    start = time.perf_counter()
    path = DOCS / "data" / "gallery.json"
    only = FLAGS.only or list(policies.names())
    unknown = sorted(set(only) - set(policies.names()))
    if unknown:
        raise UserError(
            f"--only={unknown[0]}: use some of {', '.join(policies.names())}"
        )
    reuse = FLAGS.text_only or FLAGS.redraw
    data = runs.read(path) if reuse or FLAGS.only else runs.NOTHING
    if reuse and not data["policies"]:
        raise UserError(f"{path} is missing: run without --text_only and --redraw")
    if not reuse:
        compiled.keep_compiled()
        data = runs.run(load(FLAGS.model), only, data, path)
    if not FLAGS.text_only:
        draw([name for name in only if name in data["policies"]], data, DOCS)
    (DOCS / "policies.md").write_text(page(data, DOCS))
    print(json.dumps(summary(data, time.perf_counter() - start)))


def draw(names: Sequence[str], data: Data, docs: pathlib.Path) -> None:
    """Draws the pictures of these policies, and the overview."""
    for name in tqdm(names, desc="pictures"):
        draw_policy(name, data, docs / "policies" / f"{name}.png")
    order = by_cost(Shape(**data["setting"]["shape"]))
    known = [name for name in order if name in data["policies"]]
    draw_overview(known, data, docs / "policies" / "overview.png")


def summary(data: Data, seconds: float) -> Data:
    """Returns the content of the JSON line."""
    return {
        "page": "docs/policies.md",
        "policies": len(data["policies"]),
        **{
            phases: {
                name: {key: each["runs"][phases][key] for key in ("needle", "found")}
                for name, each in sorted(data["policies"].items())
            }
            for phases in SCHEDULES
        },
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    define_flags()
    command.run(main)
