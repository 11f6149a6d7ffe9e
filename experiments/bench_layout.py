r"""Measures the choices behind the cache's layout, for docs/results/cache_layout.md.

    python experiments/bench_layout.py --section=layers,keys,append,room,compile

Every section races a few ways of computing the same thing. On the CPU the ways take
turns and the median time is reported. For another target they are only compiled, and
the figures are the compiler's memory analysis and, for TPU, its estimate of cycles::

    --target=tpu:v5e     needs libtpu, no TPU; or a whole topology, tpu:v5p:2x2x1
    --target=cuda:FILE   needs jax-cuda13-plugin and nvidia's compiler packages, no GPU;
                         FILE holds the text of the GPU's GpuTargetConfigProto

The last line is JSON with every figure. Two cores: about six minutes for everything.
"""

import functools
import json
import re

import command_line
import jax
import jax.numpy as jnp
import model_step
from absl import flags
from racing import Way, define_flags, race, show

from kvjax.models import decoder
from kvjax.models import layers as blocks
from kvjax.types import UserError

FLAGS = flags.FLAGS
flags.DEFINE_list("section", ["layers", "keys", "append", "room"], "what to race")
define_flags(repeats=7)
flags.DEFINE_enum("shape", "smollm2", ["smollm2", "llama8b"], "the model's shape")
flags.DEFINE_integer("batch", 16, "B, rows")
flags.DEFINE_integer("slots", 576, "C, slots of a layer")
flags.DEFINE_integer("block", 64, "p, pairs evicted together; also a prefill block")
flags.DEFINE_string("only", "", "regular expression: race only the ways it finds")

SHAPES = {"smollm2": "smollm2-135m", "llama8b": "llama-3.1-8b"}


def main(_):
    jax.config.update("jax_enable_compilation_cache", False)
    sections = {f.__name__: f for f in (layers, keys, append, room)}
    sections["compile"] = compile_time
    if unknown := set(FLAGS.section) - set(sections):
        raise UserError(f"--section={unknown.pop()}: use some of {', '.join(sections)}")
    figures = {}
    for section in FLAGS.section:
        for title, ways in sections[section]().items():
            ways = {n: way for n, way in ways.items() if re.search(FLAGS.only, n)}
            if ways:
                figures[title] = race(ways)
                show(title, figures[title])
    print(json.dumps({"target": FLAGS.target, "jax": jax.__version__, **figures}))


def shape():
    name = FLAGS.shape
    return model_step.SPECS[SHAPES[name]]


def new(*axes):
    """Ones of [B, K, *axes] in the target's width."""
    width = jnp.float32 if FLAGS.target == "cpu" else jnp.bfloat16
    return jnp.ones((FLAGS.batch, shape().num_kv_heads, *axes), width)


def new_layer(ragged=False):
    """A layer whose rows are full, or (ragged) will be at steps spread over p."""
    length = FLAGS.slots - jnp.arange(FLAGS.batch) * FLAGS.block // FLAGS.batch * ragged
    k, v = new(FLAGS.slots, shape().head_dim), new(FLAGS.slots, shape().head_dim)
    slot = jnp.broadcast_to(jnp.arange(FLAGS.slots), k.shape[:3])
    pos = jnp.where(slot < length[:, None, None], slot, -1)  # -1: empty
    attn_sum = jax.random.normal(jax.random.key(0), pos.shape)
    return {"k": k, "v": v, "pos": pos, "attn_sum": attn_sum, "length": length}


# ---------------------------------------------------------------- layers of a model


def layers():
    """One decode step of the whole model, inside a scan over steps."""
    ways = {
        "loop over a tuple, scatter": model_way(loop_layers),
        "loop over a tuple, where": model_way(loop_layers, put=put_where),
        "scan, cache carried": model_way(carry_layers, stacked=True),
        "scan, cache as xs and ys": model_way(scan_layers, stacked=True),
    }
    return {"a decode step": ways}


