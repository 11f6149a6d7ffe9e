"""KCache: values in host memory, against NumPy and against caches on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model, tiny_spec
from testing import layer
from testing.engine import requests_for, run_batch
from testing.kernels import arguments
from testing.toys import OF_8_CHANNELS

import kvjax
from kvjax import Offload, Schedule, UserError, attention, cache, policies
from kvjax.attention import AttentionSpec, Pairs, Queries
from kvjax.attention.reference import PLAIN
from kvjax.cache import codecs, offload
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled, footprint, jobs, layerwise, planner, runner
from kvjax.engine.jobs import Job, bucket
from kvjax.models import placement
from kvjax.parallel import host, meshes
from kvjax.types import Scoring

SPEC = layer.spec_of(heads=2, group=3, depth=8)
ALL = 4096  # more than any head holds here
NOTHING = frozenset()


def on_host(top_n=ALL, device_layers=0, renormalize=False, **more):
    return Offload(top_n, device_layers, renormalize, **more)


# --- recall against NumPy -------------------------------------------------------------


def slots_and_queries(batch=3, heads=2, group=3, tokens=2, slots=12, depth=8, seed=0):
    """Ragged rows with holes, and NaN where nothing lies."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    pos = np.full((batch, heads, slots), -1, np.int32)
    for row in range(batch):
        for head in range(heads):
            count = (slots, slots // 2, 1)[row % 3]
            where = rng.permutation(slots)[:count]
            pos[row, head, where] = rng.permutation(30)[:count]
    q_pos = np.tile(np.arange(20, 20 + tokens, dtype=np.int32), (batch, 1))
    k, v = normal(batch, heads, slots, depth), normal(batch, heads, slots, depth)
    v[pos < 0] = np.nan
    return 2 * normal(batch, heads, group, tokens, depth), k, v, pos, q_pos


def weights_of(q, k, pos, now, scoring):
    """[C], the softmax of one query."""
    logits = k.astype(np.float64) @ q * len(q) ** -0.5
    if scoring.logits_soft_cap:
        cap = scoring.logits_soft_cap
        logits = cap * np.tanh(logits / cap)
    seen = (pos >= 0) & (pos <= now)
    if scoring.local_window:
        seen &= pos > now - scoring.local_window
    if not seen.any():
        return np.zeros(len(pos))
    p = np.where(seen, np.exp(logits - logits[seen].max()), 0.0)
    return p / p.sum()


def named(weights, pos, count):
    """Slots of the `count` largest weights, of equal ones those of the newest."""
    live = [slot for slot in range(len(pos)) if pos[slot] >= 0]
    return sorted(live, key=lambda slot: (-weights[slot], -pos[slot]))[:count]


def expected(q, k, v, pos, q_pos, asked, scoring):
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(q.shape[0], q.shape[1], q.shape[3]):
        here, now = pos[b, h], q_pos[b, t]
        each = [weights_of(one, k[b, h], here, now, scoring) for one in q[b, h, :, t]]
        if asked.queries == "mean":
            chosen = set(named(np.mean(each, axis=0), here, asked.top_n))
        else:
            chosen = {slot for p in each for slot in named(p, here, asked.top_n)}
        chosen = sorted(chosen)
        for g, p in enumerate(each):
            total = p[chosen].sum() if asked.renormalize else 1.0
            if p.any() and total:
                out[b, h, g, t] = p[chosen] @ v[b, h, chosen] / total
    return out


def recalled(q, k, v, pos, q_pos, asked, scoring=PLAIN, stats=NOTHING):
    @jax.jit
    def run(q, k, v, pos, q_pos, n):
        queries, pairs = Queries(q, q_pos, n), Pairs(k, None, pos)
        spec = AttentionSpec(stats, scoring=scoring)
        choice = offload.choose(queries, pairs, spec, asked)
        slots = choice.slots.reshape(*choice.slots.shape[:2], -1, 1)
        values = jnp.take_along_axis(v, slots, axis=2)
        return offload.attended(choice, values, asked), choice.observation

    return run(q, k, v, pos, q_pos, np.full(len(q), q.shape[3], np.int32))


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(2.0, 8)], ids=["plain", "capped"])
@pytest.mark.parametrize("queries", offload.QUERIES)
@pytest.mark.parametrize("renormalize", [False, True], ids=["sums", "shares"])
@pytest.mark.parametrize("top_n", [1, 3, 7, 50])
def test_top_n_is_the_papers(top_n, renormalize, queries, scoring):
    """Ragged rows, one of a single pair; empty slots full of NaN."""
    given = slots_and_queries(seed=top_n)
    asked = on_host(top_n, renormalize=renormalize, queries=queries)
    partial, _ = recalled(*given, asked, scoring)
    found = np.asarray(attention.normalize(partial))
    np.testing.assert_allclose(
        found, expected(*given, asked, scoring), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("top_n", [1, 2, 5])
def test_equal_weights_give_way_by_age(top_n):
    """All keys alike: the newest pairs are taken, wherever they lie."""
    q, k, v, pos, q_pos = slots_and_queries(seed=3)
    k = np.ones_like(k)
    asked = on_host(top_n)
    partial, _ = recalled(q, k, v, pos, q_pos, asked)
    found = np.asarray(attention.normalize(partial))
    np.testing.assert_allclose(
        found, expected(q, k, v, pos, q_pos, asked, PLAIN), rtol=2e-5, atol=2e-6
    )


def test_statistics_are_those_of_all_pairs():
    """Policies see what they would see with every value at hand."""
    q, k, v, pos, q_pos = slots_and_queries(seed=5)
    n, finite = np.full(3, 2, np.int32), np.nan_to_num(v)
    stats = frozenset({"attn_sum", "attn_sq_sum", "last_attn"})
    _, seen = recalled(q, k, v, pos, q_pos, on_host(2), stats=stats)
    queries, pairs = arguments(map(jnp.asarray, (q, k, finite, pos, q_pos, n)))
    _, wanted = attention.attend(queries, pairs, AttentionSpec(stats, "reference"))
    for name in stats:
        np.testing.assert_allclose(getattr(seen, name), getattr(wanted, name), 1e-6)


def test_a_pair_that_is_nan_is_no_number_in_the_output():
    q, k, v, pos, q_pos = slots_and_queries(seed=6)
    seen = np.flatnonzero(pos[0, 1] == pos[0, 1].max(initial=0, where=pos[0, 1] <= 20))
    k[0, 1, seen] = np.nan
    partial, _ = recalled(q, k, v, pos, q_pos, on_host(3))
    found = np.asarray(attention.normalize(partial))
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[0, 0]).all()


