"""Which attention runs: always one that works, and a reason where one cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_spec
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from testing.kernels import TOLERANCE, arguments, by_hand, draw, finite, generated

from kvjax import attention, policies
from kvjax.attention import AttentionSpec, Backend, backends, kernels, reference
from kvjax.attention.reference import NO_STATS, PLAIN
from kvjax.attention.stored import Stored, decoded
from kvjax.cache import codecs
from kvjax.cache.spec import make_spec
from kvjax.pallas import tpu
from kvjax.registry import Registry
from kvjax.types import Scoring, UserError

SUMS = frozenset({"attn_sum"})


def arrays(dtype=jnp.bfloat16, slots=256, head_dim=128):
    array = jax.ShapeDtypeStruct
    shapes = (2, 8, 4, 1, head_dim), (2, 8, slots, head_dim)
    return tuple(array(shape, dtype) for shape in shapes)


def on(platform, kind):
    """As when a program is traced for a device that is not there."""
    told = AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=told)
    return jax.sharding.use_abstract_mesh(mesh)


def select(q, k, stats, name=None, scoring=PLAIN):
    queries, pairs = attention.Queries(q, None, None), attention.Pairs(k, k, None)
    return backends.select_backend(queries, pairs, AttentionSpec(stats, name, scoring))


def chosen(q, k, stats, scoring=PLAIN):
    """The name of the backend that these get where nobody names one."""
    return select(q, k, stats, scoring=scoring).name


def test_a_cpu_gets_the_reference():
    assert chosen(*arrays(), SUMS) == "reference"


def test_a_tpu_gets_its_kernels():
    with on("tpu", "TPU v6 lite"):
        assert chosen(*arrays(), SUMS) == "pallas_tpu"


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_a_hopper_gpu_gets_its_kernels(kind, head_dim):
    with on("gpu", kind):
        assert chosen(*arrays(head_dim=head_dim), SUMS) == "pallas_gpu"


@pytest.mark.parametrize(
    ("platform", "kind", "stats", "dtype"),
    [
        ("gpu", "NVIDIA H200", SUMS, jnp.float32),
        ("tpu", "TPU v6 lite", frozenset({"attn_weights"}), jnp.bfloat16),
        ("tpu", "TPU v6 lite", SUMS, jnp.float16),
    ],
)
def test_what_no_kernel_can_do_gets_the_reference(platform, kind, stats, dtype):
    with on(platform, kind):
        assert chosen(*arrays(dtype), stats) == "reference"


@pytest.mark.parametrize("kind", ["Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA B200"])
def test_a_gpu_that_is_no_hopper_runs_xla_and_says_so_once(kind):
    backends._warn_once.cache_clear()
    message = (
        rf"'pallas_gpu' cannot run: .*Hopper .*9\.0\), and this is {kind}; plain XLA"
    )
    with on("gpu", kind):
        with pytest.warns(UserWarning, match=message) as told:
            assert chosen(*arrays(), SUMS) == "reference"
            assert chosen(*arrays(slots=512), NO_STATS) == "reference"
        assert len(told) == 1
        with pytest.raises(UserError, match=f"'pallas_gpu' cannot run: .*{kind}"):
            select(*arrays(), SUMS, "pallas_gpu")


@pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA GH200 480GB"])
def test_a_hopper_gpu_is_told_nothing(kind, recwarn):
    backends._warn_once.cache_clear()
    with on("gpu", kind):
        assert chosen(*arrays(jnp.float32), SUMS) == "reference"
    assert not recwarn.list


@pytest.mark.parametrize("scoring", [Scoring(local_window=9), Scoring(50.0)], ids=str)
def test_windows_and_caps_are_for_kernels_too(scoring):
    with on("gpu", "NVIDIA H200"):
        assert chosen(*arrays(), SUMS, scoring) == "pallas_gpu"
        with pytest.raises(UserError, match="neither caps logits nor limits"):
            select(*arrays(), NO_STATS, "cudnn", scoring)
    with on("tpu", "TPU v6 lite"):
        assert chosen(*arrays(), SUMS, scoring) == "pallas_tpu"


@pytest.mark.parametrize(
    ("name", "stats", "message"),
    [
        ("flash", SUMS, "'flash' is unknown: use one of cudnn, pallas_gpu, .*, xla"),
        ("pallas_cpu", SUMS, "did you mean 'pallas_[gt]pu'"),
        ("pallas_tpu", SUMS, "it needs a TPU, and this is a CPU"),
        ("cudnn", NO_STATS, "it needs a GPU, and this is a CPU"),
        ("xla", SUMS, r"no statistics, and \['attn_sum'\] are needed"),
        ("pallas_tpu_interpret", frozenset({"attn_weights"}), "no fused kernel"),
    ],
)
def test_a_named_one_that_cannot_run_says_why(name, stats, message):
    with pytest.raises(UserError, match=message):
        select(*arrays(), stats, name)


def test_too_many_slots_for_a_kernel():
    with pytest.raises(UserError, match=r"weights of 4194304 slots take \d+ MiB"):
        select(*arrays(slots=2**22), SUMS, "pallas_tpu_interpret")


def test_a_config_knows_the_names():
    with pytest.raises(UserError, match="'flash' is unknown"):
        make_spec(tiny_spec(), policies.random(), 99, implementation="flash")


@pytest.fixture
def table(monkeypatch):
    """A table that a test may add to."""
    fresh = Registry("attention implementation")
    for name in backends.BACKENDS.names():
        fresh.register(name, backends.BACKENDS.factory(name))
    monkeypatch.setattr(backends, "BACKENDS", fresh)


@pytest.fixture
def counted(table):
    """A registered backend that is the reference, and the lengths it was asked for."""
    asked = []

    def attend(queries, pairs, spec):
        asked.append(queries.q.shape[3])
        return reference.attend(queries, pairs, spec)

    attention.register(Backend("counted", attend))
    return asked


def test_a_backend_of_ones_own(counted):
    """Found by its name alone; what it leaves out is the reference's."""
    queries, pairs = arguments(finite(draw(0, 2, 3, 4, 48, 64)))
    spec = AttentionSpec(SUMS, "counted")
    found, seen = attention.attend(queries, pairs, spec)
    assert counted == [4]
    by_reference = spec.replace(implementation="reference")
    wanted, also_seen = attention.attend(queries, pairs, by_reference)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    np.testing.assert_array_equal(seen.attn_sum, also_seen.attn_sum)
    again = attention.attention_stats(queries, pairs, found, spec)
    np.testing.assert_allclose(again.attn_sum, seen.attn_sum, atol=1e-6)
    assert chosen(queries.q, pairs.k, SUMS) == "tiles"
    step = queries._replace(q=queries.q[:, :, :, :1])
    assert not attention.fuses_write(step, pairs, spec)
    assert counted == [4]


