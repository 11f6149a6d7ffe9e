"""The TPU kernels and whole decode steps, compiled for TPUs that are not there.

Needs libtpu, which describes them: `make compiled` installs it beside the environment
and runs these tests.
"""

import dataclasses
import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "device"))

import model_step
import targets

from kvjax import Offload, Schedule
from kvjax.cache import codecs
from kvjax.cache.spec import make_spec
from kvjax.engine import steps
from kvjax.engine.compiled import arguments
from kvjax.engine.jobs import Job
from kvjax.pallas import tpu, tpu_call
from kvjax.parallel import host

pytestmark = pytest.mark.compiled

pytest.importorskip("libtpu", reason="libtpu is not installed: run `make compiled`")

TARGETS = [f"tpu:{name}" for name in targets.CHIPS]
ALL = frozenset({"attn_sum", "attn_sq_sum", "last_attn"})


def arrays(rows, length, slots, depth, heads=8, group=4, dtype=jnp.bfloat16):
    array = jax.ShapeDtypeStruct
    pairs = (rows, heads, slots, depth)
    return {
        "q": array((rows, heads, group, length, depth), dtype),
        "k": array(pairs, dtype),
        "v": array(pairs, dtype),
        "pos": array(pairs[:3], jnp.int32),
        "q_pos": array((rows, length), jnp.int32),
        "n": array((rows,), jnp.int32),
    }


def pair_bytes(given):
    return sum(x.size * x.dtype.itemsize for x in (given["k"], given["v"]))


def copies(compiled, *shape):
    """Instructions whose result is as large as a layer's keys and is not the kernel's.

    Keys may lie with their last two axes exchanged.
    """
    rows, heads, slots, depth = shape
    sizes = f"[{rows},{heads},{slots},{depth}]", f"[{rows},{heads},{depth},{slots}]"
    harmless = {"parameter", "bitcast", "get-tuple-element", "custom-call", "tuple"}
    found = []
    for line in compiled.as_text().splitlines():
        made = re.search(r" = (.+?) ([a-z][a-z0-9-]*)\(", line)
        if made and any(size in made[1] for size in sizes) and made[2] not in harmless:
            found.append(made[2])
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stats", [frozenset(), ALL], ids=["plain", "scored"])
@pytest.mark.parametrize("depth", [64, 96, 128])
@pytest.mark.parametrize("length", [1, 64])
def test_attention(target, stats, depth, length):
    given = arrays(8, length, 1024, depth)
    run = functools.partial(tpu.attend, stats=stats)
    compiled = targets.compile_for(target, run, *given.values())
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pair_bytes(given) / 100
    assert not copies(compiled, *given["k"].shape)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "shape", [(2, 1, 2000, 80), (2, 40, 300, 256), (1, 1, 32768, 128)]
)
def test_attention_at_odd_shapes(target, shape):
    """Slots that are no multiple of anything, several tiles, other head dims."""
    run = functools.partial(tpu.attend, stats=ALL)
    targets.compile_for(target, run, *arrays(*shape, group=3).values())
    shapes = arrays(*shape, dtype=jnp.float32)
    targets.compile_for(target, run, *shapes.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("length", "depth"), [(1, 96), (64, 256)])
def test_capped_scores_and_windows(target, length, depth):
    given = arrays(8, length, 1024, depth)
    scoring = {"logits_soft_cap": 50.0, "local_window": 512}
    run = functools.partial(tpu.attend, stats=ALL, **scoring)
    compiled = targets.compile_for(target, run, *given.values())
    assert not copies(compiled, *given["k"].shape)


