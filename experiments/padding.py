r"""What padding does to the pairs a prompt keeps, in kvpress and in kvjax.

    python experiments/padding.py --baseline_python=/path/to/venv/bin/python

One batch holds four prompts of 120 tokens and four of 200, and half of its slots go
once the prompts are in. Do the shorter ones get what each gets alone? The same model in
float32, the same tokens, the same rules and settings on both sides.

kvpress is driven as transformers pads: on the left, with `attention_mask`, through
`generate`. No press looks at that mask, so padding competes for the slots. How well it
does depends on the token it is made of, so two are tried: the one that the model's
tokenizer pads with, which also ends every turn of a chat, and the one that ended texts
in pretraining, a usual choice where no other is set. `--attention=eager` hands SnapKV
and TOVA attention weights that are masked; the default hands them none, and they
compute their own.

kvpress takes its ratio of the padded length, so a shorter row has 100 slots in the
batch and 60 alone. To be fair to it, "alone" is the prompt by itself with the ratio
that leaves 100 slots too; `agreement_with_half` is the share of the pairs kept alone at
the ratio itself that the batch kept. kvjax takes a number of pairs: 100, in the batch
and alone; `--half` adds 60. With 100 of 120 tokens kept, two blind choices would agree
to 83%.

The tokens that follow show a second thing: `generate` goes on applying the mask of the
padded prompt, column by column, to slots that hold other tokens by then. So
`same_tokens_loop` counts the rows that are right when nothing is masked after the
prompt and positions are the true ones, as in kvpress' own pipeline, which takes one
context at a time.

That the other side is driven right is checked in every run, and kept in `checks`:
without a press the padded batch writes what its prompts write alone; with one, a batch
without padding and the longest row keep and write what they do alone; and what a prompt
alone keeps and writes is the same in both libraries. What kvpress kept is read off the
keys that its `compress` hands back.

Six minutes on two cores once kvjax's programs are compiled, which takes as long again
the first time. The last line is JSON; where the baseline cannot run, one line says why
and the exit code is 2.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import baselines
import command_line
from absl import flags, logging
from baselines import presses

FLAGS = flags.FLAGS
LABELS = {k: v for k, v in presses.LABELS.items() if k not in presses.EAGER}
PACKAGES = "kvpress", "torch", "transformers"  # of the other side
WINDOW, KERNEL = 32, 5  # of SnapKV, on both sides
SETTINGS = "model", "attention", "short", "long", "pads", "pairs", "new", "half"
PAD = -1  # position of a slot that holds none of the prompt's tokens


def define_flags() -> None:
    flags.DEFINE_string("model", "smollm2-135m-instruct", "a name kvjax.load knows")
    flags.DEFINE_string(
        "baseline_python", sys.executable, "the interpreter with kvpress"
    )
    flags.DEFINE_string("attention", "sdpa", "transformers' attention: sdpa or eager")
    flags.DEFINE_integer("short", 120, "tokens of the shorter prompts")
    flags.DEFINE_integer("long", 200, "tokens of the longer prompts")
    flags.DEFINE_list("pads", ["<|im_end|>", "<|endoftext|>"], "tokens to pad with")
    flags.DEFINE_integer("pairs", 4, "prompts of either length in the batch")
    flags.DEFINE_integer("new", 16, "greedy tokens after the prompt")
    flags.DEFINE_bool("half", False, "kvjax with half of a shorter prompt's pairs too")
    flags.DEFINE_list("only", list(LABELS), "policies")
    flags.DEFINE_string("workdir", "docs/data", "where padding.json goes")
    flags.DEFINE_bool("worker", False, "be the kvpress side: JSON lines in and out")


class Row(NamedTuple):
    """What became of one prompt.

    Attributes:
      kept: `[layer][head]`, positions of the slots that outlived the compression; PAD
        for a slot that holds none of the prompt's tokens.
      tokens: the greedy tokens that followed.
      loop: the same, decoded without the padding mask; kvpress only.
    """

    kept: list[list[list[int]]]
    tokens: list[int]
    loop: list[int] | None = None


Run = Callable[[list[list[int]], int], list[Row]]  # (one batch, slots) -> its rows


def main(_):
    logging.set_verbosity(logging.WARNING)
    if FLAGS.worker:
        return baselines.serve(PACKAGES, answer)
    import kvjax
    from kvjax.evaluation.tasks import text
    from kvjax.models.weights import hub

    start = time.perf_counter()
    baseline = baselines.Baseline(FLAGS.baseline_python, __file__, "--worker")
    baseline.load(hub.fetch(FLAGS.model), FLAGS.attention)
    model = kvjax.load(FLAGS.model)
    words = model.tokenizer(text.haystack(), verbose=False)["input_ids"]
    prompts = cut(words, [FLAGS.short, FLAGS.long], FLAGS.pairs)

    def kvpress_side(name):
        ids = {pad: model.tokenizer.convert_tokens_to_ids(pad) for pad in FLAGS.pads}
        made = functools.partial(
            functools.partial, kvpress_rows, baseline, name, FLAGS.new
        )
        return {pad: made(number) for pad, number in ids.items()}

    checks = [
        {"policy": None, "pad": pad, **check_full(prompts, full)}
        for pad, full in kvpress_side(None).items()
    ]
    records = []
    for name in FLAGS.only:
        ours = functools.partial(kvjax_rows, model, policy_of(name), FLAGS.new)
        sides = kvpress_side(name), ours
        made, checked = compare(name, prompts, *sides, FLAGS.half)
        records += made
        checks.append(checked)
        for line in (*made, checked):
            print(json.dumps(line), file=sys.stderr, flush=True)
    baseline.close()
    found = {
        "records": records,
        "checks": checks,
        "settings": settings(),
        "versions": {**versions(), **baseline.versions},
        "machine": machine(),
        "command": command(),
        "seconds": round(time.perf_counter() - start),
    }
    out = pathlib.Path(FLAGS.workdir) / "padding.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(records))
    print(json.dumps({"out": str(out), "records": records}))


class Prompts(NamedTuple):
    """The batch: its shorter rows and its longer ones."""

    short: list[list[int]]
    long: list[list[int]]


def cut(words: Sequence[int], lengths: Sequence[int], count: int) -> Prompts:
    """`count` prompts of each length, one after the other in the text."""
    rest = iter(words)
    return Prompts(
        *([list(itertools.islice(rest, n)) for _ in range(count)] for n in lengths)
    )


# ---------------------------------------------------------------------- the figures


def compare(
    name: str, prompts: Prompts, theirs: dict[str, Run], ours: Run, half: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One policy on both sides.

    Args:
      name: of the policy.
      prompts: the batch.
      theirs: kvpress by the token it pads with.
      ours: kvjax.
      half: kvjax with half of a shorter prompt's pairs too.

    Returns:
      A record per padding token of kvpress and per budget of kvjax, and the checks of
      kvpress' side.
    """
    short, long = prompts
    few, many = len(short[0]) // 2, len(long[0]) // 2
    records = []

    def record(batch, alone, **about):
        made = measure(batch[: len(short)], alone)
        records.append({"policy": name, **about, **made})

    run, *_ = theirs.values()  # one prompt alone needs no padding
    alone, alone_at_half = apart(run, short, many), apart(run, short, few)
    for pad, padded in theirs.items():
        batch = padded(short + long, many)
        record(batch, alone, library="kvpress", slots=many, pad=pad)
        kept = measure(batch[: len(short)], alone_at_half)["agreement"]
        records[-1]["agreement_with_half"] = kept
    mine = {slots: apart(ours, short, slots) for slots in (many, few)[: 1 + half]}
    for slots, rows in mine.items():
        record(ours(short + long, slots), rows, library="kvjax", slots=slots)
    checked = {
        "policy": name,
        "without_padding": brief(run(short, many), alone),
        "longer_row": brief(batch[-1:], apart(run, long[-1:], many)),
        "alone_in_kvjax": brief(alone, mine[many]),
    }
    return records, checked


