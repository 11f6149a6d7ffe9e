"""Makes docs/policies.md: every policy's idea, cost, and a picture of what it keeps.

    python experiments/policy_gallery.py                     # a few minutes
    python experiments/policy_gallery.py --only=tova,snapkv  # these pictures again
    python experiments/policy_gallery.py --text_only         # the page, no model

Each policy reads one prompt in which a pass key is hidden; which positions survive goes
into docs/data/gallery.json, from which pictures and page are made. What the page says
of a policy is its docstring. Tables that other commands measure are included where
their data are there. The last line on stdout is JSON.
"""

import functools
import importlib
import inspect
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from absl import app, flags, logging
from gallery_pictures import SCHEDULES, Data, draw_overview, draw_policy, pack
from gallery_words import (
    COSTS,
    Shape,
    by_cost,
    cost_of,
    defaults,
    doc_of,
)
from tqdm import tqdm

from kvjax import cache, completions, compression, layerwise, policies, programs
from kvjax.records import Record, read_records
from kvjax.tasks import needle
from kvjax.tasks.text import haystack
from kvjax.types import Schedule, UserError
from kvjax.weights import load

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUDGET, BLOCK, LENGTH, DEPTH, NEW = 384, 64, 1000, 0.3, 8
OPTIONS = {  # where a default is made for longer prompts
    "fastgen": {"heavy": 96, "local": 96, "punctuation": ".,;:!?\n"},
    "simlayerkv": {"recent": 128},
    "sliding_window": {"window": BUDGET},
}
COMBINATORS = ("protect", "mix", "smooth", "chunked", "shared_heads", "per_head")
NOTHING: Data = {"setting": {}, "policies": {}}


def define_flags() -> None:
    flags.DEFINE_string("model", "smollm2-135m-instruct", "a name kvjax.load knows")
    flags.DEFINE_list("only", [], "policies to run and draw again; none: all")
    flags.DEFINE_bool("text_only", False, "remake the page alone")
    flags.DEFINE_bool("redraw", False, "remake pictures and page from the data")


# ------------------------------------------------------------------------------ runs


def options_of(name: str, tokenizer: Any) -> dict[str, Any]:
    """What a policy is made with here; signs become token ids."""
    options = dict(OPTIONS.get(name, {}))
    if "punctuation" in options:
        ids = [tokenizer(c, add_special_tokens=False) for c in options["punctuation"]]
        options["punctuation"] = tuple(each["input_ids"][0] for each in ids)
    return options


def call_of(name: str, options: dict[str, Any]) -> str:
    """The expression that makes the policy."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"


def spans(example: needle.Example, tokenizer: Any) -> dict[str, tuple[int, int]]:
    """Where needle and question stand, as [first, last + 1) in tokens."""
    prompt = example.prompt
    sentence = next(p for p in prompt.split("\n\n") if example.answer in p)
    start = prompt.index(sentence)
    asked = prompt.rindex("\n\n") + 2
    return {
        "needle": _tokens(tokenizer, prompt, start, start + len(sentence)),
        "question": _tokens(tokenizer, prompt, asked, prompt.index("?", asked) + 1),
    }


def _tokens(tokenizer: Any, prompt: str, start: int, end: int) -> tuple[int, int]:
    """The tokens that hold any of the characters start .. end - 1."""
    places = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(places) if a < end and b > start]
    return inside[0], inside[-1] + 1


def setting(model: Any, example: needle.Example) -> Data:
    """What all pictures share."""
    spec = model.spec
    layers = (1, spec.num_layers // 2, spec.num_layers)
    return {
        "model": spec.name,
        "shape": {key: getattr(spec, key) for key in Shape._fields},
        "num_layers": spec.num_layers,
        "layers": list(layers),
        "budget": BUDGET,
        "block": BLOCK,
        "tokens": len(example.tokens),
        "answer": example.answer,
        **{key: list(at) for key, at in spans(example, model.tokenizer).items()},
    }


def readings_of(
    model: Any, members: Sequence[policies.Policy], tokens: Sequence[int]
) -> Iterable[dict[str, tuple[list[list[np.ndarray]], list[int]]]]:
    """For every policy and schedule, what it keeps of the prompt, and what follows."""
    made = [
        [_made(model, policy, phases) for phases in SCHEDULES] for policy in members
    ]
    readings = layerwise.Readings(model, [each for pair in made for each in pair])
    for pair in made:
        runs = {}
        for phases, each in zip(SCHEDULES, pair, strict=True):
            reading = readings.after(each, [tokens], NEW)
            kept = cache.kept_positions(layerwise.joined(reading))[0]
            eos = completions.end_tokens(model)
            _, (new,) = layerwise.write(model, each, reading, NEW, eos)
            runs[phases] = kept, new
        yield runs


def _made(model: Any, policy: policies.Policy, phases: str) -> compression.Compression:
    schedule = Schedule(phases, BLOCK, BLOCK)
    return compression.make(model.spec, policy, BUDGET, schedule)


def full_cache(model: Any, tokens: Sequence[int]) -> list[int]:
    """What follows if nothing goes."""
    made = compression.make(model.spec, None, None, Schedule("full", BLOCK))
    reading = layerwise.read(model, made, [tokens], NEW)
    eos = completions.end_tokens(model)
    return layerwise.write(model, made, reading, NEW, eos)[1][0]


def record(
    kept: list[list[np.ndarray]], text: str, example: needle.Example, shared: Data
) -> Data:
    """One run's line in the data."""
    count = shared["tokens"]
    held = np.array([[np.isin(np.arange(count), h) for h in layer] for layer in kept])
    start, end = shared["needle"]
    return {
        "found": bool(needle.grade(example, text)),
        "text": text,
        "pairs": round(float(held.sum(axis=-1).mean()), 1),
        "needle": round(float(held[..., start:end].mean()), 4),
        "density": [round(100 * x) for x in _binned(held.mean(axis=(0, 1)))],
        "kept": [[pack(h) for h in held[layer - 1]] for layer in shared["layers"]],
    }


