"""Whole models: what holds for one layer in test_contract.py holds from end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model, tiny_spec
from jax.extend.core import jaxprs_in_params
from testing.engine import compilations, decode, run_batch
from testing.prose import CHAT, make_tokenizer

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled
from kvjax.engine.compiled import programs, tree_bytes
from kvjax.engine.forward import forward
from kvjax.engine.jobs import Job, bucket
from kvjax.engine.steps import prefill
from kvjax.engine.tokenization import fitted, tokenize
from kvjax.models import decoder

BUDGET, BLOCK = 24, 8
LENGTHS = (5, 24, 25, 40, 63, 90)  # below, at and above the budget; ragged
SCHEDULES = ("prefill_and_decode", "after_prefill", "decode_only", "prefill_only")
CASES = [
    *(("average_attention", phases) for phases in SCHEDULES),
    ("key_diff", "prefill_and_decode"),
    ("snapkv", "after_prefill"),
    ("expected_attention", "decode_only"),
    ("fastgen", "after_prefill"),
    (None, "none"),
]
QUICK = [CASES[0], CASES[4], CASES[5], CASES[-1]]
OPTIONS = {"snapkv": {"window": 6}, "fastgen": {"heavy": 4, "local": 4, "recover": 0.5}}


def prompts(seed=0, vocab=50):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in LENGTHS]


def job_for(spec, name, phases, batch, new=20, **changes):
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    policy = policies.make(name, **OPTIONS.get(name, {})) if name else None
    config = make_spec(spec, policy, BUDGET if name else None, schedule)
    config = dataclasses.replace(config, **changes)
    return Job(spec, config, batch, bucket(spec, config, max(LENGTHS), new), new)


def same_pairs(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(
    scope="module",
    params=often(CASES, QUICK, others="e2e"),
    ids=lambda case: "-".join(map(str, case)),
)
def case(request):
    """One policy under one schedule; its programs go when its tests are done."""
    yield request.param
    compiled.clear()


def test_batched_equals_single(tiny, case):
    """Six prompts of different lengths in one batch give what each gives alone."""
    together = run_batch(
        tiny.params, job_for(tiny.spec, *case, len(LENGTHS)), prompts(), range(6)
    )
    kept = cache.kept_positions(together.state)
    for index, prompt in enumerate(prompts()):
        job = job_for(tiny.spec, *case, 1)
        alone = run_batch(tiny.params, job, [prompt], [index])
        assert alone.tokens[0] == together.tokens[index]
        same_pairs(cache.kept_positions(alone.state)[0], kept[index])


def test_rows_permute(tiny, case):
    job = job_for(tiny.spec, *case, len(LENGTHS))
    order = [3, 0, 5, 1, 4, 2]
    straight = run_batch(tiny.params, job, prompts(), range(6))
    shuffled = run_batch(tiny.params, job, [prompts()[i] for i in order], order)
    kept = cache.kept_positions(straight.state)
    kept_shuffled = cache.kept_positions(shuffled.state)
    for row, index in enumerate(order):
        assert shuffled.tokens[row] == straight.tokens[index]
        same_pairs(kept_shuffled[row], kept[index])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("average_attention", {"eviction": "compact"}),
        ("average_attention", {"rows_per_eviction": 1}),
        ("key_diff", {"rows_per_eviction": 64}),
    ],
)
def test_ways_to_make_room_agree(tiny, name, change):
    """Which pairs stay does not depend on how a layer makes room for new ones."""
    plain = job_for(tiny.spec, name, "prefill_and_decode", 6)
    other = job_for(tiny.spec, name, "prefill_and_decode", 6, **change)
    a = run_batch(tiny.params, plain, prompts(), range(6))
    b = run_batch(tiny.params, other, prompts(), range(6))
    assert a.tokens == b.tokens
    same_pairs(cache.kept_positions(a.state), cache.kept_positions(b.state))


def test_generate_by_a_gather(tiny):
    """`eviction="compact"` from the outside: the same tokens and pairs."""
    how = {"policy": "key_diff", "budget": 16, "max_new_tokens": 6, "memory_gb": 1}
    plain, moved = (
        kvjax.generate(tiny, prompts(), eviction=eviction, show_progress=False, **how)
        for eviction in ("in_place", "compact")
    )
    assert [one.tokens for one in plain] == [one.tokens for one in moved]
    for one, other in zip(plain, moved, strict=True):
        same_pairs(one.kept_positions, other.kept_positions)


IN_PLACE = [
    ("average_attention", "prefill_and_decode"),
    ("streaming", "after_prefill"),
    ("key_diff", "prefill_and_decode"),
    ("snapkv", "prefill_and_decode"),
    ("h2o", "decode_only"),
    (None, "none"),
]


@pytest.mark.parametrize(
    ("name", "phases"), often(IN_PLACE, IN_PLACE[:2], others="e2e", several=True)
)
def test_donated_and_small_temporaries(name, phases):
    """The state lives in place; no program copies the cache."""
    spec = tiny_spec(head_dim=64, context_length=2048, num_layers=6)
    schedule = Schedule(phases, prefill_chunk=16, evict_size=16)
    policy = policies.make(name, **OPTIONS.get(name, {})) if name else None
    config = make_spec(spec, policy, 512 if name else None, schedule)
    job = Job(spec, config, 4, bucket(spec, config, 1024, 16), 16)
    compiled = programs(job)
    for program, capacity in (
        (compiled.prefill, job.prefill_capacity),
        (compiled.decode, job.decode_capacity),
    ):
        state = jax.eval_shape(lambda c=capacity: cache.init(spec, config, 4, c))
        size = tree_bytes(state)
        memory = program.memory_analysis()
        assert abs(memory.alias_size_in_bytes - size) < 0.01 * size
        assert memory.temp_size_in_bytes < 0.25 * size


def test_short_floats_are_not_held_twice():
    """CPUs widen bfloat16 to pick rows of it: these rows, never all that there is."""
    sizes = {"vocab_size": 4096, "model_dim": 256, "ff_dim": 512, "num_layers": 6}
    spec = tiny_spec(head_dim=64, num_heads=4, context_length=2048, **sizes)
    schedule = Schedule(prefill_chunk=16, evict_size=16)
    config = make_spec(spec, policies.key_diff(), 64, schedule)
    job = Job(spec, config, 8, bucket(spec, config, 1024, 16), 16, "bfloat16")
    weights = tree_bytes(decoder.param_shapes(spec, jnp.bfloat16))
    made = programs(job)
    reading, writing = (each.memory_analysis() for each in (made.prefill, made.decode))
    a_layer = writing.alias_size_in_bytes / spec.num_layers
    assert reading.temp_size_in_bytes < 0.25 * weights
    assert writing.temp_size_in_bytes < a_layer


def questions(jaxpr):
    """Conditions and loops of a program, but for those inside of others.

    A choice among platforms is made when the program is compiled.
    """
    for eqn in jaxpr.eqns:
        name, settled = eqn.primitive.name, eqn.params.get("branches_platforms")
        if name in ("cond", "while") and not settled:
            yield eqn.primitive.name
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from questions(inner)


@pytest.mark.parametrize("num_layers", [2, 5])
def test_a_step_asks_once_whether_a_layer_is_full(num_layers):
    """A GPU waits for the host at every question."""
    spec = tiny_spec(num_layers=num_layers)
    config = make_spec(spec, policies.key_diff(), 64, Schedule("prefill_and_decode"))
    state = jax.eval_shape(lambda: cache.init(spec, config, 2, (128,) * num_layers))
    params = decoder.param_shapes(spec, jnp.float32)
    one = jax.ShapeDtypeStruct((2,), jnp.int32)

    def step(params, state, token, n):
        return forward(params, spec, token[:, None], n, state, config)

    program = jax.make_jaxpr(step)(params, state, one, one)
    assert list(questions(program.jaxpr)) == ["cond"]


@pytest.mark.e2e
def test_jit_equals_eager(tiny):
    job = job_for(tiny.spec, "average_attention", "prefill_and_decode", 2, new=4)
    fast = run_batch(tiny.params, job, prompts()[2:4], (0, 1))
    spec, config = job.spec, job.config
    state = cache.init(spec, config, 2, job.prefill_capacity)
    rng_keys = jax.random.split(jax.random.key(0), 2)
    tokens = np.zeros((2, 40), np.int32)
    for row, prompt in enumerate(prompts()[2:4]):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([25, 40], jnp.int32)
    with jax.disable_jit():
        state, logits = prefill(
            tiny.params, state, jnp.asarray(tokens), lengths, spec=spec, config=config
        )
        state, out = decode(
            tiny.params,
            state,
            logits,
            lengths > 0,
            rng_keys,
            spec=spec,
            config=config,
            count=4,
        )
    assert out.tolist() == fast.tokens
    same_pairs(cache.kept_positions(state), cache.kept_positions(fast.state))


def test_second_call_does_not_compile(tiny):
    """Other prompts of the same bucket run the programs that are there."""

    def options():
        return {
            "policy": policies.key_diff(),
            "schedule": Schedule(prefill_chunk=BLOCK, evict_size=BLOCK),
            "budget": BUDGET,
            "max_new_tokens": 7,
        }

    kvjax.generate(tiny, prompts(0), **options())
    with compilations() as made:
        kvjax.generate(tiny, prompts(1), **options())
    assert made == []


def test_memory_is_the_same_for_short_and_long_prompts():
    """Under Batch-Max, 1,000 and 8,000 prompt tokens take the same bytes."""
    spec = tiny_spec(context_length=8192)
    config = make_spec(spec, policies.average_attention(), 512, Schedule())
    jobs = [Job(spec, config, 2, bucket(spec, config, n, 64), 64) for n in (1000, 8000)]
    short, long = (
        [program.memory_analysis() for program in (p.prefill, p.decode)]
        for p in map(programs, jobs)
    )
    for a, b in zip(short, long, strict=True):
        assert a.temp_size_in_bytes == b.temp_size_in_bytes
        assert a.argument_size_in_bytes == b.argument_size_in_bytes
        assert a.output_size_in_bytes == b.output_size_in_bytes


def test_layer_budgets_take_different_memory(tiny):
    """One budget per layer: capacities, kept pairs and bytes follow it."""
    config = make_spec(
        tiny.spec,
        policies.key_diff(),
        (16, 32),
        Schedule(prefill_chunk=8, evict_size=8),
    )
    state = cache.init(tiny.spec, config, 1, config.budget)
    assert [layer.positions.shape[2] for layer in state.layers] == [16, 32]
    assert 2 * state.layers[0].k.nbytes == state.layers[1].k.nbytes
    (done,) = kvjax.generate(
        tiny,
        [prompts()[5]],
        policy=policies.key_diff(),
        budget=(16, 32),
        schedule=Schedule(prefill_chunk=8, evict_size=8),
        max_new_tokens=30,
    )
    assert all(8 < len(h) <= 16 for h in done.kept_positions[0])
    assert all(24 < len(h) <= 32 for h in done.kept_positions[1])


def test_end_token_stops_a_row(tiny):
    """A row that has ended appends nothing and does not disturb the others."""
    job = job_for(tiny.spec, "average_attention", "prefill_and_decode", 6)
    free = run_batch(tiny.params, job, prompts(), range(6))
    end = free.tokens[2][4]
    stopped = run_batch(
        tiny.params, dataclasses.replace(job, eos=(end,)), prompts(), range(6)
    )
    for length, full, cut in zip(LENGTHS, free.tokens, stopped.tokens, strict=True):
        upto = full.index(end) + 1 if end in full else len(full)
        assert cut == full[:upto]
        row = LENGTHS.index(length)
        assert int(stopped.state.next_pos[row]) == length + upto - 1


@pytest.mark.e2e
@pytest.mark.parametrize("phases", SCHEDULES)
def test_slots_give_rotary_positions(tiny, phases):
    """Cache positions: batched equals single, and the text is another one."""
    policy = policies.streaming()
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    config = make_spec(tiny.spec, policy, BUDGET, schedule, rope_positions="cache")
    size = bucket(tiny.spec, config, max(LENGTHS), 20)
    together = run_batch(
        tiny.params, Job(tiny.spec, config, 6, size, 20), prompts(), range(6)
    )
    for index in (1, 5):
        job = Job(tiny.spec, config, 1, size, 20)
        alone = run_batch(tiny.params, job, [prompts()[index]], [index])
        assert alone.tokens[0] == together.tokens[index]
    true = run_batch(
        tiny.params, job_for(tiny.spec, "streaming", phases, 6), prompts(), range(6)
    )
    same_pairs(cache.kept_positions(together.state), cache.kept_positions(true.state))
    assert together.tokens[0] == true.tokens[0]  # never evicted: nothing to renumber
    assert together.tokens != true.tokens


def test_live_bytes_fall_and_allocated_ones_do_not(tiny):
    """A rule that keeps fewer pairs frees no memory, and says so."""
    few = make_spec(
        tiny.spec, policies.sliding_window(6), BUDGET, Schedule("after_prefill", 8)
    )
    size = bucket(tiny.spec, few, 90, 4)
    result = run_batch(
        tiny.params,
        Job(tiny.spec, few, 2, size, 4),
        [prompts()[5], prompts()[0]],
        (0, 1),
    )
    live, allocated = cache.stored_bytes(result.state)
    pair = 2 * 4 * tiny.spec.head_dim * tiny.spec.num_kv_heads * tiny.spec.num_layers
    assert live == (6 + 3 + 5 + 3) * pair
    assert allocated == 2 * (BUDGET + 4) * pair


def test_objects_are_short_at_a_prompt(tiny):
    (done,) = kvjax.generate(tiny, [list(range(40))], policy="recency", budget=16)
    assert len(repr(tiny)) < 300 and "2 layers, 6 query and 2 KV heads" in repr(tiny)
    told = repr(done)
    assert told.startswith("Completion(no text, 64 tokens; ") and len(told) < 300
    assert "in each of 4 heads" in told


def test_conversations_go_through_the_chat_template(tiny):
    words = make_tokenizer(chat_template=CHAT)
    model = tiny._replace(
        spec=dataclasses.replace(tiny.spec, vocab_size=len(words)), tokenizer=words
    )
    message = {"role": "user", "content": "rain stone"}
    told = words.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False
    )
    assert tokenize(model, [[message], told])[0] == words(told)["input_ids"]
    with pytest.raises(UserError, match="prompt 0: the chat template refuses it"):
        tokenize(model, [[{"role": "user"}, 3]])


@pytest.mark.parametrize(
    ("truncate", "bos", "kept"),
    [
        ("left", None, [*range(12, 40)]),
        ("left", 0, [0, *range(13, 40)]),
        ("left", 7, [*range(12, 40)]),  # it does not begin with that
        ("middle", None, [*range(14), *range(26, 40)]),
        ("middle", 0, [*range(14), *range(26, 40)]),
    ],
)
def test_a_prompt_that_is_too_long_is_cut_as_asked(truncate, bos, kept):
    """As if the caller had cut it; the others stay as they are."""
    model = tiny_model(context_length=32)
    words = model._replace(tokenizer=type("Words", (), {"bos_token_id": bos})())
    assert fitted(words, [[5, 6], [*range(40)]], [4, 4], truncate) == [[5, 6], kept]
    if bos is None:
        how = {"max_new_tokens": 4, "ignore_eos": True}
        by_hand = kvjax.generate(model, [[5, 6], kept], **how)
        done = kvjax.generate(model, [[5, 6], [*range(40)]], truncate=truncate, **how)
        assert [one.tokens for one in done] == [one.tokens for one in by_hand]
        assert done[1].kept_positions[0][0].max() == 30  # of 28 + 3 tokens read


def test_what_does_not_exceed_the_context_is_not_cut():
    model = tiny_model(context_length=32)
    for truncate in ("error", "left", "middle"):
        assert fitted(model, [[*range(28)]], [4], truncate) == [[*range(28)]]
    assert fitted(model, [[*range(28)]], [31], "middle") == [[0]]
    assert fitted(model, [[*range(28)]], [31], "left") == [[27]]