@pytest.mark.parametrize("target", TARGETS)
def test_weights_under_a_given_softmax(target):
    given = arrays(8, 32, 1024, 128)
    sums = jax.ShapeDtypeStruct(given["q"].shape[:4], jnp.float32)
    del given["v"]
    run = functools.partial(tpu.attention_stats, stats=ALL)
    memory = targets.compile_for(
        target, run, *given.values(), sums, sums
    ).memory_analysis()
    assert memory.temp_size_in_bytes < given["k"].size * 2 / 100


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pick", [None, tpu.Pick(mean=True, recent=8)])
@pytest.mark.parametrize("depth", [64, 96, 128])
def test_fused_write(target, pick, depth):
    """The caches are updated where they lie."""
    given = arrays(8, 1, 1024, depth)
    fresh = jax.ShapeDtypeStruct((8, 8, depth), jnp.bfloat16)
    slot = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    total = jax.ShapeDtypeStruct((8, 8, 1024), jnp.float32)
    compiled = targets.compile_for(
        target,
        lambda total, k, v, q, *rest: tpu.write_attend(
            *(q, *rest[:3], k, v, *rest[3:]), stats=ALL, total=total, pick=pick
        ),
        *(total, given["k"], given["v"], given["q"], fresh, fresh, slot),
        *(given["pos"], given["q_pos"], given["n"]),
        donate=(0, 1, 2) if pick else (1, 2),
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pair_bytes(given)
    assert memory.temp_size_in_bytes < pair_bytes(given) / 100
    assert not copies(compiled, *given["k"].shape)


def coded(given, codec):
    """The arrays with keys and values as the codec stores them."""
    pairs = (given["k"], codec.key), (given["v"], codec.value)
    k, v = (jax.eval_shape(tensor.encode, x) for x, tensor in pairs)
    return given | {"k": k, "v": v}


def stored_bytes(given):
    leaves = jax.tree.leaves((given["k"], given["v"]))
    return sum(x.size * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize(("length", "depth"), [(1, 64), (1, 128), (64, 128)])
def test_attention_over_codes(target, name, length, depth):
    """No codes are copied or decoded outside of the kernel."""
    given = coded(arrays(8, length, 1024, depth), codecs.make(name))
    run = functools.partial(tpu.attend, stats=ALL)
    compiled = targets.compile_for(target, run, *given.values())
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < stored_bytes(given) / 20  # queries, scales
    for pairs in given["k"], given["v"]:
        assert not copies(compiled, *pairs.codes.shape)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # scales are only read
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("depth", [64, 128])
def test_fused_write_of_codes(target, depth):
    given = coded(arrays(8, 1, 1024, depth), codecs.k8v4())
    k, v = given["k"], given["v"]
    fresh = [
        jax.ShapeDtypeStruct((8, 8, x.codes.shape[3]), x.codes.dtype) for x in (k, v)
    ]
    slot = jax.ShapeDtypeStruct((8, 8), jnp.int32)

    def run(k, v, q, new_k, new_v, slot, *rest):
        found = tpu.write_attend(q, new_k, new_v, slot, k, v, *rest, stats=ALL)
        return found.scored, found.k, found.v

    rest = given["pos"], given["q_pos"], given["n"]
    compiled = targets.compile_for(
        target, run, k, v, given["q"], *fresh, slot, *rest, donate=(0, 1)
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= k.codes.size + v.codes.size
    for pairs in (k, v):
        assert not copies(compiled, *pairs.codes.shape)


STEPS = [
    ("tpu:v5e", "smollm2-135m", 30, 192),
    ("tpu:v6e", "smollm2-135m", 30, 192),
    ("tpu:tpu7x", "smollm2-135m", 30, 192),
    ("tpu:v5e", "llama-3.1-8b", 8, 64),  # 8 layers: all 32 do not fit a v5e
    ("tpu:v6e", "llama-3.1-8b", 32, 32),
    ("tpu:tpu7x", "llama-3.1-8b", 32, 64),
]
# Of keys and values. SmolLM2's 3 KV heads and 576 features are laid out another way at
# the program's door than kernels and embedding lookup want them: positions, statistics
# and the embedding are copied.
MOST_TEMPORARY = {"smollm2-135m": 0.04, "llama-3.1-8b": 0.01}


@pytest.mark.parametrize(("target", "name", "layers", "rows"), STEPS)
def test_decode_step(target, name, layers, rows, slots=2048):
    """A whole model: no second cache, nor a copy of any layer's."""
    spec = model_step.SPECS[name]
    spec = dataclasses.replace(spec, num_layers=layers)
    config = model_step.batch_max(spec, slots)
    shapes = model_step.shapes(spec, config, rows)
    run = functools.partial(model_step.step, spec=spec, config=config)
    compiled = targets.compile_for(target, run, *shapes, donate=1)
    memory = compiled.memory_analysis()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    pairs = size([(layer.k, layer.v) for layer in shapes[1].layers])
    assert memory.alias_size_in_bytes >= size(shapes[1])
    assert memory.temp_size_in_bytes < pairs * MOST_TEMPORARY[name]
    assert not copies(compiled, rows, spec.num_kv_heads, slots, spec.head_dim)
    assert compiled.as_text().count(tpu_call.NAME) >= layers


def offloaded(rows, **options):
    """A job of two layers of an 8B, the values of the second on the host."""
    spec = dataclasses.replace(model_step.SPECS["llama-3.1-8b"], num_layers=2)
    config = make_spec(spec, None, None, offload=Offload(64, 1), **options)
    return Job(spec, config, rows, 4096, 128, "bfloat16")


def decoding(target, job):
    """What a job's decoding loop takes."""
    given = arguments(job)

    def run(params, state):
        return steps.decode(params, state, spec=job.spec, config=job.config, steps=8)

    shapes = given.params, given.decode_state
    made = targets.compile_for(target, run, *shapes, donate=(1,))
    return host.nbytes(given.decode_state), made.memory_analysis()


def retiled(target, params):
    """Bytes of weights that are copied where a loop asks the host to compute.

    TPU7x's compiler gives such a loop's products other memory tiles than arguments
    have, and copies all weights but the embedding first.
    """
    weights = jax.tree.leaves((params["head"], params["layers"]))
    copied = (each.size * each.dtype.itemsize for each in weights if each.ndim > 1)
    return sum(copied) if target == "tpu:tpu7x" else 0


@pytest.mark.parametrize("target", TARGETS)
def test_values_stay_on_the_host(target):
    """Decoding with values fetched by need: they are updated where they lie.

    What the host computes it hands back over the link unless the program keeps it
    there: a copy of a layer's values on the device would tell.
    """
    job = offloaded(16)
    away, memory = decoding(target, job)
    assert away == 16 * 8 * (4096 + 128) * 128 * 2
    assert memory.host_argument_size_in_bytes == away
    assert memory.host_alias_size_in_bytes == away
    assert memory.host_temp_size_in_bytes < away / 8  # what is fetched
    copied = retiled(target, arguments(job).params)
    assert copied <= memory.temp_size_in_bytes < copied + away / 4


@pytest.mark.parametrize("target", TARGETS)
def test_codes_on_the_host_go_to_and_fro(target):
    """TPU's compiler dies of a host that writes 8 bits."""
    away, memory = decoding(target, offloaded(4, codec="int8"))
    assert away == 4 * 8 * (4096 + 128) * (128 + 2)
    assert memory.host_alias_size_in_bytes >= away


@pytest.mark.parametrize("target", TARGETS)
def test_values_go_to_the_host_while_prompts_are_read(target):
    """Of a block's values, one layer's at a time is on the device."""
    job = offloaded(4, schedule=Schedule("none", prefill_chunk=512))
    given = arguments(job)
    away = host.nbytes(given.prefill_state)

    def run(params, state, tokens, lengths):
        how = {"spec": job.spec, "config": job.config}
        return steps.prefill(params, state, tokens, lengths, **how)

    shapes = given.params, given.prefill_state, given.tokens, given.rows
    made = targets.compile_for(target, run, *shapes, donate=(1,))
    memory = made.memory_analysis()
    assert memory.host_alias_size_in_bytes == away
    assert memory.host_temp_size_in_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
def test_values_go_to_the_host_when_prompts_are_in(target):
    """A group's are moved, and put into the pool's rows where these lie."""
    job = offloaded(16, codec=codecs.after_prompt("identity"))
    group = arguments(dataclasses.replace(job, batch=4))
    pool = arguments(job).decode_state

    def moved(state):
        how = {"spec": job.spec, "config": job.config}
        return steps.compact(state, capacity=job.decode_capacity, **how)

    made = targets.compile_for(target, moved, group.prefill_state)
    part = group.decode_state
    assert made.memory_analysis().host_output_size_in_bytes == host.nbytes(part)
    made = targets.compile_for(
        target,
        steps.insert,
        pool,
        part.cache,
        group.logits,
        part.requests,
        part.keys,
        group.rows,
        donate=(0,),
    )
    memory = made.memory_analysis()
    assert memory.host_alias_size_in_bytes == host.nbytes(pool)
    assert memory.host_temp_size_in_bytes == 0