# --- a layer, a model -----------------------------------------------------------------


def config_of(spec, policy, budget, schedule, asked=None, **more):
    return make_spec(spec, policy, budget, schedule, offload=asked, **more)


METHODS = {
    "full": (None, Schedule("none", prefill_chunk=8), None),
    "batch_max": (policies.average_attention(), Schedule(prefill_chunk=8), 24),
    "heads_apart": (policies.key_diff(), Schedule(prefill_chunk=8), ((16, 32),)),
    "decode_only": (policies.h2o(), Schedule("decode_only", 8), 24),
    "snapkv": (policies.snapkv(window=4), Schedule("after_prefill", 8), 24),
}
STORED = "identity", "int8", "k8v4_but_ends"
PAIRS = [(name, codec) for name in METHODS for codec in STORED]


@pytest.mark.parametrize(
    ("name", "codec"),
    often(PAIRS, [("heads_apart", "int8")], "e2e", several=True),
    ids=str,
)
def test_all_values_recalled_are_the_full_cache(name, codec):
    """Kept pairs, what is stored, and the output of a step that follows."""
    policy, schedule, budget = METHODS[name]
    stored = OF_8_CHANNELS.get(codec, codec)
    data, lengths = layer.random_data(SPEC, 3, 60, 0), np.array([48, 0, 29])
    plain = config_of(SPEC, policy, budget, schedule, codec=stored)
    away = config_of(SPEC, policy, budget, schedule, on_host(), codec=stored)
    here, there = (layer.run(SPEC, each, data, lengths, 48) for each in (plain, away))
    jax.tree.map(np.testing.assert_array_equal, there.kept, here.kept)
    for mine, theirs in zip(there.end.layers, here.end.layers, strict=True):
        assert all(host.is_host(leaf) for leaf in jax.tree.leaves(mine.v))
        assert not any(host.is_host(leaf) for leaf in jax.tree.leaves(mine.k))
        for a, b in zip(*map(jax.tree.leaves, (mine.v, theirs.v)), strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5
            )
    one = layer.split(data, 59)[1]
    steps = [
        layer.step(SPEC, config, run.end, one, np.ones(3, np.int32), False)[0]
        for config, run in ((plain, here), (away, there))
    ]
    np.testing.assert_allclose(steps[1], steps[0], atol=2e-5)