def apart(run: Run, prompts, slots: int) -> list[Row]:
    """Each prompt in a batch of its own."""
    return [run([prompt], slots)[0] for prompt in prompts]


def measure(batch: Sequence[Row], alone: Sequence[Row]) -> dict[str, Any]:
    """What the rows of a batch kept, and how far that is what each keeps alone.

    `agreement` is the share of the pairs kept alone that the batch kept too, over all
    (row, layer, head); `same_tokens` counts rows.
    """
    slots = sum(len(head) for row in batch for head in heads(row))
    real = [sum(p >= 0 for p in head) for row in batch for head in heads(row)]
    both, wanted = [], []
    for row, other in zip(batch, alone, strict=True):
        for head, goal in zip(heads(row), heads(other), strict=True):
            both.append(len(set(head) & set(goal)))
            wanted.append(len(goal))
    made = {
        "pads_kept_share": 1 - sum(real) / slots,
        "kept_real_min": min(real),
        "kept_real_mean": statistics.fmean(real),
        "agreement": sum(both) / sum(wanted),
        "agreement_min": min(b / w for b, w in zip(both, wanted, strict=True)),
        "same_tokens": sum(
            a.tokens == b.tokens for a, b in zip(batch, alone, strict=True)
        ),
        "rows": len(batch),
    }
    if batch[0].loop is not None:
        made["same_tokens_loop"] = sum(
            a.loop == b.tokens for a, b in zip(batch, alone, strict=True)
        )
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in made.items()}


