r"""Decoding with pairs in fewer bits, against pairs as they are.

    python experiments/bench_codecs.py [--slots=512] [--batch=16]

SmolLM2's shape with random weights and full caches that are evicted from: a step of as
many rows under every codec, and of as many more as pairs take fewer bytes, so that the
caches are equally large. Ways take turns, a call runs --steps decode steps, and the
median time of a step is reported with its ratio to pairs as they are, and the tokens of
all rows in a second.

--target=tpu:v6e compiles a step instead, without a device (see bench_layout.py for
targets): its temporary memory, and the compiler's cycles but for those of kernels.

The last line is JSON with every figure. Two cores: a quarter of an hour.
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

from kvjax.cache import codecs
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.models import decoder

FLAGS = flags.FLAGS
PLAIN = "identity"
POSITION = 4  # bytes of a pair's


def define_flags():
    racing.define_flags(repeats=7)
    flags.DEFINE_integer("batch", 16, "B, rows of pairs as they are", lower_bound=1)
    flags.DEFINE_integer("slots", 512, "|kv|, pairs per head", lower_bound=1)
    flags.DEFINE_integer("steps", 32, "decode steps of a call, and pairs an eviction")
    flags.DEFINE_integer("layers", 30, "of the model", lower_bound=1)
    flags.DEFINE_string("policy", "average_attention", "a rule's name")
    flags.DEFINE_list("codecs", ["int8", "k8v4", "int4", "int4_rotated"], "their names")


def main(_):
    jax.config.update("jax_enable_compilation_cache", False)
    asked = {name: (name, FLAGS.batch) for name in (PLAIN, *FLAGS.codecs)}
    asked |= {f"{name}, equal bytes": (name, rows(name)) for name in FLAGS.codecs}
    figures = racing.race({name: way(*each) for name, each in asked.items()})
    racing.compare(figures, PLAIN)
    for name, (codec, batch) in asked.items():
        row = figures[name]
        row |= {"rows": batch, "bytes a pair": pair_bytes(codec)}
        if "ms" in row:
            row["tokens/s"] = 1e3 * batch / row["ms"]
    racing.show("a decode step", figures)
    told = {name: FLAGS[name].value for name in ("target", "slots", "policy", "layers")}
    print(json.dumps({**told, "jax": jax.__version__, **figures}))


def dtype():
    return jnp.float32 if FLAGS.target == "cpu" else jnp.bfloat16


def pair_bytes(codec):
    """Of one head and token, its position included."""
    stored = codecs.pair_bytes(codecs.make(codec), spec().head_dim, dtype().__name__)
    return stored + POSITION


def rows(codec):
    """So many as fit where pairs as they are have `--batch`."""
    return int(FLAGS.batch * pair_bytes(PLAIN) / pair_bytes(codec))


@functools.cache
def spec():
    shape = model_step.SPECS["smollm2-135m"]
    return dataclasses.replace(shape, num_layers=FLAGS.layers)


def way(codec, batch):
    schedule = Schedule("prefill_and_decode", FLAGS.steps, FLAGS.steps)
    config = make_spec(spec(), FLAGS.policy, FLAGS.slots, schedule, codec=codec)

    def make():
        params = decoder.random_params(spec(), jax.random.key(0), dtype())
        given = spec(), config, batch, FLAGS.steps, dtype()
        return model_step.nearly_full(*given), params

    def call(state, params):
        step = functools.partial(model_step.step, params, spec=spec(), config=config)
        state = jax.lax.fori_loop(0, FLAGS.steps, lambda i, carry: step(*carry), state)
        return state, state[1]

    return racing.Way(call, make, FLAGS.steps)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
