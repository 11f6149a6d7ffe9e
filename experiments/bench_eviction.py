r"""Two forms of Algorithm 1: slots that are reused, in loops that end when all is read,
or a scan over blocks with a gather.

    python experiments/bench_eviction.py [--slots=512] [--batch=4]

SmolLM2's shape with random weights reads prompts of --length tokens and decodes --steps
tokens, by average attention. *Slots reused*: victims are marked empty and new pairs
move into their slots. *Gather*: `take_along_axis` moves what is kept to the front
(`eviction="compact"`). *Loop*: as many blocks or steps as there are, a number known at
run time, as kvjax does; *scan*: `lax.scan` over all that a program was compiled for,
here just as many; a prompt half as long would take as long. *First block as printed*:
|kv| tokens at once, where the others read |kv| mod p and then p at a time.

Ways take turns, a call reads the prompts or runs the steps, and its median time is
reported with its ratio to the default. --target=tpu:v6e compiles instead, without a
device (see bench_layout.py for targets), with attention in XLA, which the compiler has
cycles for.

The last line is JSON with every figure. Two cores: ten minutes.
"""

import functools
import json

import command_line
import jax
import jax.numpy as jnp
import model_step
import racing
from absl import flags

from kvjax import cache, policies
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.engine import steps
from kvjax.models import decoder
from kvjax.types import UserError

FLAGS = flags.FLAGS
SPEC = model_step.SPECS["smollm2-135m"]
DEFAULT = "slots reused, loop"


def define_flags():
    racing.define_flags(repeats=5)
    flags.DEFINE_integer("batch", 4, "B, rows", lower_bound=1)
    flags.DEFINE_integer("slots", 512, "|kv|, pairs per head", lower_bound=2)
    flags.DEFINE_integer("block", 64, "p, tokens of a block, and pairs an eviction")
    flags.DEFINE_integer("length", 1024, "tokens of the prompts", lower_bound=1)
    flags.DEFINE_integer("steps", 64, "decode steps of a call", lower_bound=1)
    flags.DEFINE_list("section", ["prefill", "decode"], "what to race")


def main(_):
    jax.config.update("jax_enable_compilation_cache", False)
    told = {"target": FLAGS.target, "batch": FLAGS.batch, "slots": FLAGS.slots}
    sections = {"prefill": reading, "decode": decoding}
    if unknown := set(FLAGS.section) - set(sections):
        raise UserError(f"--section={unknown.pop()}: use some of {', '.join(sections)}")
    for section in FLAGS.section:
        figures = racing.race(sections[section]())
        racing.compare(figures, DEFAULT)
        racing.show(section, figures)
        told[section] = figures
    print(json.dumps({**told, "jax": jax.__version__}))


def reading():
    """The prompts of a batch, whole."""
    loop = lambda params, state, tokens, lengths, config: steps.prefill(
        params, state, tokens, lengths, spec=SPEC, config=config
    )
    ways = {
        DEFAULT: read_way(loop, config_of()),
        "gather, loop": read_way(loop, config_of(eviction="compact")),
        "slots reused, scan": read_way(scan_blocks, config_of()),
        "gather, scan": read_way(scan_blocks, config_of(eviction="compact")),
    }
    printed = config_of(first_chunk="budget")
    return ways | {
        "slots reused, loop, first block as printed": read_way(loop, printed)
    }


def config_of(first_chunk="remainder", **options):
    """Batch-Max by one of the forms."""
    return make_spec(
        SPEC,
        policies.average_attention(),
        FLAGS.slots,
        Schedule("prefill_and_decode", FLAGS.block, FLAGS.block, first_chunk),
        implementation=None if FLAGS.target == "cpu" else "reference",
        **options,
    )


def read_way(read, config):
    dtype = jnp.float32 if FLAGS.target == "cpu" else jnp.bfloat16

    def make():
        capacity = config.prefill_capacity(SPEC, FLAGS.length, FLAGS.steps)
        state = cache.init(SPEC, config, FLAGS.batch, capacity, dtype)
        shape = FLAGS.batch, FLAGS.length
        tokens = jax.random.randint(jax.random.key(1), shape, 0, SPEC.vocab_size)
        lengths = jnp.full(shape[:1], FLAGS.length, jnp.int32)
        return (state, tokens, lengths), weights(dtype)

    def call(given, params):
        state, tokens, lengths = given
        state = emptied(state)
        state, logits = read(params, state, tokens, lengths, config=config)
        return (state, tokens, lengths), logits

    return racing.Way(call, make)


def emptied(state):
    """The state as before a prompt, in the same memory."""
    layers = (
        layer.replace(positions=layer.positions * 0 - 1) for layer in state.layers
    )
    stats = jax.tree.map(jnp.zeros_like, state.stats)
    unread = jnp.zeros_like(state.next_pos)
    return state.replace(layers=tuple(layers), stats=stats, next_pos=unread)


def scan_blocks(params, state, tokens, lengths, *, config):
    """`steps.prefill` by a scan over all blocks that the prompts have room for."""
    block = FLAGS.block
    blocks = jnp.swapaxes(tokens.reshape(tokens.shape[0], -1, block), 0, 1)

    def read(carry, block_of):
        state, start, last = carry
        n = jnp.clip(lengths - start, 0, block)
        given = params, SPEC, block_of, n, state, config
        hidden, state = steps.forward(*given, is_prefill=True)
        end = jnp.maximum(n - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
        last = jnp.where((n > 0)[:, None], newest, last)
        return (state, start + block, last), None

    hidden = jnp.zeros((tokens.shape[0], SPEC.model_dim), params["embed"].dtype)
    carry, _ = jax.lax.scan(read, (state, jnp.int32(0), hidden), blocks)
    return carry[0], decoder.logits(params, carry[2], SPEC)


def decoding():
    """Steps of full caches, with one eviction in every p of them."""
    return {
        DEFAULT: decode_way(config_of(), loop_steps),
        "gather, loop": decode_way(config_of(eviction="compact"), loop_steps),
        "slots reused, scan": decode_way(config_of(), scan_steps),
        "gather, scan": decode_way(config_of(eviction="compact"), scan_steps),
    }


def decode_way(config, run):
    dtype = jnp.float32 if FLAGS.target == "cpu" else jnp.bfloat16

    def make():
        given = SPEC, config, FLAGS.batch, FLAGS.block, dtype
        limit = jnp.int32(FLAGS.steps)
        return (*model_step.nearly_full(*given), limit), weights(dtype)

    def call(state, params):
        step = functools.partial(model_step.step, params, spec=SPEC, config=config)
        *state, limit = state
        state = run(step, tuple(state), limit)
        return (*state, limit), state[1]

    return racing.Way(call, make, FLAGS.steps)


def loop_steps(step, state, limit):
    """As many as are wanted, known at run time; ends early when all rows have ended."""
    body = lambda carry: (carry[0] + 1, step(*carry[1]))
    return jax.lax.while_loop(lambda c: c[0] < limit, body, (jnp.int32(0), state))[1]


def scan_steps(step, state, limit):
    """As many as the program was compiled for."""
    del limit
    body = lambda carry, _: (step(*carry), None)
    return jax.lax.scan(body, state, length=FLAGS.steps)[0]


def weights(dtype):
    return decoder.random_params(SPEC, jax.random.key(0), dtype)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