def heads(row: Row) -> Iterable[list[int]]:
    return itertools.chain.from_iterable(row.kept)


def brief(batch: Sequence[Row], alone: Sequence[Row]) -> dict[str, Any]:
    made = measure(batch, alone)
    return {key: made[key] for key in ("agreement", "same_tokens", "rows")}


def check_full(prompts: Prompts, full: Run) -> dict[str, Any]:
    """Without a press, the padded rows write what their prompts write alone."""
    short, long = prompts
    batch = full(short + long, len(long[0]))
    rows = zip(batch, apart(full, short, len(long[0])), strict=False)
    same = [a.tokens == b.tokens for a, b in rows]  # in the loop it sees the padding
    return {"same_tokens": sum(same), "rows": len(same)}


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as a Markdown table, a line per policy.

    Where kvpress' figure depends on the token it pads with, the figures of all of them
    stand in a cell, in the order of the header.
    """
    pads = dict.fromkeys(r["pad"].strip("<|>") for r in records if "pad" in r)
    header = ["Policy"]
    for figure in (
        "Padding among the kept",
        "Kept as alone",
        "Rows that write as alone",
    ):
        header += [f"{figure}: kvpress, {' / '.join(pads)}", "kvjax"]
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    for name in dict.fromkeys(record["policy"] for record in records):
        cells = [LABELS[name]]
        for key in ("pads_kept_share", "agreement", "same_tokens"):
            for library in ("kvpress", "kvjax"):
                found = [
                    f"{record[key]} of {record['rows']}"
                    if key == "same_tokens"
                    else percent(record[key])
                    for record in records
                    if (record["policy"], record["library"]) == (name, library)
                ]
                cells.append(" / ".join(dict.fromkeys(found)))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """0% and 100% only where nothing was rounded away."""
    return f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.01), 0.99):.0%}"


# ---------------------------------------------------------------------- kvjax


def policy_of(name: str):
    """Our rule, with the settings of its press."""
    from kvjax import policies

    if name == "snapkv":
        return policies.snapkv(WINDOW, KERNEL, pool="average")
    if name == "tova":  # the press keeps the newest pair whatever its weight
        return policies.protect(policies.tova(), 0, 1)
    return policies.make(name)


def kvjax_rows(model, policy, new: int, prompts, slots: int) -> list[Row]:
    """The rows of one batch."""
    import kvjax

    done = kvjax.generate(
        model,
        prompts,
        policy=policy,
        budget=slots,
        schedule=kvjax.Schedule("after_prefill", prefill_chunk=64),
        max_new_tokens=new,
        ignore_eos=True,
    )

    def positions(head, prompt):
        """The prompt's pairs; of the budget's slots, the others hold padding."""
        held = sorted({int(p) for p in head if p < len(prompt)})
        return held + [PAD] * (slots - len(held))

    return [
        Row([[positions(h, prompt) for h in k] for k in row.kept_positions], row.tokens)
        for prompt, row in zip(prompts, done, strict=True)
    ]


# ---------------------------------------------------------------------- kvpress


def kvpress_rows(baseline, name, new: int, pad: int, prompts, slots: int) -> list[Row]:
    """The rows of one batch; without a name nothing is compressed."""
    width = max(map(len, prompts))
    ratio = presses.ratio(slots, width)
    request = {"policy": name, "ratio": ratio, "prompts": prompts}
    done = baseline.ask(request | {"new": new, "pad": pad})
    assert not name or {len(h) for k in done["kept"][0] for h in k} == {slots}
    return [Row(*row) for row in zip(*(done[f] for f in Row._fields), strict=True)]


def answer(model, request):
    """The worker's: kept positions and tokens of a batch, padded on the left."""
    import torch
    from baselines import decoding

    prompts, new, pad = (request[key] for key in ("prompts", "new", "pad"))
    width = max(map(len, prompts))
    short = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[pad] * n + p for n, p in zip(short, prompts, strict=True)])
    mask = (torch.arange(width) >= torch.tensor(short)[:, None]).long()

    press, found = press_of(request["policy"], request["ratio"])
    with press(model):
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=pad,
        )
    kept = [
        [
            [[p if (p := s - n) >= 0 else PAD for s in head] for head in layer[row]]
            for layer in found
        ]
        for row, n in enumerate(short)
    ]
    found.clear()
    tokens = out[:, width:].tolist()
    loop = tokens
    if any(short):
        loop = decoding.decode(model, decoding.prefill(model, ids, press, mask), new)
    return {"kept": kept, "tokens": tokens, "loop": loop}


