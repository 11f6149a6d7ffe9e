"""Which attention runs: always one that works, and a reason where one cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_spec
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernels import TOLERANCE, by_hand, draw, finite

from kvjax import policies
from kvjax.attention import backends
from kvjax.attention import ops as attention
from kvjax.cache.config import make_config
from kvjax.pallas import tpu
from kvjax.pallas.common import Scored
from kvjax.types import Scoring, UserError

MASS = frozenset({"attn_sum"})


def arrays(dtype=jnp.bfloat16, slots=256):
    array = jax.ShapeDtypeStruct
    return array((2, 8, 4, 1, 128), dtype), array((2, 8, slots, 128), dtype)


def on(platform, kind):
    """As when a program is traced for a device that is not there."""
    told = AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=told)
    return jax.sharding.use_abstract_mesh(mesh)


def test_a_cpu_gets_the_reference():
    assert backends.select_backend(*arrays(), MASS, None) == "reference"


def test_a_tpu_gets_its_kernels():
    with on("tpu", "TPU v6 lite"):
        assert backends.select_backend(*arrays(), MASS, None) == "pallas_tpu"


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_a_hopper_gpu_gets_its_kernels(kind):
    with on("gpu", kind):
        assert backends.select_backend(*arrays(), MASS, None) == "pallas_gpu"


@pytest.mark.parametrize(
    ("platform", "kind", "needs", "dtype"),
    [
        ("gpu", "Tesla T4", MASS, jnp.bfloat16),
        ("gpu", "NVIDIA H200", MASS, jnp.float32),
        ("tpu", "TPU v6 lite", frozenset({"attn_weights"}), jnp.bfloat16),
        ("tpu", "TPU v6 lite", MASS, jnp.float16),
    ],
)
def test_what_no_kernel_can_do_gets_the_reference(platform, kind, needs, dtype):
    with on(platform, kind):
        assert backends.select_backend(*arrays(dtype), needs, None) == "reference"


def test_the_gpu_kernels_know_no_windows():
    with on("gpu", "NVIDIA H200"):
        found = backends.select_backend(*arrays(), MASS, None, Scoring(local_window=9))
        assert found == "reference"
        with pytest.raises(UserError, match=r"neither caps scores .*local_window=9"):
            backends.select_backend(
                *arrays(), MASS, "pallas_gpu", Scoring(local_window=9)
            )
    with on("tpu", "TPU v6 lite"):
        chosen = backends.select_backend(*arrays(), MASS, None, Scoring(local_window=9))
        assert chosen == "pallas_tpu"


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        (
            "flash",
            MASS,
            "'flash' is unknown: use None or one of reference, tiles, pallas_tpu",
        ),
        ("pallas_tpu", MASS, "it needs a TPU, and this is a CPU"),
        ("cudnn", frozenset(), "it needs a GPU, and this is a CPU"),
        ("xla", MASS, r"no statistics, and \['attn_sum'\] are needed"),
        ("pallas_tpu_interpret", frozenset({"attn_weights"}), "no fused kernel"),
    ],
)
def test_a_named_one_that_cannot_run_says_why(name, needs, message):
    with pytest.raises(UserError, match=message):
        backends.select_backend(*arrays(), needs, name)


def test_too_many_slots_for_a_kernel():
    with pytest.raises(UserError, match=r"weights of 4194304 slots take \d+ MiB"):
        backends.select_backend(*arrays(slots=2**22), MASS, "pallas_tpu_interpret")


def test_a_compression_knows_the_names():
    with pytest.raises(UserError, match="'flash' is unknown"):
        make_config(tiny_spec(), policies.random(), 99, implementation="flash")


def by_reference(q, k, v, *rest, stats):
    """What a kernel returns, of the reference."""
    q, k, v, *rest = finite((q, k, v, *rest))
    partial, seen = attention.attend(q, k, v, *rest, stats, "reference")
    return Scored(*partial, attn_sum=seen.attn_sum)


def by_scatter(q, new_k, new_v, slot, k, v, pos, q_pos, n):
    """What a kernel with a fused write returns, of the reference."""
    hit = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None] == slot[..., None]
    k, v = (
        jnp.where(hit[..., None], new[:, :, None], old)
        for new, old in ((new_k, k), (new_v, v))
    )
    return by_reference(q, k, v, pos, q_pos, n, stats=frozenset()), k, v


@pytest.mark.parametrize("failure", ["raises", "is wrong", "writes elsewhere"])
def test_a_kernel_that_does_not_work_is_left_out(monkeypatch, failure):
    """A new compiler or device costs speed, never a run."""

    def attend(q, *rest, stats):
        if failure == "raises":
            raise RuntimeError("no such instruction")
        wrong = q + 1 if failure == "is wrong" else q
        return by_reference(wrong, *rest, stats=stats)

    def write_attend(q, new_k, new_v, slot, *rest):
        wrong = slot + 1 if failure == "writes elsewhere" else slot
        return by_scatter(q, new_k, new_v, wrong, *rest)

    monkeypatch.setattr(tpu, "attend", attend)
    monkeypatch.setattr(tpu, "write_attend", write_attend)
    monkeypatch.setitem(backends.PLATFORMS, "pallas_tpu", "cpu")
    backends.self_test.cache_clear()
    with pytest.warns(UserWarning, match="does not work on"):
        assert backends.select_backend(*arrays(), MASS, None) == "reference"
    backends.self_test.cache_clear()


def test_a_kernel_that_works_is_taken(monkeypatch):
    monkeypatch.setattr(tpu, "attend", by_reference)
    monkeypatch.setattr(tpu, "write_attend", by_scatter)
    monkeypatch.setitem(backends.PLATFORMS, "pallas_tpu", "cpu")
    backends.self_test.cache_clear()
    chosen = jax.jit(
        lambda: jnp.int32(len(backends.select_backend(*arrays(), MASS, None)))
    )
    assert chosen() == len("pallas_tpu")  # also while tracing
    backends.self_test.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 16])
def test_jax_s_own_attention(length, dtype):
    case = finite(draw(0, 2, 3, length, 48, 64, dtype))
    partial, seen = attention.attend(*case, implementation="xla")
    allowed = 3 * TOLERANCE[dtype]["out"]
    np.testing.assert_allclose(
        attention.normalize(partial), by_hand(*case)[0], atol=allowed
    )
    assert seen.attn_sum is None