def _binned(x: np.ndarray, size: int = 10) -> list[float]:
    return [float(x[i : i + size].mean()) for i in range(0, len(x), size)]


def run(names: Sequence[str], data: Data, path: pathlib.Path) -> Data:
    """Runs policies under both schedules; saves what there is after each."""
    programs.keep_compiled()
    model = load(FLAGS.model)
    (example,) = needle.examples(model.tokenizer, 1, LENGTH, (DEPTH,), 0, haystack())
    shared = setting(model, example)
    if data["policies"] and data["setting"] != shared:
        raise UserError(f"{path} comes from another prompt: run without --only")
    data = {"setting": shared, "policies": dict(data["policies"])}
    calls = {name: options_of(name, model.tokenizer) for name in names}
    made = [policies.make(name, **calls[name]) for name in names]
    say = functools.partial(model.tokenizer.decode, skip_special_tokens=True)
    full = say(full_cache(model, example.tokens))
    data["full"] = {"found": bool(needle.grade(example, full)), "text": full}
    every = readings_of(model, made, example.tokens)
    for name, found in zip(names, tqdm(every, total=len(names)), strict=True):
        runs = {
            phases: record(kept, say(new), example, shared)
            for phases, (kept, new) in found.items()
        }
        data["policies"][name] = {"call": call_of(name, calls[name]), "runs": runs}
        save(data, path)
    return data


def read(path: pathlib.Path) -> Data:
    """The data of earlier runs, if there are any."""
    return json.loads(path.read_text()) if path.exists() else NOTHING


def save(data: Data, path: pathlib.Path) -> None:
    """JSON with a line per policy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(data['policies'][name])}"
        for name in sorted(data["policies"])
    )
    rest = {key: value for key, value in data.items() if key != "policies"}
    head = json.dumps(rest)[1:-1]
    path.write_text(f'{{{head}, "policies": {{\n{lines}\n}}}}\n')


# ------------------------------------------------------------------------------ page

_INTRO = """\
# Policies

A policy says which key-value pairs of a cache stay. This page holds all that
`kvjax.policies.make` knows: what each keeps, what it costs, where it comes from, and a
picture of what it does to a real prompt. The words are the docstrings', and the page is
made by one command:

```
python experiments/policy_gallery.py
```
"""
_OVERVIEW = """\
![Which parts of a prompt each policy holds](policies/overview.png)

`{model}` reads a prompt of {tokens:,} tokens with room for {budget} pairs per head. A
pass key, the needle, stands at positions {first} to {last} and is asked for at the end.
A row shows what a policy still holds when the prompt has been read: at the left
{block} pairs at a time went while it was read (`prefill+decode`), at the right all that
had to go went at its end (`after_prefill`). The numbers are shares of the
needle's tokens held, over all layers and heads; a dot says that the model then wrote
the right key (with the full cache it {full}). One prompt is an illustration, not a
score.
"""
_TABLE = """\
## The rules

*Bytes*: statistics that a rule keeps beside the pairs, for each pair of each head, and
for each row of the batch in each layer. The shapes are those of `{model}`,
where a pair takes {pair} bytes in float32. {order}{time}
"""
_TIME = (
    " *Time*: seconds of a whole run over those of `{base}` with the same budget, "
    "schedule and batch; median."
)
_COMBINATORS = """\
## Rules made of rules

Each takes policies and gives a policy, so they nest:
`protect(smooth(tova(), kernel=5), sinks=4, recent=32)`.
"""
_GOLDEN = """\
Our rules and other implementations were given the same queries, keys and values; what
each keeps is compared index by index (`tests/golden_cases.py`).
"""
_PADDED = """\
Short prompts in a batch with longer ones, against each prompt alone: a cache of fixed
shape may hold padding in the place of text (`experiments/padding.py`).
"""
_GALLERY = """\
## Gallery

