"""Split over eight devices: the same as on one, and the KV cache never travels."""

import collections
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model, tiny_spec
from jax.sharding import NamedSharding, PartitionSpec
from testing import checkpoints, layer
from testing.rules import POLICIES

import kvjax
from kvjax import Schedule, UserError, policies
from kvjax.cache import sharded
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled
from kvjax.engine.compiled import programs
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job, job_of
from kvjax.engine.memory import device_memory
from kvjax.engine.planner import plan_job
from kvjax.models import decoder, placement
from kvjax.parallel import axes, meshes

pytestmark = pytest.mark.e2e

ROOT = pathlib.Path(__file__).parents[2]
MESHES = {"1x8": "data:1,model:8", "2x4": "data:2,model:4", "8x1": "data:8,model:1"}
BUDGET, BLOCK, PROMPT, NEW = 56, 8, 72, 18
LENGTHS = (5, 56, 57, 70, 0, 72, 33, 64)  # below, at and above the budget
SPEC = layer.spec_of(heads=8, group=2, depth=8)
DATA = layer.random_data(SPEC, len(LENGTHS), PROMPT + NEW, seed=0)
# Policies that remember rows, heads and pairs; the first two look across heads.
KINDS = ("tova", "per_head", "snapkv", "scissorhands", "fastgen")
CASES = often(
    [
        *((name, "prefill_and_decode", ("2x4",)) for name in POLICIES),
        *((name, "prefill_and_decode", ("1x8", "8x1")) for name in POLICIES),
        *((name, "after_prefill", ("2x4",)) for name in KINDS[:3]),
        *((name, "decode_only", ("2x4",)) for name in KINDS[:3]),
        *((name, "prefill_only", ("2x4",)) for name in KINDS[:3]),
    ],
    [
        *((name, "prefill_and_decode", ("2x4",)) for name in POLICIES),
        *((name, "prefill_and_decode", ("1x8", "8x1")) for name in KINDS[:2]),
        *((name, "after_prefill", ("2x4",)) for name in KINDS[1:2]),
        *((name, "decode_only", ("2x4",)) for name in KINDS[:1]),
    ],
)


