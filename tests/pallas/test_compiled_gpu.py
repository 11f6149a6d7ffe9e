"""The GPU kernels lowered for CUDA, and compiled for an H200 that need not be there.

Compiling needs the CUDA compiler (`pip install jax-cuda13-plugin jax-cuda13-pjrt
nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime`) and a description of the device:
KVJAX_CUDA_TARGET names a file with a GpuTargetConfig in text form, as XLA's sources
have them.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import often
from testing.kernels import shapes

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "device"))

import model_step

from kvjax.attention.reference import PLAIN
from kvjax.cache import codecs
from kvjax.cache.offload import Offload
from kvjax.cache.spec import make_spec
from kvjax.engine import steps
from kvjax.engine.compiled import arguments
from kvjax.engine.jobs import Job
from kvjax.pallas import gpu
from kvjax.pallas.common import STATS
from kvjax.parallel import host
from kvjax.types import Scoring

ALL = frozenset(STATS)
CHIP = gpu.CHIPS["H200"]
PLUGIN = "jax_plugins.xla_cuda13"

# Every kernel, with and without statistics, whole and split, with and without a tail.
#   B  K  G  T    C     D
HARDWARE = [
    (64, 8, 4, 1, 2048, 128),
    (16, 8, 8, 1, 560, 64),
    (16, 8, 3, 1, 1024, 256),
    (1, 8, 4, 1, 4096, 128),
    (64, 8, 4, 1, 100_000, 256),
    (4, 8, 4, 64, 2048, 128),
    (4, 8, 3, 100, 1032, 64),
    (2, 8, 8, 256, 1024, 256),
    (16, 32, 1, 1, 2048, 96),
    (1, 8, 4, 1, 4096, 80),
    (4, 32, 1, 64, 1032, 96),
    (4, 8, 4, 100, 1032, 80),
]
LOWERED = [HARDWARE[0], HARDWARE[6]]  # every time: a decode step, a block of a prompt
SCORINGS = [PLAIN, Scoring(logits_soft_cap=50.0, local_window=1024)]


@pytest.fixture
def h200_mesh():
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def jitted(stats, scoring=PLAIN):
    options = {"stats": stats, **scoring._asdict()}
    return jax.jit(lambda *args: gpu.attend(*args, **options))


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "capped"])
@pytest.mark.parametrize("stats", [frozenset(), ALL], ids=["plain", "stats"])
@pytest.mark.parametrize("shape", often(HARDWARE, LOWERED, others="kernels"), ids=str)
def test_lowers_for_cuda(shape, stats, scoring, h200_mesh):
    traced = jitted(stats, scoring).trace(*shapes(*shape))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = 2 if shape[3] > 1 and stats else 1
    assert text.count("@mosaic_gpu_v2") == kernels


@pytest.fixture(scope="module")
def h200():
    """A device that is not there, and where its compiler is."""
    if importlib.util.find_spec("jax_plugins") is None or (
        importlib.util.find_spec(PLUGIN) is None
    ):
        pytest.skip("jax-cuda13-plugin is not installed")
    if (target := os.environ.get("KVJAX_CUDA_TARGET")) is None:
        pytest.skip("KVJAX_CUDA_TARGET does not name a GpuTargetConfig")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=pathlib.Path(target).read_text(),
        topology="1x1x1",
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(traced):
    """What the compiled program takes, with the compiler of the CUDA packages."""
    site = pathlib.Path(importlib.util.find_spec(PLUGIN).origin).parents[2]
    options = {
        "xla_gpu_cuda_data_dir": str(site / "nvidia" / "cu13"),
        "xla_gpu_autotune_level": 0,
    }
    return traced.lower().compile(options).memory_analysis()


@pytest.mark.compiled
@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "capped"])
@pytest.mark.parametrize("stats", [frozenset(), ALL], ids=["plain", "stats"])
@pytest.mark.parametrize("shape", HARDWARE, ids=str)
def test_compiles_for_h200(shape, stats, scoring, h200, h200_mesh):
    """No copy of the cache.

    Split decoding writes outputs and weights to be merged, and a block that is not a
    multiple of 64 queries is padded.
    """
    memory = compiled(jitted(stats, scoring).trace(*shapes(*shape, sharding=h200)))
    b, k, g, t, c, d = shape
    heads = b * k
    allowed = 0.01 * heads * 2 * c * d * 2  # of the cache's bytes
    segments = gpu.cut(heads, c, d, CHIP).segments
    if t == 1 and segments > 1:
        allowed += 2.2 * heads * segments * g * d * 4
        allowed += 1.1 * heads * c * 8 * 4 if stats else 0
    if t % 64 and t > 1:
        allowed += 2 * heads * g * 64 * -(-t // 64) * d * 4
    assert memory.temp_size_in_bytes < allowed


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("length", [1, 64])
@pytest.mark.parametrize("depth", [64, 128])
def test_attention_over_codes_compiles_for_h200(name, length, depth, h200, h200_mesh):
    """Nothing of a layer is decoded, or copied, outside of the kernel."""
    q, k, v, *rest = shapes(64, 8, 4, length, 1032, depth, sharding=h200)
    codec = codecs.make(name)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200)
    pairs = [
        jax.tree.map(place, jax.eval_shape(tensor.encode, x))
        for tensor, x in ((codec.key, k), (codec.value, v))
    ]
    memory = compiled(jitted(ALL).trace(q, *pairs, *rest))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pairs))
    assert memory.temp_size_in_bytes < 0.01 * size + 2 * q.size * (length > 1)


@pytest.mark.compiled
def test_statistics_alone_compile_for_h200(h200, h200_mesh):
    q, k, _, pos, q_pos, n = shapes(4, 8, 4, 64, 2048, 128, sharding=h200)
    sums = jax.ShapeDtypeStruct(q.shape[:4], jnp.float32, sharding=h200)
    run = jax.jit(functools.partial(gpu.attention_stats, stats=ALL))
    memory = compiled(run.trace(q, k, pos, q_pos, n, sums, sums))
    assert memory.temp_size_in_bytes < 0.02 * k.size * 2


@pytest.mark.compiled
def test_a_decode_step_compiles_for_h200(h200, h200_mesh):
    """Eight layers of Llama-3-8B: the cache stays where it is, without a second one."""
    spec = dataclasses.replace(model_step.SPECS["llama-3.1-8b"], num_layers=8)
    config = model_step.batch_max(spec, 2048)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200)
    arguments = jax.tree.map(place, model_step.shapes(spec, config, 64))
    step = functools.partial(model_step.step, spec=spec, config=config)
    memory = compiled(jax.jit(step, donate_argnums=1).trace(*arguments))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert memory.alias_size_in_bytes >= size(arguments[1])
    pairs = size([(layer.k, layer.v) for layer in arguments[1].layers])
    assert memory.temp_size_in_bytes < 0.01 * pairs


@pytest.mark.compiled
@pytest.mark.parametrize("codec", ["identity", "int8"])
def test_decoding_with_values_on_the_host_compiles_for_h200(codec, h200, h200_mesh):
    """A layer's go to the device and back, another stays.

    CUDA's compiler knows no host memory of a GPU that is not there, so that arguments
    cannot lie in it: the program puts the values there before its loop.
    """
    spec = dataclasses.replace(model_step.SPECS["llama-3.1-8b"], num_layers=2)
    config = make_spec(spec, None, None, codec=codec, offload=Offload(64, 1))
    given = arguments(Job(spec, config, 4, 4096, 128, "bfloat16"))
    away = [bool(host.nbytes(x)) for x in jax.tree.leaves(given.decode_state)]

    def run(params, state):
        leaves, tree = jax.tree.flatten(state)
        leaves = [
            jax.device_put(x[::-1], jax.memory.Space.Host) if there else x
            for x, there in zip(leaves, away, strict=True)
        ]
        state = jax.tree.unflatten(tree, leaves)
        return steps.decode(params, state, spec=spec, config=config, steps=8)

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200)
    shapes = jax.tree.map(place, (given.params, given.decode_state))
    memory = compiled(jax.jit(run).trace(*shapes))
    size = host.nbytes(given.decode_state)
    assert memory.host_output_size_in_bytes == size
    layer = 4 * 8 * (4096 + 128) * 128 * 2
    assert memory.temp_size_in_bytes < 1.7 * layer  # with its codes
