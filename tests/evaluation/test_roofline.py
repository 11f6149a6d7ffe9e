"""The counts against the compilers', the checkpoints' and the plan's; predictions."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import tiny_spec
from testing.engine import run_batch

from kvjax import Offload, Schedule, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.planner import as_plan
from kvjax.engine.steps import forward
from kvjax.evaluation import roofline
from kvjax.evaluation.roofline import Rates
from kvjax.models import decoder, presets
from kvjax.types import UserError

measured_probe = roofline._probe  # which tests do without
SPEC = tiny_spec(model_dim=128, ff_dim=384, head_dim=32, num_heads=8, vocab_size=1000)


def plan_of(config, batch=4, prompt=256, new=8, spec=SPEC):
    return as_plan(Job(spec, config, batch, prompt, new), "prompts", 10**9, 0)


def all_weights(spec):
    return sum(leaf.size for leaf in jax.tree.leaves(decoder.param_shapes(spec)))


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("llama-2-7b", 6_738_415_616, None),
        ("llama-2-13b", 13_015_864_320, None),
        ("llama-3.1-8b", 8_030_261_248, None),
        ("qwen2-7b", 7_615_616_512, None),
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
    ],
)
def test_weights_are_the_checkpoints(name, weights, active):
    """Parameters as the models' cards count them; Mixtral's 12.9B active ones too."""
    spec = presets.spec(name)
    assert all_weights(spec) == weights
    if active:
        both = 2 * spec.vocab_size * spec.model_dim
        assert roofline.active_weights(spec) + both == pytest.approx(active, rel=0.01)


def test_experts_that_are_read():
    """One token reads two of eight experts, many read them all, and none twice."""
    spec = presets.spec("mixtral-8x7b")
    one, many = (roofline.layer_weights(spec, tokens) for tokens in (1, 1000))
    layers = all_weights(spec) - 2 * spec.vocab_size * spec.model_dim
    assert many == layers - spec.model_dim  # the final norm
    expert = 3 * spec.model_dim * spec.ff_dim * spec.num_layers
    assert many - one == 6 * expert


@pytest.mark.parametrize(
    ("tokens", "slots", "rows", "logits"),
    [(1, 64, 4, True), (1, 256, 16, True), (32, 256, 4, False), (64, 128, 1, False)],
)
def test_flops_are_the_compiler_s(tokens, slots, rows, logits):
    """Within 5%: XLA also counts norms, softmax and rotary positions.

    One step outside any loop, whose body XLA would count once.
    """
    config = make_spec(SPEC, None, None, implementation="reference")
    job = Job(SPEC, config, rows, 256, 8)
    capacity = (slots,) * SPEC.num_layers

    @jax.jit
    def run(params, state, ids):
        n = jnp.full((rows,), tokens)
        hidden, state = forward(params, SPEC, ids, n, state, config)
        out = decoder.logits(params, hidden[:, 0], SPEC) if logits else hidden
        return out, state

    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    shapes = (
        decoder.param_shapes(SPEC),
        jax.eval_shape(lambda: cache.init(SPEC, config, rows, capacity)),
        ids,
    )
    counted = run.lower(*shapes).compile().cost_analysis()["flops"]
    ours = roofline.step(job, rows, tokens, each_head(capacity), logits).flops
    assert ours < counted < 1.05 * ours


def each_head(layers):
    """[L * K], where all heads of a layer hold the same."""
    return tuple(pairs for pairs in layers for _ in range(SPEC.num_kv_heads))


def test_bytes_are_the_arrays():
    """Weights once, all pairs read, the new ones written."""
    config = make_spec(SPEC, None, None)
    job = Job(SPEC, config, 4, 256, 8)
    work = roofline.step(job, 4, 1, each_head(job.decode_capacity), logits=True)
    slots = 4 * sum(job.decode_capacity) * SPEC.num_kv_heads
    others = (
        4 * slots + 4 * 4 + 4 * 4 * SPEC.num_kv_heads
    )  # positions, counters, errors
    pairs = state_bytes(job)["decode"] - others
    written = pairs // job.decode_capacity[0]
    unread = 4 * SPEC.model_dim  # the final norm; the head is the embedding
    assert work.bytes == weights_bytes(job) - unread + pairs + written


def test_a_full_prefill_by_hand():
    """Blocks of 64 over 160 tokens: 64, 128, then 160 pairs; the head once."""
    config = make_spec(SPEC, None, None, Schedule("none", prefill_chunk=64))
    found = roofline.total(roofline.prefill(plan_of(config), 160))
    read = 64 * 64 + 64 * 128 + 32 * 160
    attention = 4 * 2 * 4 * 32 * read * 4 * SPEC.num_layers
    matrices = 2 * roofline.active_weights(SPEC) * 160 * 4
    assert found.flops == attention + matrices + 2 * 4 * 128 * 1000


def held(config, prompt_tokens, new=8):
    """Pairs of the first layer in every block, and in every decoding step."""
    plan = plan_of(config, new=new)
    size = 2 * SPEC.num_kv_heads * SPEC.head_dim * 4 * plan.batch * SPEC.num_layers
    least = [
        roofline.step(plan.job, 4, tokens, each_head((0, 0)), logits).bytes
        for tokens, logits in ((64, False), (1, True))
    ]
    blocks = roofline.prefill(plan, prompt_tokens)
    steps = roofline.decode(plan, prompt_tokens)
    return (
        [(step.bytes - least[0]) / size for step in blocks if step.flops > 1e6][:-1],
        [(step.bytes - least[1]) / size for step in steps],
    )


@pytest.mark.parametrize(
    ("schedule", "budget", "blocks", "steps"),
    [
        (
            Schedule(prefill_chunk=64, evict_size=64),
            128,
            [64, 128, 128, 128],
            [65, 66, 67],
        ),
        (Schedule("prefill_only", 64), 128, [64, 128, 128, 128], [129, 130, 131]),
        (Schedule("after_prefill", 64), 100, [64, 128, 192, 256], [101, 102, 103]),
        (Schedule("decode_only", 64, evict_size=1), 2, [64, 128, 192, 256], [2, 2, 2]),
    ],
    ids=["batch_max", "prefill_only", "after_prefill", "ed"],
)
def test_pairs_held(tiny, schedule, budget, blocks, steps):
    """As the engine itself holds them, at the end of a real run of the same sizes."""
    config = make_spec(SPEC, policies.recency(), budget, schedule)
    read, written = held(config, 256, new=4)
    assert read == blocks and written == steps

    config = make_spec(tiny.spec, policies.recency(), budget, schedule)
    context = tiny.spec.__class__(**(vars(tiny.spec) | {"context_length": 512}))
    job = Job(context, config, 1, 256, 4)
    state = run_batch(tiny.params, job, [[1] * 256], [0]).state
    assert int((state.layers[0].positions[0, 0] >= 0).sum()) == steps[-1]


def test_windows_bound_what_is_read():
    spec = tiny_spec(sliding_windows=(16, 0))
    config = make_spec(spec, None, None)
    job = Job(spec, config, 1, 256, 8)
    all_read = roofline.step(job, 1, 1, (100, 100, 100, 100), False).bytes
    near = roofline.step(job, 1, 1, (16, 16, 100, 100), False).bytes
    assert all_read == near


def a_step(tokens=1, held=100, **options):
    """One step of 4 rows, its heads with so many pairs."""
    job = Job(SPEC, make_spec(SPEC, None, None, **options), 4, 256, 8)
    pairs = (held,) * (SPEC.num_layers * SPEC.num_kv_heads)
    return roofline.step(job, 4, tokens, pairs, logits=tokens == 1)


def test_values_on_the_host_by_hand():
    """In one layer of two: 2 heads of 4 queries that name 4 pairs each, 4 rows."""
    all_read, few = a_step(), a_step(offload=Offload(4, device_layers=1))
    heads, value = 4 * 2, 4 * 32
    assert all_read.link_bytes == 0
    assert few.link_bytes == heads * (16 + 1) * value
    assert all_read.bytes - few.bytes == heads * (100 - 16 + 1) * value  # none written
    assert all_read.flops - few.flops == heads * 2 * 32 * 4 * (100 - 16)
    assert a_step(held=9, offload=Offload(4, 1)).link_bytes == heads * (9 + 1) * value
    mean = a_step(offload=Offload(4, 1, queries="mean"))
    assert mean.link_bytes == heads * (4 + 1) * value
    block = a_step(tokens=32, offload=Offload(4, 1))  # attends to all
    assert block.link_bytes == heads * (100 + 32) * value
    assert block.flops == a_step(tokens=32).flops
    slow = Rates(float("inf"), float("inf"), 1e9)
    assert roofline.seconds([few, block], slow) == pytest.approx(
        (few.link_bytes + block.link_bytes) / 1e9
    )


def test_codes_by_hand():
    """A key of 32 numbers is 32 bytes and a scale of 2, where it was 128."""
    numbers, codes = a_step(), a_step(codec="int8")
    heads = 4 * SPEC.num_layers * SPEC.num_kv_heads
    assert numbers.bytes - codes.bytes == heads * 101 * 2 * (4 * 32 - 34)
    assert numbers.flops == codes.flops
    away = a_step(codec="int8", offload=Offload(4, device_layers=0))
    assert away.link_bytes == heads * (16 + 1) * 34


def test_a_pool_reads_the_weights_for_every_group():
    config = make_spec(SPEC, policies.recency(), 64, Schedule("after_prefill"))
    whole = plan_of(config, batch=6)
    job = dataclasses.replace(whole.job, prefill_batch=2)
    groups = dataclasses.replace(whole, job=job)
    once, thrice = (roofline.prefill(plan, 200) for plan in (whole, groups))
    flops = roofline.total(once).flops
    assert roofline.total(thrice).flops == pytest.approx(flops)
    again = roofline.total(thrice).bytes - roofline.total(once).bytes
    pooled = 2 * 2 * 32 * 4 * 2 * 64 * 6 * SPEC.num_layers
    weights = 4 * roofline.layer_weights(SPEC, 128)
    assert again == 2 * (4 * weights + 4 * 128 * 1000) + pooled
    assert roofline.decode(whole, 200) == roofline.decode(groups, 200)


def test_predictions():
    """By hand where one rate alone counts, and the slower of the two where both do."""
    config = make_spec(SPEC, None, None, Schedule("none", prefill_chunk=64))
    plan = plan_of(config)
    work = [roofline.total(part(plan)) for part in (roofline.prefill, roofline.decode)]
    by_bytes = roofline.predict(plan, Rates(1e9, float("inf")))
    assert by_bytes.prefill_tokens_per_s == pytest.approx(4 * 256e9 / work[0].bytes)
    assert by_bytes.decode_tokens_per_s == pytest.approx(4 * 8e9 / work[1].bytes)
    by_flops = roofline.predict(plan, Rates(float("inf"), 1e9))
    both = work[0].flops + work[1].flops
    assert by_flops.tokens_per_s == pytest.approx(4 * 8e9 / both)
    real = roofline.predict(plan, Rates(1e9, 1e9))
    assert real.tokens_per_s <= min(by_bytes.tokens_per_s, by_flops.tokens_per_s)


def test_rates_are_measured():
    """Plausible for anything that runs this, and not measured twice."""
    rates = roofline.measured_rates()
    assert 1e8 < rates.bytes_per_s < 1e14 and 1e8 < rates.flops_per_s < 1e16
    assert roofline.measured_rates() is rates
    assert rates.link_bytes_per_s == float("inf")  # a CPU's host is itself
    assert roofline.measured_link() > 1e8


def test_what_is_left_of_the_machine_is_measured(monkeypatch):
    """On both sides of the block, of which the probe itself is no part."""
    monkeypatch.setattr(roofline, "_probe", measured_probe)
    monkeypatch.setattr(roofline, "_SECONDS", 0.02)
    with roofline.probed("float32") as found:
        assert not found
    assert 1e8 < found["probe_bytes_per_s"] < 1e14
    assert 1e8 < found["probe_flops_per_s"] < 1e16
    turns = iter([(1e9, 5e9), (3e9, 6e9)])
    monkeypatch.setattr(roofline, "_probe", lambda dtype: next(turns))
    with roofline.probed("float32") as found:
        pass
    assert found == {"probe_flops_per_s": 2e9, "probe_bytes_per_s": 5.5e9}


def test_devices_by_name():
    """An H200's memory is faster than an H100's; its arithmetic is the same."""
    old, new = roofline.device("h100-sxm").rates, roofline.device("h200").rates
    assert old.flops_per_s == new.flops_per_s == 989e12
    assert new.bytes_per_s / old.bytes_per_s == pytest.approx(4.8 / 3.35)
    with pytest.raises(UserError, match=r"no rates of 'h300': one of a100-80gb, "):
        roofline.device("h300")