@pytest.fixture(autouse=True)
def _programs_go():
    """Those of eight devices map eight times the memory."""
    yield
    compiled.clear()


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join((*case[:2], *case[2]))
)
def test_every_policy_keeps_what_one_device_keeps(case):
    """The contract's policies while prompts are read and tokens are written."""
    name, phases, shapes = case
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(SPEC, POLICIES[name], BUDGET, schedule)
    kept, _ = layer.run(SPEC, config, DATA, LENGTHS, PROMPT)
    for shape in shapes:
        over = meshes.mesh(MESHES[shape], SPEC.num_kv_heads)
        also_kept, end = layer.run(SPEC, config, DATA, LENGTHS, PROMPT, over)
        jax.tree.map(np.testing.assert_array_equal, also_kept, kept)
        held = end.layers[0].k
        rows, heads = over.shape[axes.DATA], over.shape[axes.HEADS]
        part = held.sharding.shard_shape(held.shape)
        assert part == (8 // rows, 8 // heads, *held.shape[2:])


FAMILIES = {  # switches that decide how a model is split
    "llama": {"num_kv_heads": 4, "num_heads": 8, "ff_dim": 48, "vocab_size": 64},
    "untied": {
        "num_kv_heads": 8,
        "num_heads": 8,
        "ff_dim": 64,
        "tie_embeddings": False,
    },
    "experts": {
        "num_kv_heads": 4,
        "num_heads": 4,
        "experts": 3,
        "experts_per_token": 2,
    },
    "biases": {
        "num_kv_heads": 2,
        "num_heads": 2,
        "norm": "layer",
        "gated": False,
        "biases": ("qkv", "out", "mlp"),
        "positions": "learned",
        "vocab_size": 51,
    },
}


def split(model, asked):
    over = meshes.mesh(asked, model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    return model._replace(spec=placement.fitted(model.spec, over), params=params), over


@pytest.mark.parametrize("shape", often(MESHES, ["2x4"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_writes_the_same(family, shape):
    """Ragged prompts; eviction in both phases; weights, state and KV heads split."""
    model = tiny_model(**FAMILIES[family])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, n).tolist() for n in (3, 40, 17, 64, 9, 33, 50)]
    rule = policies.criticalkv(policies.h2o())  # asks for weights and projection
    how = {"policy": rule, "budget": 24, "max_new_tokens": 12}
    how |= {"schedule": Schedule("prefill_and_decode", 8, 8), "memory_gb": 0.1}
    alone = kvjax.generate(model, prompts, **how)
    parted, over = split(model, MESHES[shape])
    together = kvjax.generate(parted, prompts, **how)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        kept = one.kept_positions, other.kept_positions
        jax.tree.map(np.testing.assert_array_equal, *kept)
    assert placement.of(parted.params) == over


def collectives(compiled) -> collections.Counter:
    """Kind and dimensions of what the devices send each other."""
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    found = re.findall(rf"= (.*) ({kinds})(?:-start)?\(", compiled.as_text())
    return collections.Counter(
        (kind, dims)
        for arrays, kind in found  # one, or a tuple of several
        for dims in re.findall(r"\w+\[([\d,]*)\]", arrays)
    )


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", ["average_attention", "tova", "snapkv", None])
def test_the_cache_is_never_gathered(name, shape):
    """Nothing with a head's pairs in it is sent, nor a weight; tova's scores are."""
    spec = tiny_spec(
        num_kv_heads=8,
        num_heads=16,
        head_dim=12,
        ff_dim=112,
        vocab_size=160,
        model_dim=40,
    )
    over = meshes.mesh(MESHES[shape], spec.num_kv_heads)
    schedule = Schedule("prefill_and_decode", 4, 4) if name else None
    policy = name and policies.make(name, **({"window": 3} if name == "snapkv" else {}))
    config = make_spec(spec, policy, 20 if name else None, schedule)
    job = Job(placement.fitted(spec, over), config, 8, 256, 16, mesh=over)
    compiled = programs(job)
    for program in (compiled.prefill, compiled.decode):
        sent = collectives(program)
        capacity = job.decode_capacity[0]
        for (kind, dims), _ in sent.items():
            sizes = [int(size) for size in dims.split(",") if size]
            assert not {12, 12 * 8} & set(sizes), f"{kind} of {dims} holds a head"
            if kind != "all-reduce":
                assert name == "tova" or capacity not in sizes, f"{kind} of {dims}"
                assert 112 not in sizes and 224 not in sizes, f"{kind} of a weight"
        assert sent
    state = jax.tree.leaves(compiled.decode.input_shardings[0][1])
    assert any(not leaf.is_fully_replicated for leaf in state)


def test_a_gathered_cache_would_be_seen():
    over = meshes.mesh("data:2,model:4", SPEC.num_kv_heads)
    config = make_spec(SPEC, None, None)
    split = sharded.state_partitions(SPEC, config, (20,), over).layers[0].k
    held = jax.ShapeDtypeStruct((8, 8, 20, 12), jnp.float32, sharding=split)
    whole = jax.jit(lambda k: k, out_shardings=NamedSharding(over, PartitionSpec()))
    sent = collectives(whole.lower(held).compile())
    assert any("12" in dims.split(",") for _, dims in sent)


def test_a_plan_counts_what_one_device_holds():
    """An eighth of the state, the weights' own parts, and batches in whole groups."""
    model = tiny_model(num_kv_heads=4, num_heads=8, ff_dim=64, vocab_size=64)
    config = make_spec(
        model.spec, policies.h2o(), 32, Schedule(prefill_chunk=8, evict_size=8)
    )
    alone = job_of(model, config, 256, 8)
    parted, _ = split(model, "data:2,model:4")
    job = job_of(parted, config, 256, 8)
    assert (alone.batch, job.batch) == (1, 2)
    whole, part = state_bytes(alone)["decode"], state_bytes(job)["decode"]
    rows = 4 + 4 * 4  # next_pos, which every device of a model has, and error
    assert part == (whole - rows) // 4 + 4 + 4
    held = [
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(parted.params)
    ]
    assert weights_bytes(job) == sum(held) < weights_bytes(alone) / 2
    memory = weights_bytes(job) + 40 * part
    plan = plan_job(job, memory)
    assert plan.batch % 2 == 0 and plan.peak_bytes <= memory
    assert (
        plan_job(alone, memory - weights_bytes(job) + weights_bytes(alone)).batch
        < plan.batch
    )
    assert plan_job(job, device_memory(1.0), 7).batch == 8


def test_heads_that_do_not_divide_are_copied():
    spec = tiny_spec(num_kv_heads=2, num_heads=6, ff_dim=20, vocab_size=52)
    over = meshes.mesh("model:8", spec.num_kv_heads)
    assert dict(over.shape) == {"data": 1, "heads": 2, "copies": 4}
    said = placement.notice(over, spec)
    assert "2 KV heads are split 2 ways and each is on 4 devices" in said
    assert "feed-forward of 20" in said and "vocabulary of 52" in said
    assert placement.fitted(spec, over).ff_groups == 1
    even = tiny_spec(num_kv_heads=8, num_heads=8, ff_dim=64, vocab_size=64)
    assert placement.notice(meshes.mesh("model:8", even.num_kv_heads), even) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("data:2", "2 devices, and there are 8"),
        ("model:3,data:3", "9 devices"),
        ("rows:8", "data:2,model:4"),
        ("data:8,data:1", "data:2,model:4"),
        ("model:0", "data:2,model:4"),
        ("", "data:2,model:4"),
    ],
)
def test_a_mesh_that_cannot_be(asked, said):
    with pytest.raises(UserError, match=said):
        meshes.mesh(asked, SPEC.num_kv_heads)


def test_a_batch_that_does_not_divide():
    over = meshes.mesh("data:8", SPEC.num_kv_heads)
    config = make_spec(SPEC, None, None)
    with pytest.raises(UserError, match="batch of 12"):
        Job(SPEC, config, 12, 256, 4, mesh=over)


def test_params_are_read_where_they_belong(tmp_path, monkeypatch):
    """Those of a checkpoint, and those of the copy that it leaves."""
    checkpoints.cache(tmp_path, monkeypatch)
    checkpoints.write_folder(tmp_path / "model", checkpoints.tensors())
    alone = kvjax.load(tmp_path / "model")
    over = meshes.mesh("data:2,model:4", alone.spec.num_kv_heads)
    for _ in range(2):
        where = {"mesh": "data:2,model:4", "cache_converted": True}
        model = kvjax.load(tmp_path / "model", **where)
        assert model.spec == placement.fitted(alone.spec, over)
        wanted = decoder.param_partitions(model.spec, over)
        split = placement.split(alone.spec, alone.params, over)
        jax.tree.map(np.testing.assert_array_equal, model.params, split)
        for leaf, where in zip(
            *map(jax.tree.leaves, (model.params, wanted)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)


HOST = """
import sys
import kvjax
from kvjax.parallel import meshes
meshes.start(sys.argv[1], 2, int(sys.argv[2]))
model = kvjax.load(sys.argv[3], mesh="data:2,model:4")
done = kvjax.generate(
    model,
    [[3, 1, 4, 1, 5], list(range(40)), [2, 7]],
    policy=kvjax.policies.tova(),
    budget=16,
    schedule=kvjax.Schedule("prefill_and_decode", 8, 8),
    max_new_tokens=6,
    memory_gb=0.1,
)
kept = [[head.tolist() for head in c.kept_positions[0]] for c in done]
print([c.tokens for c in done], kept)
"""


def test_two_processes_write_what_one_does(tmp_path, monkeypatch):
    """Each has four of the eight devices; both print the whole answer."""
    checkpoints.cache(tmp_path, monkeypatch)
    folder = checkpoints.write_folder(tmp_path / "model", checkpoints.tensors())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    four |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, address, str(i), str(folder)],
            env=os.environ | four,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    told = [host.communicate(timeout=300)[0].splitlines()[-1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    model, _ = split(kvjax.load(folder), "data:8")
    done = kvjax.generate(
        model,
        [[3, 1, 4, 1, 5], list(range(40)), [2, 7]],
        policy=policies.tova(),
        budget=16,
        schedule=Schedule("prefill_and_decode", 8, 8),
        max_new_tokens=6,
        memory_gb=0.1,
    )
    kept = [[head.tolist() for head in each.kept_positions[0]] for each in done]
    assert told == [f"{[each.tokens for each in done]} {kept}"] * 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("localhost:1",), "num_processes None"),
        (("localhost:1", 2, 2), "process_id 2: give both, the id from 0"),
        (("here", 2, 0), "coordinator_address 'here': give HOST:PORT"),
    ],
)
def test_processes_that_cannot_be(asked, message):
    with pytest.raises(UserError, match=message):
        meshes.start(*asked)