def model_way(run_layers, *, stacked=False, length=1, options=None, **writing):
    """Steps of `length` tokens: make room, write, attend, add up the weights."""
    spec, steps = shape(), 8 if length == 1 else 2
    write_new = write_pair if length == 1 else write_block

    def make():
        params = decoder.random_params(spec, jax.random.key(0), new().dtype)
        cache = tuple(new_layer() for _ in range(spec.num_layers))
        if stacked:
            stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
            params["layers"], cache = stack(params["layers"]), stack(cache)
        return (cache, jnp.zeros((FLAGS.batch, length), jnp.int32)), params

    def call(state, params):
        def step(state, now):
            cache, tokens = state
            positions = jnp.broadcast_to(now + jnp.arange(length)[None], tokens.shape)
            turns = blocks.rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope)
            angles = blocks.rope_tables(positions, turns)
            write = functools.partial(write_new, now=now, **writing)
            x = params["embed"][tokens]
            x, cache = run_layers(params["layers"], x, angles, cache, write)
            x = blocks.rms_norm(x[:, -1], params["final_norm"], spec.norm_eps)
            chosen = jnp.argmax(decoder.logits(params, x, spec), axis=-1)
            chosen = chosen.astype(jnp.int32)[:, None]
            return (cache, jnp.broadcast_to(chosen, tokens.shape)), chosen

        return jax.lax.scan(step, state, FLAGS.slots + jnp.arange(steps))

    return Way(call, make, steps, options)


def loop_layers(weights, x, angles, cache, write, wrap=lambda call: call):
    call, caches = wrap(functools.partial(decoder_layer, write=write)), []
    for layer, kept in zip(weights, cache, strict=True):
        x, kept = call(layer, x, angles, kept)
        caches.append(kept)
    return x, tuple(caches)


def carry_layers(weights, x, angles, cache, write):
    """Pairs are written straight into the stack, the small leaves as whole layers."""
    small = "pos", "attn_sum", "length"

    def body(carry, inputs):
        (x, cache), (index, layer) = carry, inputs

        def put(stack, slot, pair):
            rows, heads = jnp.indices(slot.shape, sparse=True)
            stack = stack.at[index, rows, heads, slot].set(pair)
            return stack, stack[index]

        kept = {**cache, **{name: cache[name][index] for name in small}}
        put_one = functools.partial(write, put=put)
        x, kept = decoder_layer(layer, x, angles, kept, put_one)
        kept |= {name: cache[name].at[index].set(kept[name]) for name in small}
        return (x, kept), None

    count = cache["k"].shape[0]
    return jax.lax.scan(body, (x, cache), (jnp.arange(count), weights))[0]


def scan_layers(weights, x, angles, cache, write):
    body = lambda x, pair: decoder_layer(pair[0], x, angles, pair[1], write)
    return jax.lax.scan(body, x, (weights, cache))


def decoder_layer(weights, x, angles, kept, write):
    """One layer of `decoder.forward`, with a cache that `write` updates."""
    eps = shape().norm_eps
    h = blocks.rms_norm(x, weights["attn_norm"], eps)
    q, k, v = decoder._project(h, weights, shape())
    kept, k, v = write(kept, blocks.rotate(k, *angles), v)
    keys_first = FLAGS.target == "cpu"
    out, attn_sum = attend(blocks.rotate(q, *angles), k, v, kept["pos"], keys_first)
    kept = {**kept, "attn_sum": kept["attn_sum"] + attn_sum}
    x = x + decoder._merge_heads(out, weights["out"])
    h = blocks.rms_norm(x, weights["mlp_norm"], eps)
    return x + decoder._mlp(weights, shape(), h), kept


# ------------------------------------------------------- attention and keys' layout


def attend(q, k, v, pos, keys_first=False, k_axes="cd"):
    """Attention over the slots, and each slot's weights (mean over G, sum over T).

    Row and head axes are merged, so are G and T: one batched product, no transposes.
    Their sum is a product too: written as a sum, XLA computes the exponentials twice.
    """
    batch, heads, group, length, depth = q.shape
    merge = lambda a: a.reshape(batch * heads, *a.shape[2:])
    k, v, flat = merge(k), merge(v), q.reshape(batch * heads, group * length, depth)
    wide = {"preferred_element_type": jnp.float32}
    if keys_first:  # the fence keeps XLA from swapping the operands back
        s = jax.lax.optimization_barrier(jnp.einsum("hcd,hnd->hcn", k, flat, **wide))
        s = jnp.swapaxes(s, 1, 2)
    else:
        s = jnp.einsum(f"hnd,h{k_axes}->hnc", flat, k, **wide)
    s = jnp.where(merge(pos)[:, None] >= 0, s * depth**-0.5, -1e30)
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))  # [B * K, G * T, C]
    scale = 1 / p.sum(axis=-1)
    out = jnp.einsum("hnc,hcd->hnd", p.astype(v.dtype), v, **wide) * scale[..., None]
    attn_sum = jnp.einsum("hnc,hn->hc", p, scale / group)
    return out.astype(q.dtype).reshape(q.shape), attn_sum.reshape(pos.shape)


