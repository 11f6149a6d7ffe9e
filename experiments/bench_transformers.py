r"""Times kvjax with the full cache beside transformers on PyTorch.

    python experiments/bench_transformers.py --baseline_python=/path/to/venv/bin/python

SmolLM2-135M-Instruct in float32, the same tokens on the same machine in one run. The
two libraries take turns, one waiting while the other computes. --baseline_python names
an environment with torch, transformers, gguf and absl-py, which need not have JAX. The
baseline counts at its faster of `generate` and a plain loop of `forward`.

Two virtual cores of an AMD EPYC; jax 0.10.2, torch 2.13, transformers 5.2.0; medians in
tokens/s, min..max over three rounds, all tokens equal::

    decode, batch 1     42 (40..43)   /  17 (15..17)    = 2.50
    decode, batch 16   251 (248..271) / 152 (120..165)  = 1.65
    prefill, 4 x 512   639 (598..673) / 596 (581..656)  = 1.07

Use an idle machine: beside other jobs PyTorch fell as low as 2.4 tokens/s at batch 1.

About five minutes once the programs are compiled. The last line is JSON; where the
baseline cannot run, one line says why and the exit code is 2.
"""

import functools
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import baselines
import command_line
from absl import flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "a name that kvjax.load knows")
flags.DEFINE_string("baseline_python", sys.executable, "the interpreter that has torch")
flags.DEFINE_integer("prompt", 128, "prompt tokens of the decoding cases")
flags.DEFINE_integer("new", 32, "tokens to decode")
flags.DEFINE_integer("prefill_chunk", 128, "p, prompt tokens that kvjax reads at once")
flags.DEFINE_list("only", ["1", "16", "4"], "cases to run, by their batch")
flags.DEFINE_integer("rounds", 5, "turns of each side, after one to warm up")
flags.DEFINE_bool("worker", False, "be the transformers side: JSON lines in and out")

BASELINE_WAYS = "loop", "generate"


class Case(NamedTuple):
    """One measurement; `new` is 0 where only the prefill is timed."""

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Returns the tokens of the timed phase; prefill produces the first new one."""
        return self.batch * (self.new - 1 if self.new else self.prompt)


def main(_):
    logging.set_verbosity(logging.WARNING)
    if FLAGS.worker:
        return baselines.serve(("torch", "transformers"), answer)
    cases = (
        Case("decode, batch 1", 1, FLAGS.prompt, FLAGS.new),
        Case("decode, batch 16", 16, FLAGS.prompt, FLAGS.new),
        Case("prefill, 4 x 512", 4, 512, 0),
    )
    baseline = baselines.Baseline(FLAGS.baseline_python, __file__, "--worker")
    ours = kvjax_side(baseline)
    figures = {
        case.name: race(case, ours, baseline)
        for case in cases
        if str(case.batch) in FLAGS.only
    }
    baseline.close()
    show(figures)
    print(json.dumps(summary(figures, baseline.versions)))


def race(case: Case, ours, baseline) -> dict[str, Any]:
    """Measures tokens per second of both libraries in turn, and compares tokens."""
    prompts = ours.prompts(case)
    sides = {"kvjax": lambda: ours.run(case, prompts)}
    for way in BASELINE_WAYS if case.new else BASELINE_WAYS[:1]:
        request = {"prompts": prompts, "new": case.new, "way": way}
        sides[way] = functools.partial(baseline.ask, request)
    for run in sides.values():
        run()
    rates, tokens = {name: [] for name in sides}, []
    for _ in range(FLAGS.rounds):
        for name, run in sides.items():
            done = run()
            rates[name].append(case.tokens / done["seconds"])
            tokens.append(done["tokens"])
    mine = spread(rates.pop("kvjax"))
    way = max(rates, key=lambda way: statistics.median(rates[way]))
    other = spread(rates[way])
    return {
        "kvjax": mine,
        "transformers": other,
        "way": way,
        "ratio": round(mine["median"] / other["median"], 3),
        "tokens_equal": all(chosen == tokens[0] for chosen in tokens),
    }


# ------------------------------------------------------------------------- kvjax


def kvjax_side(baseline: baselines.Baseline):
    """Returns kvjax's runs; imports here because the worker may have no JAX."""
    import kvjax
    from kvjax.cache.spec import make_spec
    from kvjax.engine import runner
    from kvjax.engine.jobs import Job
    from kvjax.evaluation.tasks import text
    from kvjax.models.weights import hub

    model = kvjax.load(FLAGS.model)
    baseline.load(hub.fetch(FLAGS.model))
    full = kvjax.Schedule("none", prefill_chunk=FLAGS.prefill_chunk)
    config = make_spec(model.spec, None, None, full)
    words = model.tokenizer(text.haystack(), verbose=False)["input_ids"]

    class Ours:
        def prompts(self, case):
            starts = range(0, case.batch * case.prompt, case.prompt)
            return [words[start : start + case.prompt] for start in starts]

        def run(self, case, prompts):
            job = Job(model.spec, config, case.batch, case.prompt, case.new or 1)
            whole = runner.Whole(model.params, job)
            done = runner.run_batch(whole, prompts, range(case.batch))
            seconds = done.decode_seconds if case.new else done.prefill_seconds
            return {"seconds": seconds, "tokens": done.tokens}

    return Ours()


# ------------------------------------------------------------------- transformers


def answer(model, request):
    """Returns seconds and tokens of one turn; runs in the worker."""
    import torch

    call = {"generate": by_generate, "loop": by_loop}[request["way"]]
    return call(model, torch.tensor(request["prompts"]), request["new"])


def by_generate(model, prompts, new):
    """Times `generate` for `new` tokens, minus the time for the first one."""
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": prompts >= 0}

    def timed(count):
        start = time.perf_counter()
        out = model.generate(
            prompts, min_new_tokens=count, max_new_tokens=count, **options
        )
        return time.perf_counter() - start, out

    first, _ = timed(1)
    total, out = timed(new)
    return {"seconds": total - first, "tokens": out[:, prompts.shape[1] :].tolist()}


def by_loop(model, prompts, new):
    """Times plain decode steps, or the prefill if `new` is 0."""
    from baselines import decoding

    start = time.perf_counter()
    prompt = decoding.prefill(model, prompts)
    read = time.perf_counter()
    tokens = decoding.decode(model, prompt, new or 1)
    end = time.perf_counter()
    return {"seconds": end - read if new else read - start, "tokens": tokens}


# ----------------------------------------------------------------------- the report


def spread(rates: list[float]) -> dict[str, float]:
    parts = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    return {name: round(rate, 2) for name, rate in parts.items()}


def show(figures):
    """Prints the medians in tokens per second, with min..max, as a Markdown table."""

    def cell(side):
        return "{median:.1f} ({min:.1f}..{max:.1f})".format_map(side)

    print("| tokens/s | kvjax | transformers | ratio | its way | same tokens |")
    print("|---|---|---|---|---|---|")
    for name, row in figures.items():
        cells = [name, cell(row["kvjax"]), cell(row["transformers"])]
        cells += [f"{row['ratio']:.2f}", row["way"], str(row["tokens_equal"]).lower()]
        print(f"| {' | '.join(cells)} |")


def summary(figures, versions) -> dict[str, Any]:
    import jax

    return {
        "cases": figures,
        "tokens_equal": all(row["tokens_equal"] for row in figures.values()),
        "prefill_chunk": FLAGS.prefill_chunk,
        "rounds": FLAGS.rounds,
        "jax": jax.__version__,
        **versions,
    }


if __name__ == "__main__":
    command_line.run(main)