JOBS = {
    "full": (None, None, Schedule("none", 8), {}),
    "full, staggered": (
        *(None, None, Schedule("none", 8)),
        {"codec": codecs.after_prompt("identity")},
    ),
    "batch_max": (policies.key_diff(), 24, None, {}),
    "batch_max, int8": (policies.h2o(), 24, None, {"codec": "int8"}),
    "compact": (policies.average_attention(), 24, None, {"eviction": "compact"}),
    "streaming": (policies.streaming(), 24, None, {"rope_positions": "cache"}),
    "snapkv, later": (
        *(policies.snapkv(window=4), 24, "after_prefill"),
        {"codec": codecs.after_prompt("int8")},
    ),
    "values looked at": (policies.expected_attention(), 24, None, {}),
}


def ragged(count, longest=100, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, n).tolist() for n in rng.integers(9, longest, count)]


def job_of(spec, policy, budget, schedule, asked, batch=4, new=6, **options):
    config = config_of(spec, policy, budget, schedule, asked, **options)
    return Job(spec, config, batch, bucket(spec, config, 100, new), new)


@pytest.fixture
def by_rows(request, monkeypatch):
    """On the host itself, and as where it does not compute."""
    monkeypatch.setattr(host, "works_by_rows", lambda: request.param)
    compiled.clear()
    yield
    compiled.clear()


BOTH = ("full", "batch_max, int8", "snapkv, later")  # with rows, and without


@pytest.mark.e2e
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize(
    ("by_rows", "name"),
    often(
        [(by_rows, name) for name in JOBS for by_rows in (True, False)],
        [(by_rows, name) for name in BOTH for by_rows in (True, False)]
        + [(True, name) for name in JOBS],
        several=True,
    ),
    indirect=["by_rows"],
    ids=str,
)
def test_tokens_of_a_model(tiny, name):
    """All recalled: the device's tokens. Few: the same alone as in a batch."""
    *method, options = JOBS[name]
    prompts, numbers = ragged(4), [0, 1, 2, 3]
    run = lambda asked, rows=slice(None), **how: run_batch(
        tiny.params,
        dataclasses.replace(job_of(tiny.spec, *method, asked, **options), **how),
        prompts[rows],
        numbers[rows],
    )
    wanted = run(None)
    found = run(on_host(device_layers=1))
    assert found.tokens == wanted.tokens
    kept = map(cache.kept_positions, (found.state, wanted.state))
    jax.tree.map(np.testing.assert_array_equal, *kept)
    few = on_host(5, renormalize=True)
    together = run(few).tokens
    assert together != wanted.tokens
    alone = [run(few, slice(row, row + 1)).tokens[0] for row in (0, 3)]
    assert alone == [together[0], together[3]]
    if "stagger" in name or "later" in name:
        assert run(few, prefill_batch=2).tokens == together