def attend_textbook(q, k, v, pos, axes="bkcd"):
    s = jnp.einsum(f"bkgtd,{axes}->bkgtc", q, k, preferred_element_type=jnp.float32)
    s = jnp.where(pos[:, :, None, None] >= 0, s * q.shape[-1] ** -0.5, -1e30)
    w = jax.nn.softmax(s, axis=-1)
    out = jnp.einsum(f"bkgtc,{axes}->bkgtd", w.astype(v.dtype), v)
    return out.astype(q.dtype), w.mean(axis=2).sum(axis=2)


def keys():
    """Attention alone, over enough layers that the cache misses the CPU's."""
    plain, slots_major = (0, 1, 2, 3), (0, 2, 1, 3)
    by_slot = functools.partial(attend_textbook, axes="bckd")
    keys_first = functools.partial(attend, keys_first=True)
    transposed = functools.partial(attend, k_axes="dc")

    def way(call, k_axes, v_axes, length, count):
        def make():
            kept = [new_layer() for _ in range(count)]
            q = new(shape().queries_per_kv_head, length, shape().head_dim)
            ks = [layer["k"].transpose(k_axes) for layer in kept]
            vs = [layer["v"].transpose(v_axes) for layer in kept]
            return q, ks, vs, kept[0]["pos"]

        def run(q, ks, vs, pos):
            sums = []
            for k, v in zip(ks, vs, strict=True):
                q, attn_sum = call(q, k, v, pos)
                sums.append(attn_sum)
            return q, sums

        return Way(run, make, count)

    return {
        f"attention, T={length}": {
            "BKCD, textbook": way(attend_textbook, plain, plain, length, count),
            "BCKD, textbook": way(by_slot, slots_major, slots_major, length, count),
            "BKCD, queries first": way(attend, plain, plain, length, count),
            "BKCD, keys first": way(keys_first, plain, plain, length, count),
            "BKDC": way(transposed, (0, 1, 3, 2), plain, length, count),
        }
        for length, count in ((1, 12), (FLAGS.block, 4))
    }


# ------------------------------------------------------------- appending in decode


def put_scatter(a, slot, pairs):
    """pairs [B, K, (p,) ...] into a [B, K, C, ...] at slot [B, K, (p)]."""
    rows, heads, *_ = jnp.indices(slot.shape, sparse=True)
    sure = {"unique_indices": True, "mode": "promise_in_bounds"}
    return a.at[rows, heads, slot].set(pairs.astype(a.dtype), **sure)


def put_where(a, slot, pair):
    hit = jnp.arange(a.shape[2])[None, None] == slot[:, :, None]
    if jnp.ndim(pair) == 0:
        return jnp.where(hit, pair, a)
    return jnp.where(hit[..., None], pair[:, :, None].astype(a.dtype), a)


def put_slice(a, slot, pair):
    put = lambda a, slot, pair: jax.lax.dynamic_update_slice(a, pair[None], (slot, 0))
    return jax.vmap(jax.vmap(put))(a, slot, pair)


def never(kept, full):
    return kept


def write_pair(kept, k, v, now, put=put_scatter, make_room=never):
    """One pair into the first empty slot; gives the cache, and the K and V to read."""
    full = kept["length"] == FLAGS.slots  # [B]
    kept = make_room(kept, full)
    slot = jnp.argmin(kept["pos"], axis=-1)  # [B, K]
    stored = put(kept["k"], slot, k[:, :, 0]), put(kept["v"], slot, v[:, :, 0])
    (k, read_k), (v, read_v) = (s if type(s) is tuple else (s, s) for s in stored)
    length = kept["length"] + 1 - FLAGS.block * full
    pos = put_where(kept["pos"], slot, now)
    return {**kept, "k": k, "v": v, "pos": pos, "length": length}, read_k, read_v


def append():
    """A pair per row and head, alone and followed by attention."""
    puts = {
        "at[b, k, slot].set": put_scatter,
        "where over all slots": put_where,
        "vmapped dynamic_update_slice": put_slice,
    }
    return {
        title: {name: step_way(read, put=put) for name, put in puts.items()}
        for title, read in (("append", False), ("append and attend", True))
    }


