"""Measures how soon tokens come: the first, the next ones, and the host's share.

    python experiments/engine/streaming_latency.py
    python experiments/engine/streaming_latency.py --model=tiny --batches=1,64

`Engine.stream` runs as many requests at once as --batches says, each after one run to
compile. By batch:

  first_ms    from the call to a request's first token
  between_ms  between two pieces of a request, divided by the second one's tokens
  step_ms     the time of the whole call, prompts included, per decode step; and the
              same of `Engine.generate`, which looks at the tokens less often

Of the model `tiny` (two layers of width 64) the device computes next to nothing, so its
step_ms is the host's overhead: scheduling, copies from the device, text. Prints a table
and, last, one JSON line.
"""

import json
import time

from absl import flags, logging
from engine_runs import (
    counted_steps,
    define_model_flags,
    model_of,
    passages,
    record,
    spread,
    timed,
)

import kvjax
from kvjax.cli import command
from kvjax.types import UserError

FLAGS = flags.FLAGS


def define_flags() -> None:
    define_model_flags()
    flags.DEFINE_list("batches", ["1", "64"], "requests at a time")
    flags.DEFINE_integer("prompt", 128, "tokens of every prompt", 1)
    flags.DEFINE_integer("new", 64, "new tokens of every request", 2)
    flags.DEFINE_integer("rounds", 3, "calls that are measured together", 1)
    flags.DEFINE_list("stop", [], "stop texts to look for")


def main(_):
    logging.set_verbosity(logging.WARNING)
    batches = [checked_batch(each) for each in FLAGS.batches]
    model = model_of(FLAGS)
    engine = kvjax.Engine(
        model,
        memory_gb=FLAGS.memory_gb,
        prompt_tokens=FLAGS.prompt,
        show_progress=False,
    )
    found = {str(batch): measured(engine, batch) for batch in batches}
    show(found)
    settings = {name: FLAGS[name].value for name in ("prompt", "new", "rounds", "stop")}
    print(json.dumps(record("streaming_latency", model, **settings, batches=found)))


def checked_batch(text):
    if not text.isdecimal() or not int(text):
        raise UserError(f"--batches has {text!r}: give whole numbers above 0")
    return int(text)


def measured(engine, batch):
    """Returns the latencies of one batch."""
    prompts = passages(engine.model, batch, FLAGS.prompt)
    sampling = kvjax.Sampling(
        max_new_tokens=FLAGS.new, ignore_eos=True, stop=tuple(FLAGS.stop)
    )
    stream = lambda: times_of(engine.stream(prompts, sampling))
    generate = lambda: engine.generate(prompts, sampling)
    stream(), generate()
    first, between = [], []
    for _ in range(FLAGS.rounds):
        times = stream()
        first += times[0]
        between += times[1]
    return {
        "first_ms": spread(first, 1e3),
        "between_ms": spread(between, 1e3),
        "step_ms": {
            "stream": per_step(stream),
            "generate": per_step(generate),
        },
    }


def times_of(pieces):
    """Returns seconds to first tokens, and seconds per token between pieces."""
    last, first, between = {}, [], []
    start = time.perf_counter()
    for piece in pieces:
        now, key = time.perf_counter(), (piece.prompt, piece.sample)
        if not piece.tokens:
            continue
        if key in last:
            between += [(now - last[key]) / len(piece.tokens)] * len(piece.tokens)
        else:
            first.append(now - start)
        last[key] = now
    return first, between


def per_step(call):
    """Returns milliseconds per decode step, of the fastest of several calls."""
    best = []
    for _ in range(FLAGS.rounds):
        with counted_steps() as steps:
            best.append(1e3 * timed(call).seconds / max(sum(steps), 1))
    return float(f"{min(best):.4g}")


def show(found):
    names = "first p50", "p99", "between p50", "p99", "step, stream", "generate"
    print(f"{'batch':<8}" + "".join(f"{name:>14}" for name in names) + "   (ms)")
    for batch, row in found.items():
        figures = [row[of][cut] for of in ("first_ms", "between_ms") for cut in CUTS]
        figures += row["step_ms"].values()
        print(f"{batch:<8}" + "".join(f"{each:>14,.2f}" for each in figures))


CUTS = "p50", "p99"


if __name__ == "__main__":
    define_flags()
    command.run(main)