def press_of(name, ratio):
    """A press, and the list it writes the slots it keeps to, `[layer]` of [B, K, n]."""
    if name is None:
        return (lambda model: contextlib.nullcontext()), []
    options = {"snapkv": {"window_size": WINDOW, "kernel_size": KERNEL}}
    press = presses.make(name, ratio, **options.get(name, {}))
    compress, found = press.compress, []

    def recorded(module, hidden_states, keys, values, attentions, kwargs):
        left = compress(module, hidden_states, keys, values, attentions, kwargs)
        found.append(slots_of(left[0], keys).tolist())
        return left

    press.compress = recorded
    return press, found


def slots_of(left, keys):
    """The slots that the keys left over come from.

    No two tokens of a prompt have equal keys; paddings do, and any of them will do.
    """
    same = (left[:, :, :, None] == keys[:, :, None]).all(dim=-1)
    assert same.any(dim=-1).all()
    return same.int().argmax(dim=-1)


# ---------------------------------------------------------------------- about the run


def settings() -> dict[str, Any]:
    return {name: FLAGS[name].value for name in SETTINGS}


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("kvjax", "jax")}
    return {"python": platform.python_version(), **packages}


def machine() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def command() -> str:
    chosen = [FLAGS[n] for n in SETTINGS if FLAGS[n].value != FLAGS[n].default]
    script = "python experiments/padding.py --baseline_python=VENV/bin/python"
    return " ".join([script, *(shlex.quote(flag.serialize()) for flag in chosen)])


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