@pytest.mark.e2e
def test_layer_by_layer_too(tiny):
    prompts = ragged(3, seed=4)
    job = job_of(tiny.spec, None, None, Schedule("none", 8), on_host(5, 1), 3)
    whole = run_batch(tiny.params, job, prompts, [0, 1, 2])
    each = layerwise.LayerByLayer(tiny, job)
    read = each.prefill(prompts)
    state, _ = each.begin(read, requests_for(job, prompts))
    first = state.token.tolist()
    rest = each.decode(state, job.max_new_tokens - 1)[1].token
    assert [
        [t, *row] for t, row in zip(first, rest.tolist(), strict=True)
    ] == whole.tokens


def test_given_tokens_are_recalled_for_one_by_one(tiny):
    """Some tokens at a time or each alone: the same probabilities."""
    given = np.random.default_rng(0).integers(0, 50, (2, 6)).astype(np.int32)
    prompts, found = ragged(2, seed=5), []
    for keep_logits in (False, True):
        job = job_of(tiny.spec, None, None, Schedule("none", 8), on_host(4), 2)
        job = dataclasses.replace(job, scored=True, keep_logits=keep_logits)
        whole = runner.Whole(tiny.params, job)
        lengths = np.full(2, 6, np.int32)
        found.append(whole.score(whole.prefill(prompts), given, lengths).logprob)
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("device_layers", often([0, 1, 2], [0, 2], "e2e"))
def test_planned_bytes_are_those_of_the_keys_and_l_layers(device_layers):
    spec = tiny_spec(num_layers=3, head_dim=16)
    plain = job_of(spec, None, None, None, None, 4)
    away = job_of(spec, None, None, None, on_host(8, device_layers), 4)
    both = footprint.state_bytes(plain)["decode"]
    values = 4 * plain.decode_capacity[0] * spec.num_kv_heads * 16 * 4
    gone = (3 - device_layers) * values
    assert footprint.state_bytes(away)["decode"] == both - gone
    planned = planner.plan_job(away, 10**8, 4)
    assert planned.host_bytes == gone
    assert planned.peak_bytes <= planner.plan_job(plain, 10**8, 4).peak_bytes - gone / 2


@pytest.mark.e2e
def test_the_host_limits_the_batch():
    spec = tiny_spec(num_layers=3, head_dim=16)
    row = planner.plan_job(
        job_of(spec, None, None, None, on_host(8)), 10**8, 1
    ).host_bytes
    asked = on_host(8, memory_gb=5.5 * row / 1e9)
    found = planner.plan_job(job_of(spec, None, None, None, asked), 10**8, 16)
    assert (found.batch, found.limited_by) == (5, "host memory")
    assert "on the host" in repr(found)
    fixed = job_of(spec, None, None, None, asked, batch=6)
    assert planner.plan_if_fits(fixed, "batch_size", 10**8) is None
    later = {"codec": codecs.after_prompt("identity")}
    pool = planner.plan_staggered(job_of(spec, None, None, None, asked, **later), 10**8)
    assert pool.limited_by == "host memory"
    assert 3 * row < pool.host_bytes <= 5.5 * row
    with pytest.raises(UserError, match=r"host memory of .* is too small for one row"):
        little = on_host(8, memory_gb=0.5 * row / 1e9)
        planner.plan_job(job_of(spec, None, None, None, little), 10**8, 16)


def test_more_rows_fit_where_values_are_away():
    spec = tiny_spec(num_layers=3, head_dim=16, context_length=4096)
    later = codecs.after_prompt("identity")
    plain, away = (
        Job(spec, make_spec(spec, None, None, offload=x, codec=codec), 1, 1024, 16)
        for x, codec in ((None, "identity"), (on_host(16), later))
    )
    state = max(footprint.state_bytes(plain).values())
    limit = footprint.weights_bytes(plain) + 12 * state
    few = planner.plan_job(plain, limit).batch
    many = planner.plan_staggered(away, limit).batch
    assert many > 1.4 * few