def step_way(read=False, ragged=False, count=4, **writing):
    """p decode steps, in which every row of `count` layers fills up once."""

    def make():
        caches = tuple(new_layer(ragged) for _ in range(count))
        return caches, new(1, shape().head_dim)

    def call(state, pair):
        def step(state, now):
            written = [write_pair(kept, pair, pair, now, **writing) for kept in state]
            q = jnp.repeat(pair[:, :, None], shape().queries_per_kv_head, axis=2)
            out = [attend(q, k, v, kept["pos"]) for kept, k, v in written if read]
            return tuple(kept for kept, _, _ in written), out

        return jax.lax.scan(step, state, FLAGS.slots + jnp.arange(FLAGS.block))

    return Way(call, make, FLAGS.block * count)


# -------------------------------------------------------------------- making room


def lowest(score, pos):
    """Masks the p lowest scores of [..., C], of equal ones the oldest; no sort."""
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max

    def threshold(x, count):  # the least t with count of x <= t
        def halve(_, ends):
            low, high = ends
            middle = (low & high) + ((low ^ high) >> 1)
            enough = (x <= middle[..., None]).sum(axis=-1) >= count
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        ends = jnp.full(x.shape[:-1], least), jnp.full(x.shape[:-1], most)
        return jax.lax.fori_loop(0, 32, halve, ends)[0][..., None]

    bits = jax.lax.bitcast_convert_type(score, jnp.int32)
    bits = jnp.where(bits < 0, bits ^ most, bits)  # in the order of the floats
    edge = threshold(bits, FLAGS.block)
    sure, tie = bits < edge, bits == edge
    wanted = FLAGS.block - sure.sum(axis=-1)
    return sure | (tie & (pos <= threshold(jnp.where(tie, pos, most), wanted)))


def lowest_by(choose):
    def select(score, pos):
        slots = choose(score, pos)[..., : FLAGS.block]
        yes = jnp.ones(slots.shape, bool)
        return put_scatter(jnp.zeros(pos.shape, bool), slots, yes)

    return select


def by_top_k(score, pos):  # of equal ones the first slot
    return jax.lax.top_k(-score, FLAGS.block)[1]


def by_sort(score, pos):
    slot = jnp.broadcast_to(jnp.arange(pos.shape[-1]), pos.shape)
    return jax.lax.sort((score, pos, slot), num_keys=2)[2]


def first(mask, count):
    """The first true slots of [B, K, C]; in float32, whose top_k is a fast one."""
    return jax.lax.top_k(mask.astype(jnp.float32), count)[1]


def mark(score, pos, full):
    return jnp.where(full[:, None, None] & lowest(score, pos), -1, pos)


def gather(kept, full):
    """Moves the kept pairs of full rows to the front, in order."""
    keep = FLAGS.slots - FLAGS.block
    order = first(mark(kept["attn_sum"], kept["pos"], full) >= 0, keep)  # [B, K, C - p]
    order = jnp.where(full[:, None, None], order, jnp.arange(keep)[None, None])
    rows, heads = jnp.indices(order.shape[:2], sparse=True)
    rows, heads = rows[..., None], heads[..., None]
    take = lambda a: a.at[rows, heads, order].get(mode="promise_in_bounds")
    tail = jnp.where(full[:, None, None], -1, kept["pos"][:, :, keep:])
    moved = {name: kept[name].at[:, :, :keep].set(take(kept[name])) for name in "kv"}
    return {**kept, **moved, "pos": jnp.concatenate([take(kept["pos"]), tail], axis=2)}


def reuse(kept, full):
    """Empties the victims' slots by their positions; keys and values stay."""
    return {**kept, "pos": mark(kept["attn_sum"], kept["pos"], full)}


def gather_if_any(kept, full):
    return jax.lax.cond(full.any(), lambda: gather(kept, full), lambda: kept)


def reuse_if_any(kept, full, by_keys=False):
    score = lambda: keys_score(kept["k"]) if by_keys else kept["attn_sum"]
    change = lambda: mark(score(), kept["pos"], full)
    return {**kept, "pos": jax.lax.cond(full.any(), change, lambda: kept["pos"])}