The prompt and the runs of the picture at the top, in layers {layers} of {num_layers};
each layer has a line per KV head. What is held is blue, of the needle vermilion, of the
question green; what is gone is pale. At the right the share of the needle's tokens that
the layer holds.
"""


def page(data: Data, docs: pathlib.Path) -> str:
    """The whole page; what is not there is left out, with a line on stderr."""
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
    """The table of all rules, with their times where these were measured."""
    base, times = relative_times(records)
    rows = []
    for name in by_cost(spec):
        policy, doc = policies.make(name), doc_of(name)
        cost = cost_of(policy, spec)
        row = {
            "policy": f"[`{name}`](#{name})",
            "keeps": markdown(doc.summary.rstrip(".")),
            "needs": ", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-",
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
    """The policy that others are compared to, and their times over its time."""

    def place(record):
        return json.dumps([record.get(k) for k in ("schedule", "budget", "batch")])

    rates = {}
    for each in records:
        name = _label(each)
        if each.get("tokens_per_s") and name in policies.names():
            rates.setdefault(name, {})[place(each)] = each["tokens_per_s"]
    base = next((name for name in ("recency", "streaming") if name in rates), "")
    ratios = {
        name: [rates[base][at] / mine[at] for at in mine if at in rates[base]]
        for name, mine in (rates.items() if base else ())
    }
    return base, {
        name: statistics.median(each) for name, each in ratios.items() if each
    }


def section(name: str, level: int, picture: str = "") -> str:
    """A factory's docstring as markdown, its parameters as a table."""
    doc, given = doc_of(name), defaults(name)
    rows = [
        {
            "parameter": f"`{key}`",
            "default": "" if value is inspect.Parameter.empty else f"`{value!r}`",
            "meaning": markdown(doc.args.get(key, "")),
        }
        for key, value in given.items()
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
    """A policy's section of the gallery."""
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
        f"![Positions that {name} holds](policies/{name}.png)",
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
    """The sweep's pictures, its best policies, and what was read from it."""
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
    """A table: for each schedule and budget, who finds most and who strays least."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for each in records:
        if each.get("budget") is not None:
            key = str(each.get("schedule")), json.dumps(each["budget"])
            groups.setdefault(key, []).append(each)
    rows = [
        {
            "schedule": f"`{schedule}`",
            "budget": budget,
            "most needles found": _leaders(group, "accuracy", max, "{:.2f}"),
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
    """What a sweep calls the policy, with what else it changes."""
    return str(each.get("label") or each.get("policy"))


def _included(title: str, words: str, make: Callable[[], str]) -> str:
    """A section that another module makes."""
    try:
        return f"## {title}\n\n{words}\n{make().strip()}"
    except (AttributeError, ImportError, OSError) as error:
        return _missing(f"the section {title!r} ({error})")


def _golden() -> str:
    return _module("tests", "golden_cases").table()


def _padding(docs: pathlib.Path) -> str:
    found = json.loads((docs / "data" / "padding.json").read_text())
    return _module("experiments", "padding").table(found["records"])


def _module(folder: str, name: str) -> Any:
    place = str(ROOT / folder)
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module(name)


def _missing(what: str) -> str:
    print(f"left out: {what}", file=sys.stderr)
    return ""


def markdown(words: str) -> str:
    """Prose in which signs are signs; what stands in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", words)
    parts[::2] = [re.sub(r"([*<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def short_source(source: str) -> str:
    """Up to the year."""
    year = re.match(r".*?\(?\b\d{4}\b\)?", source)
    return (year[0] if year else source).rstrip(".")


def table(rows: Sequence[dict[str, str]], right: Sequence[str] = ()) -> str:
    """A markdown table; `right` names the columns of numbers."""
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
    made = FLAGS.text_only or FLAGS.redraw
    data = read(path) if made or FLAGS.only else NOTHING
    if made and not data["policies"]:
        raise UserError(f"{path} is missing: run without --text_only and --redraw")
    if not made:
        data = run(only, data, path)
    if not FLAGS.text_only:
        draw([name for name in only if name in data["policies"]], data, DOCS)
    (DOCS / "policies.md").write_text(page(data, DOCS))
    print(json.dumps(summary(data, time.perf_counter() - start)))


def draw(names: Sequence[str], data: Data, docs: pathlib.Path) -> None:
    """Pictures of these policies, and the overview if all are there."""
    for name in tqdm(names, desc="pictures"):
        draw_policy(name, data, docs / "policies" / f"{name}.png")
    order = by_cost(Shape(**data["setting"]["shape"]))
    known = [name for name in order if name in data["policies"]]
    draw_overview(known, data, docs / "policies" / "overview.png")


def summary(data: Data, seconds: float) -> Data:
    """The numbers of the last line."""
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


def _parse(argv: list[str]) -> list[str]:
    """Flags that do not parse are the user's mistake, like any other."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        raise UserError(f"flags: {error}".splitlines()[0]) from None


if __name__ == "__main__":
    define_flags()
    try:
        app.run(main, flags_parser=_parse)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