def test_nothing_is_copied_or_compiled_twice(tiny):
    """Donated: values on the host are updated in place; a program serves all steps."""
    job = job_of(tiny.spec, policies.key_diff(), 24, None, on_host(5))
    programs = compiled.programs(job)
    state = compiled.arguments(job).prefill_state
    away = host.nbytes(state)
    assert away > compiled.tree_bytes(state) / 2  # so it cannot be left out below
    for program in (programs.prefill, programs.decode):
        stats = program.memory_analysis()
        aliased = stats.alias_size_in_bytes + stats.host_alias_size_in_bytes
        assert aliased >= away + compiled.tree_bytes(state)
    run_batch(tiny.params, job, ragged(4), [0, 1, 2, 3])
    assert compiled.programs(job) is programs


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Offload(0), ["top_n", "0"]),
        (lambda: Offload(8, -1), ["device_layers", "-1"]),
        (lambda: Offload(8, 1, queries="most"), ["'most'", "union, mean"]),
        (lambda: Offload(8, 1, memory_gb=0), ["memory_gb", "0"]),
        (lambda: Offload(8, 1, renormalize=1), ["renormalize is 1", "True or False"]),
        (lambda: offload.make({"top": 8}), ["top", "top_n"]),
        (lambda: offload.make("many"), ["offload", "'many'"]),
        (lambda: config_of(SPEC, None, None, None, Offload(8, 2)), ["2", "1 layers"]),
        (lambda: config_of(SPEC, None, None, None, Offload(8, 1)), ["1", "1 layers"]),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_a_backend_without_host_memory(monkeypatch):
    class Device:
        device_kind = "abacus"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(UserError, match="abacus offers"):
        config_of(SPEC, None, None, None, Offload(8, 0))


@pytest.mark.e2e
@pytest.mark.parametrize("asked", ["data:4,model:2", "data:8,model:1"])
def test_over_a_mesh_as_on_one_device(asked):
    """Every device's values lie with its host."""
    schedule = Schedule("prefill_and_decode", 8)
    config = config_of(SPEC, policies.key_diff(), 24, schedule, on_host(5))
    data = layer.random_data(SPEC, 8, 60, 0)
    lengths = np.array([48, 0, 29, 24, 48, 7, 30, 1])
    kept, end = layer.run(SPEC, config, data, lengths, 48)
    over = meshes.mesh(asked, SPEC.num_kv_heads)
    also_kept, also = layer.run(SPEC, config, data, lengths, 48, over)
    jax.tree.map(np.testing.assert_array_equal, also_kept, kept)
    assert also.layers[0].v.sharding.memory_kind == host.KIND
    np.testing.assert_allclose(also.layers[0].v, end.layers[0].v, atol=1e-5)


@pytest.mark.e2e
def test_a_split_model_writes_the_same():
    """Plans count the host's bytes of all devices: they share it."""
    model = tiny_model(num_kv_heads=4, num_heads=8, ff_dim=48, vocab_size=64)
    how = {"policy": policies.h2o(), "budget": 24, "max_new_tokens": 8}
    how |= {"memory_gb": 0.1, "offload": Offload(6, 1)}
    alone = kvjax.generate(model, ragged(5), **how)
    over = meshes.mesh("data:2,model:4", model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    parted = model._replace(spec=placement.fitted(model.spec, over), params=params)
    for one, other in zip(alone, kvjax.generate(parted, ragged(5), **how), strict=True):
        assert one.tokens == other.tokens
        kept = one.kept_positions, other.kept_positions
        jax.tree.map(np.testing.assert_array_equal, *kept)
    job = jobs.job_of(parted, make_spec(parted.spec, None, None), 64, 8)
    config = make_spec(parted.spec, None, None, offload=Offload(6, 1))
    found = planner.plan_job(dataclasses.replace(job, config=config, batch=2), 10**8, 2)
    values = found.batch * (64 + 8) * 4 * 8 * 4  # of one layer
    assert found.host_bytes * over.size == values