def reuse_rows(kept, full, at_once=1, by_keys=False):
    """Handles `at_once` full rows at a time until none is left."""

    def body(carry):
        pos, full = carry
        chosen, rows = jax.lax.top_k(full.astype(jnp.float32), at_once)
        score = keys_score(kept["k"][rows]) if by_keys else kept["attn_sum"][rows]
        pos = pos.at[rows].set(mark(score, pos[rows], chosen > 0))
        return pos, full.at[rows].set(False)

    start = kept["pos"], full
    pos, _ = jax.lax.while_loop(lambda carry: carry[1].any(), body, start)
    return {**kept, "pos": pos}


def keys_score(k):
    """Minus the cosine of each key with its head's mean key: it reads every key."""
    k = k.astype(jnp.float32)
    unit = k * jax.lax.rsqrt((k * k).sum(axis=-1, keepdims=True))
    return -(unit * unit.mean(axis=2, keepdims=True)).sum(axis=-1)


def write_block(kept, k, v, now, make_room=reuse, contiguous=False):
    """p pairs per row and head; gives the cache, and the K and V to read."""
    full = kept["length"] + FLAGS.block > FLAGS.slots  # [B]
    kept = make_room(kept, full)
    start = kept["length"] - FLAGS.block * full
    now = jnp.broadcast_to(now + jnp.arange(FLAGS.block), k.shape[:3])
    if contiguous:
        put_row = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        put = lambda a, pairs: jax.vmap(put_row)(a, pairs, start)
    else:
        slots = first(kept["pos"] < 0, FLAGS.block)
        put = lambda a, pairs: put_scatter(a, slots, pairs)
    k, v, pos = put(kept["k"], k), put(kept["v"], v), put(kept["pos"], now)
    kept = {**kept, "k": k, "v": v, "pos": pos, "length": start + FLAGS.block}
    return kept, k, v


def block_way(count=4, blocks=4, **writing):
    def make():
        caches = tuple(new_layer() for _ in range(count))
        return caches, new(FLAGS.block, shape().head_dim)

    def call(state, pairs):
        write = lambda kept, now: write_block(kept, pairs, pairs, now, **writing)[0]
        step = lambda state, now: (tuple(write(kept, now) for kept in state), None)
        return jax.lax.scan(step, state, jnp.arange(blocks))

    return Way(call, make, blocks * count)


def room():
    select = {"top_k": lowest_by(by_top_k), "sort": lowest_by(by_sort)}
    select["bisection"] = lowest
    scores = lambda: ((), new_layer()["attn_sum"], new_layer()["pos"])
    victims = lambda choose: Way(lambda _, *given: ((), choose(*given)), scores)
    steps = {"never": never, "gather, if any is full": gather_if_any}
    for title, by_keys in (("reuse", False), ("reuse by keys", True)):
        rows = functools.partial(reuse_rows, by_keys=by_keys)
        any_row = functools.partial(reuse_if_any, by_keys=by_keys)
        steps[f"{title}, if any is full"] = any_row
        steps[f"{title}, 1 row at a time"] = rows
        steps[f"{title}, 4 rows at a time"] = functools.partial(rows, at_once=4)
    return {
        "choice of p victims": {name: victims(call) for name, call in select.items()},
        "room for a prefill block": {
            "gather": block_way(make_room=gather, contiguous=True),
            "reuse": block_way(),
        },
        **{
            f"room in decode, {'ragged' if ragged else 'aligned'}": {
                name: step_way(ragged=ragged, make_room=change)
                for name, change in steps.items()
            }
            for ragged in (False, True)
        },
    }


# -------------------------------------------------------------------- compile time


def compile_time():
    """The loop over layers, under compiler options and with every layer jitted."""
    tried = {
        "default": {},
        "optimization level 1": {"xla_backend_optimization_level": 1},
        "no expensive LLVM passes": {"xla_llvm_disable_expensive_passes": True},
        "codegen split 1": {"xla_cpu_parallel_codegen_split_count": 1},
    }
    jitted = functools.partial(loop_layers, wrap=jax.jit)
    tables = {}
    for length in (1, FLAGS.block):
        way = functools.partial(model_way, length=length)
        ways = {name: way(loop_layers, options=set_) for name, set_ in tried.items()}
        tables[f"compile, T={length}"] = {**ways, "every layer jitted": way(jitted)}
    return tables


if __name__ == "__main__":
    command_line.run(main)