def test_generates_with_a_backend_of_ones_own(counted, tiny):
    """A config takes its name like ours."""
    policy = policies.average_attention()
    given = tiny, policy, "prefill_and_decode"
    found, kept, _ = generated(*given, "counted")
    wanted, also_kept, _ = generated(*given, "reference")
    assert set(counted) == {1, 8}  # a block of the prompt, and a step
    np.testing.assert_array_equal(found, wanted)
    jax.tree.map(np.testing.assert_array_equal, kept, also_kept)


def mine():
    """What `test_backends:mine` in a config stands for."""
    return Backend("mine", reference.attend, platform="tpu")


def test_a_backend_by_module_and_function():
    with pytest.raises(
        UserError, match="'test_backends:mine' cannot run: it needs a T"
    ):
        select(*arrays(), SUMS, "test_backends:mine")


def test_a_name_is_taken_once(table):
    with pytest.raises(UserError, match="'xla' cannot be registered"):
        attention.register(Backend("xla", reference.attend))


def over_nan(queries, pairs, spec):
    """The reference, whatever the empty slots hold."""
    k, v = map(jnp.nan_to_num, pairs[:2])
    return reference.attend(queries, pairs._replace(k=k, v=v), spec)


def by_scatter(queries, pairs, new_k, new_v, slot, spec):
    """A fused write, of the reference."""
    slots = jnp.arange(pairs.k.shape[2], dtype=jnp.int32)
    hit = slots[None, None] == slot[..., None]
    k, v = (
        jnp.where(hit[..., None], new[:, :, None], old)
        for new, old in ((new_k, pairs.k), (new_v, pairs.v))
    )
    return *over_nan(queries, pairs._replace(k=k, v=v), spec), k, v


def register_kernel(attend=over_nan, write_attend=by_scatter):
    """One that None prefers to all others, once it has passed its test."""
    return attention.register(
        Backend(
            "fused",
            attend,
            write_attend=write_attend,
            priority=lambda *_: 9,
            self_test=functools.partial(kernels.self_test, attend, write_attend),
        )
    )


def raises(*given, **options):
    raise RuntimeError("no such instruction")


def wrong(queries, pairs, spec):
    return over_nan(queries._replace(q=queries.q + 1), pairs, spec)


def nowhere(*given):
    partial, seen = wrong(*given)
    return partial._replace(out=partial.out * jnp.nan), seen


