r"""Decoding with heads that keep different numbers of pairs, against heads all alike.

    python experiments/bench_heads.py [--slots=256] [--batch=12]

SmolLM2's shape with random weights and full caches: as many pairs in all, shared out
alike, and by the calibration that ships with the package in sizes that are multiples of
less and less. Ways take turns, a call runs --steps decode steps with one eviction, and
the median time of a step is reported with its ratio to heads all alike.

--target=tpu:v6e compiles a step instead, without a device (see bench_layout.py for
targets), with attention in XLA, which the compiler has cycles for. Of a conditional it
counts the dearest branch, so --phases=after_prefill leaves evictions out.

The last line is JSON with every figure. Two cores: five minutes, mostly compiling.
"""

import dataclasses
import functools
import json

import command_line
import jax
import jax.numpy as jnp
import model_step
import racing
from absl import flags

from kvjax import policies
from kvjax.cache import by_need, calibrations, head_groups
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.models import decoder
from kvjax.types import UserError

FLAGS = flags.FLAGS
MODEL = "smollm2-135m-instruct"


def define_flags():
    racing.define_flags(repeats=7)
    flags.DEFINE_integer("batch", 12, "B, rows", lower_bound=1)
    flags.DEFINE_integer("slots", 256, "|kv|, pairs per head on average", lower_bound=1)
    flags.DEFINE_integer("length", 1000, "tokens of the prompts that share these out")
    flags.DEFINE_integer("steps", 32, "decode steps of a call, and pairs an eviction")
    flags.DEFINE_string("policy", "key_diff", "a rule's name")
    flags.DEFINE_enum(
        "phases", "prefill_and_decode", ["prefill_and_decode", "after_prefill"], "when"
    )
    flags.DEFINE_list("multiples", ["128", "64", "32"], "of which sizes are multiples")


def main(_):
    jax.config.update("jax_enable_compilation_cache", False)
    if wrong := [m for m in FLAGS.multiples if not m.isdecimal() or int(m) < 1]:
        raise UserError(f"--multiples={wrong[0]}: give whole numbers, 1 or more")
    ways = {"all alike": way(None)}
    ways |= {f"multiples of {m}": way(int(m)) for m in FLAGS.multiples}
    figures = racing.race(ways)
    racing.compare(figures, "all alike")
    for name, multiple in zip(ways, (None, *map(int, FLAGS.multiples)), strict=True):
        sizes = config_of(multiple).budget
        figures[name] |= {"sizes": len(head_groups.distinct_sizes(sizes))}
        figures[name] |= {
            "parts": sum(len(head_groups.of_sizes(layer)) for layer in sizes)
        }
    racing.show("a decode step", figures)
    told = {name: FLAGS[name].value for name in ("target", "batch", "slots", "policy")}
    print(json.dumps({**told, "jax": jax.__version__, **figures}))


@functools.cache
def config_of(multiple):
    """Heads all alike, or sizes by the calibration that are multiples of a number."""
    rule = policies.protect(
        policies.make(FLAGS.policy), calibrations.SINKS, calibrations.NEWEST
    )
    schedule = Schedule(FLAGS.phases, FLAGS.steps, FLAGS.steps)
    floor = max(rule.num_pinned + 8, FLAGS.steps) + FLAGS.steps
    how = functools.partial(by_need.calibrated, FLAGS.length, floor=floor)
    return make_spec(
        spec(),
        *(rule, FLAGS.slots, schedule),
        budget_rule=multiple and how(multiple=multiple),
        implementation=None if FLAGS.target == "cpu" else "reference",
    )


def spec():
    return dataclasses.replace(model_step.SPECS["smollm2-135m"], name=MODEL)


def way(multiple):
    config, shape = config_of(multiple), spec()
    dtype = jnp.float32 if FLAGS.target == "cpu" else jnp.bfloat16

    def make():
        params = decoder.random_params(shape, jax.random.key(0), dtype)
        given = shape, config, FLAGS.batch, FLAGS.steps, dtype
        return model_step.nearly_full(*given), params

    def call(state, params):
        step = functools.partial(model_step.step, params, spec=shape, config=config)
        state = jax.lax.fori_loop(0, FLAGS.steps, lambda i, carry: step(*carry), state)
        return state, state[1]

    return racing.Way(call, make, FLAGS.steps)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
