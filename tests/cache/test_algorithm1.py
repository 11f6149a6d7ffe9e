"""Algorithm 1 against a NumPy transcription, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from testing import oracle
from testing.engine import decode, score_tokens

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.spec import make_spec
from kvjax.engine.steps import compact, prefill

RULES = ("average_attention", "h2o", "streaming", "key_diff")
STEPS = 21  # several select_evictions while decoding


ROOM = 72  # prompt tokens that every run here is compiled for


def after_prompt(model, config, prompt, new=STEPS, room=ROOM):
    """The state and the logits after one prompt."""
    spec = model.spec
    tokens = jnp.asarray(np.pad(prompt, (0, room - len(prompt)))[None], jnp.int32)
    lengths = jnp.asarray([len(prompt)], jnp.int32)
    state = cache.init(spec, config, 1, config.prefill_capacity(spec, room, new))
    return prefill(model.params, state, tokens, lengths, spec=spec, config=config)


def run(model, config, prompt, steps=STEPS):
    """Kept positions after the prompt, after compaction and at the end; new tokens."""
    spec = model.spec
    state, logits = after_prompt(model, config, prompt, steps)
    kept = [cache.kept_positions(state)[0]]
    if config.schedule.compacts:
        capacity = config.decode_capacity(spec, ROOM, steps)
        state = compact(state, spec=spec, config=config, capacity=capacity)
    kept.append(cache.kept_positions(state)[0])
    active, keys = jnp.ones((1,), bool), jax.random.split(jax.random.key(0), 1)
    state, out = decode(
        model.params, state, logits, active, keys, spec=spec, config=config, count=steps
    )
    cache.raise_errors(state)
    return (*kept, cache.kept_positions(state)[0], out[0].tolist())


def as_lists(kept):
    return [[head.tolist() for head in layer] for layer in kept]


FIRST = "remainder", "budget"
SIZES = (4, 16), (8, 20), (1, 9), (4, 9)
CASES = [(rule, *sizes, first) for rule in RULES for sizes in SIZES for first in FIRST]
QUICK = [
    *((RULES[0], *sizes, FIRST[0]) for sizes in SIZES),
    *((rule, 4, 9, FIRST[0]) for rule in RULES[1:]),
    (RULES[0], 8, 20, FIRST[1]),
]


@pytest.mark.parametrize(
    ("rule", "p", "budget", "first"), often(CASES, QUICK, others="e2e", several=True)
)
def test_kept_positions(tiny, rule, p, budget, first):
    """With the first block as printed, and in blocks of p that end where it does."""
    policy = policies.make(rule)
    schedule = Schedule(prefill_chunk=p, evict_size=p, first_chunk=first)
    config = make_spec(tiny.spec, policy, budget, schedule)
    assert config.first_chunk == (budget if first == "budget" else budget % p or p)
    rng = np.random.default_rng(budget)
    for length in (budget - 5, budget, 3 * budget + 1):
        prompt = rng.integers(0, tiny.spec.vocab_size, length)
        at_prompt, _, at_end, tokens = run(tiny, config, prompt)
        by_hand = oracle.Decoder(
            tiny.spec, tiny.params, getattr(oracle, rule)(), budget, p
        )
        logits = by_hand.prefill(prompt)
        assert as_lists(at_prompt) == by_hand.kept(), f"prompt of {length}"
        for token in tokens[:-1]:
            assert token == int(np.argmax(logits))
            logits = by_hand.step([token])
        assert as_lists(at_end) == by_hand.kept(), f"prompt of {length}, decoded"


@pytest.mark.parametrize(
    ("budget", "p"),
    often(
        [(65, 32), (100, 32), (127, 32), (200, 64), (300, 64)],
        [(100, 32), (200, 64)],
        others="e2e",
        several=True,
    ),
)
def test_what_is_read_before_the_first_eviction_fills_the_budget(tiny, budget, p):
    """With sizes chosen from the budget, at budgets that are no multiple of them."""
    policy = policies.average_attention()
    config = make_spec(tiny.spec, policy, budget)
    assert config.schedule == Schedule("prefill_and_decode", p, p)
    rng = np.random.default_rng(budget)
    for length in (budget, budget + 1, budget + 2 * p + 5):
        prompt = rng.integers(0, tiny.spec.vocab_size, length)
        by_hand = oracle.Decoder(
            tiny.spec, tiny.params, oracle.average_attention(), budget, p
        )
        by_hand.prefill(prompt)
        state, _ = after_prompt(tiny, config, prompt, room=512)
        kept = as_lists(cache.kept_positions(state)[0])
        assert kept == by_hand.kept(), f"prompt of {length}"
        full = budget if length == budget else budget - p + (length - budget) % p
        assert {len(head) for layer in kept for head in layer} == {full}


def test_several_blocks_step_by_step(tiny):
    """Not only the ends: every decode step keeps what the transcription keeps."""
    policy, budget, p = policies.average_attention(), 12, 4
    config = make_spec(
        tiny.spec, policy, budget, Schedule(prefill_chunk=p, evict_size=p)
    )
    prompt = np.arange(30) % tiny.spec.vocab_size
    by_hand = oracle.Decoder(
        tiny.spec, tiny.params, oracle.average_attention(), budget, p
    )
    logits = by_hand.prefill(prompt)
    state, ours = after_prompt(tiny, config, prompt)
    for step in range(STEPS):
        token = int(np.argmax(logits))
        assert int(jnp.argmax(ours[0])) == token
        given = jnp.full((1, 1), token, jnp.int32)
        state, ours = score_tokens(
            tiny.params, state, given, spec=tiny.spec, config=config
        )
        ours, logits = ours[0], by_hand.step([token])
        kept = cache.kept_positions(state)[0]
        assert as_lists(kept) == by_hand.kept(), f"after {step + 1} tokens"


def test_full_cache_is_the_plain_model(tiny):
    config = make_spec(tiny.spec, None, None, Schedule("none", prefill_chunk=8))
    prompt = np.arange(40) % tiny.spec.vocab_size
    _, _, kept, tokens = run(tiny, config, prompt, 6)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, None, None, 8)
    logits = by_hand.prefill(prompt)
    for token in tokens[:-1]:
        assert token == int(np.argmax(logits))
        logits = by_hand.step([token])
    assert as_lists(kept) == by_hand.kept()


def test_a_budget_above_the_text_is_the_full_cache(tiny):
    prompt = np.arange(40) % tiny.spec.vocab_size
    full = make_spec(tiny.spec, None, None, Schedule("none", prefill_chunk=8))
    room = make_spec(
        tiny.spec,
        policies.average_attention(),
        64,
        Schedule(prefill_chunk=8, evict_size=8),
    )
    *_, kept, tokens = run(tiny, full, prompt)
    *_, kept_too, tokens_too = run(tiny, room, prompt)
    assert tokens == tokens_too
    assert as_lists(kept) == as_lists(kept_too)


def test_ed_keeps_only_the_newest_pair(tiny):
    """Batch-Max, Algorithm 2: full prefill, then the newest pair and the current."""
    schedule = Schedule("decode_only", prefill_chunk=8, evict_size=1)
    config = make_spec(tiny.spec, policies.recency(), 2, schedule)
    prompt = np.arange(37) % tiny.spec.vocab_size
    full, compacted, at_end, _ = run(tiny, config, prompt, 5)
    heads = range(tiny.spec.num_kv_heads)
    every = range(tiny.spec.num_layers)
    assert as_lists(full) == [[list(range(37)) for _ in heads] for _ in every]
    assert as_lists(compacted) == [[[36] for _ in heads] for _ in every]
    assert as_lists(at_end) == [[[39, 40] for _ in heads] for _ in every]


def test_evictions_while_the_prompt_is_read_and_none_after(tiny):
    """What Algorithm 1 leaves of the prompt, and all that is written."""
    budget, p = 20, 8
    sizes = {"prefill_chunk": p, "evict_size": p}
    config, always = (
        make_spec(tiny.spec, "average_attention", budget, Schedule(phases, **sizes))
        for phases in ("prefill_only", "prefill_and_decode")
    )
    rng = np.random.default_rng(0)
    for length in (budget - 5, budget, 3 * budget + 1):
        prompt = rng.integers(0, tiny.spec.vocab_size, length)
        read, grown, at_end, tokens = run(tiny, config, prompt)
        expected, *_ = run(tiny, always, prompt)
        assert as_lists(read) == as_lists(grown) == as_lists(expected)
        written = list(range(length, length + STEPS - 1))
        kept = [[head + written for head in layer] for layer in as_lists(read)]
        assert as_lists(at_end) == kept
        by_hand = oracle.Decoder(
            tiny.spec, tiny.params, oracle.average_attention(), budget, p
        )
        logits = by_hand.prefill(prompt)
        for layer in by_hand.layers:
            layer.rule = None
        for token in tokens[:-1]:
            assert token == int(np.argmax(logits))
            logits = by_hand.step([token])
        assert as_lists(at_end) == by_hand.kept(), f"prompt of {length}"
    with pytest.raises(UserError, match="budget 8 must be larger than the 8 pairs"):
        make_spec(tiny.spec, "h2o", 8, Schedule("prefill_only", **sizes))


def test_nothing_goes_once_the_prompt_is_read(tiny):
    """Not even what the rule would not keep at any budget."""
    schedule = Schedule("prefill_only", prefill_chunk=8, evict_size=8)
    config = make_spec(tiny.spec, policies.sliding_window(6), 20, schedule)
    read, grown, *_ = run(tiny, config, np.arange(61) % tiny.spec.vocab_size, 3)
    assert as_lists(read) == as_lists(grown)
    assert len(read[0][0]) > 6


def test_one_compaction_after_the_prompt(tiny):
    """The prompt's best pairs stay, and so does everything decoded."""
    config = make_spec(
        tiny.spec,
        policies.average_attention(),
        10,
        Schedule("after_prefill", prefill_chunk=8),
    )
    prompt = np.arange(37) % tiny.spec.vocab_size
    _, compacted, at_end, _ = run(tiny, config, prompt, 9)
    by_hand = oracle.Decoder(tiny.spec, tiny.params, None, None, 8)
    by_hand.prefill(prompt)
    for layer, held in enumerate(by_hand.layers):
        keep = [10] * len(held.heads)
        scores_of_heads = oracle.average_attention()(held.heads, 36, keep)
        for head, scores in enumerate(scores_of_heads):
            best = sorted(np.argsort(scores)[-10:].tolist())
            assert compacted[layer][head].tolist() == best
            assert at_end[layer][head].tolist() == best + list(range(37, 45))