def elsewhere(queries, pairs, new_k, new_v, slot, spec):
    return by_scatter(queries, pairs, new_k, new_v, slot + 1, spec)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"attend": raises}, "RuntimeError: no such instruction"),
        ({"attend": wrong}, r"it is \d.* off"),
        ({"attend": nowhere}, "it is inf off"),
        ({"write_attend": elsewhere}, r"it is \d.* off"),
    ],
)
def test_a_kernel_that_does_not_work_is_left_out(table, functions, message):
    """A new compiler or device costs speed, never a run."""
    register_kernel(**functions)
    with on("cpu", "not here"):  # where nothing can be tried, nothing is ruled out
        assert chosen(*arrays(), SUMS) == "fused"
    with pytest.warns(UserWarning, match=f"'fused' does not work on .*{message}"):
        assert chosen(*arrays(), SUMS) == "reference"
    assert chosen(*arrays(), SUMS) == "reference"  # and is told so once


def test_a_kernel_is_tried_with_the_head_dim_that_it_is_for(table):
    """What is right with one may be wrong with another, whose tiles are others."""
    narrow_is_wrong = lambda queries, *rest: (
        over_nan if queries.q.shape[4] > 96 else wrong
    )(queries, *rest)
    register_kernel(narrow_is_wrong)
    assert chosen(*arrays(), SUMS) == "fused"
    with pytest.warns(UserWarning, match=r"'fused' does not work on .* head dim 96"):
        assert chosen(*arrays(head_dim=96), SUMS) == "reference"


def test_a_kernel_is_tried_with_the_codes_that_it_is_for(table):

    def codes_are_wrong(queries, pairs, spec):
        if not isinstance(pairs.k, Stored):
            return over_nan(queries, pairs, spec)
        numbers = pairs._replace(k=decoded(pairs.k), v=decoded(pairs.v))
        return wrong(queries, numbers, spec)

    backend = register_kernel(codes_are_wrong, None)
    q, k = arrays()
    tensor = codecs.int8().key
    coded = Stored(jax.eval_shape(tensor.encode, k), tensor, k.shape, k.dtype)
    with pytest.warns(UserWarning, match="keys in int8, one scale"):
        assert chosen(q, coded, SUMS) == "tiles"
    assert chosen(q, k, SUMS) == backend.name


def test_a_kernel_that_works_is_taken(table):
    register_kernel()
    found = jax.jit(lambda: jnp.int32(len(chosen(*arrays(), SUMS))))
    assert found() == len("fused")  # also while tracing
    q, k = arrays()
    queries, pairs = attention.Queries(q, None, None), attention.Pairs(k, k, None)
    assert attention.fuses_write(queries, pairs, AttentionSpec(SUMS))


def test_a_real_kernel_is_tried_while_a_program_is_traced(table):
    """Its body asks for its place on the grid, of no array at all."""
    functions = kernels.Kernels("kvjax.pallas.tpu", writes=True).interpreted()
    mine = Backend("mine", priority=lambda *_: 9, **functions.functions())
    attention.register(mine)
    jax.jit(lambda: jnp.int32(chosen(*arrays(), SUMS) == "mine"))()
    assert chosen(*arrays(), SUMS) == "mine"


INTERPRETED = ["pallas_tpu_interpret", "pallas_gpu_interpret"]


@pytest.mark.parametrize("name", often(INTERPRETED, INTERPRETED[:1], others="kernels"))
@pytest.mark.parametrize("head_dim", often([128, 96], [128], others="kernels"))
@pytest.mark.parametrize(
    "codec", often([None, "int8", "int4"], [None, "int4"], "kernels")
)
def test_our_kernels_pass_their_test(name, head_dim, codec):
    codec = codec and codecs.make(codec).key
    assert backends.BACKENDS.make(name).self_test(head_dim, codec) is None


@pytest.mark.parametrize("broken", ["attend", "write_attend"])
def test_our_kernels_are_what_is_tested(monkeypatch, broken):
    monkeypatch.setattr(tpu, broken, raises)
    jax.clear_caches()  # the test above has compiled it whole
    with pytest.raises(RuntimeError, match="no such instruction"):
        backends.BACKENDS.make("pallas_tpu_interpret").self_test(128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 16])
def test_jax_s_own_attention(length, dtype):
    case = finite(draw(0, 2, 3, length, 48, 64, dtype))
    spec = AttentionSpec(implementation="xla")
    partial, seen = attention.attend(*arguments(case), spec)
    allowed = 3 * TOLERANCE[dtype]["out"]
    np.testing.assert_allclose(
        attention.normalize(partial), by_hand(*case)[0], atol=allowed
    )
    assert seen.attn_sum is None
