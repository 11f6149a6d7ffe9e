"""Rows that are refilled while others decode: every request gets what it gets alone."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import often, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing import asking
from testing.engine import compilations

from kvjax import CacheConfig, Engine, Sampling, Schedule, UserError
from kvjax.engine import tokenization
from kvjax.engine.beams import beam_search
from kvjax.engine.device import DeviceExecutor
from kvjax.engine.executor import Drawn
from kvjax.engine.requests import Request
from kvjax.models import placement
from kvjax.parallel import meshes

POLICIES = ("key_diff", "h2o", "snapkv", "streaming", "expected_attention")
CODECS = ("identity", "int8", "int4")
PHASES = ("prefill_and_decode", "after_prefill")
CASES = [
    (policy, codec, phases)
    for policy in POLICIES
    for codec in CODECS
    for phases in PHASES
]
ROWS = 3


def config_of(policy, codec="identity", phases="prefill_and_decode"):
    schedule = Schedule(phases, prefill_chunk=8, evict_size=8)
    if policy == "snapkv":
        policy = {"name": policy, "window": 4}
    if codec == "int4":
        codec = {"name": codec, "group": 8}
    return CacheConfig(policy, budget=24, codec=codec, schedule=schedule)


def random_requests(count, seed, longest=60, new=12):
    """Greedy and sampled requests of any lengths."""
    rng = np.random.default_rng(seed)

    def sampling():
        return Sampling(
            max_new_tokens=int(rng.integers(1, new)),
            temperature=float(rng.choice([0, 1.0])),
            top_k=int(rng.integers(0, 9)),
            top_p=float(rng.uniform(0.5, 1)),
            seed=int(rng.integers(5)),
        )

    prompts = [
        rng.integers(0, 50, rng.integers(1, longest)).tolist() for _ in range(count)
    ]
    return prompts, [sampling() for _ in prompts]


def alone(engine, prompts, samplings):
    """What requests get one by one, in an engine of one row."""
    requests = [
        Request(number, tuple(prompt), sampling)
        for number, (prompt, sampling) in enumerate(
            zip(prompts, samplings, strict=True)
        )
    ]
    pieces = [piece for each in requests for piece in engine.run([each])]
    return [piece.completion for piece in pieces if piece.completion]


def same(completions, others):
    assert [each.tokens for each in completions] == [each.tokens for each in others]
    for one, other in zip(completions, others, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        jax.tree.map(
            np.testing.assert_array_equal, one.kept_positions, other.kept_positions
        )


@pytest.mark.parametrize(
    ("policy", "codec", "phases"),
    often(CASES, [CASES[0], CASES[9]], others="e2e", several=True),
)
def test_requests_get_what_they_get_alone(tiny, policy, codec, phases):
    """Three rows take fourteen requests, some of which sample."""
    config = config_of(policy, codec, phases)
    prompts, samplings = random_requests(14, seed=len(policy + codec))
    together = Engine(tiny, config, max_rows=ROWS).generate(prompts, samplings)
    expected = alone(Engine(tiny, config, max_rows=1), prompts, samplings)
    if codec == "int4":  # a sum of another order may round a 4-bit code the other way
        pairs = zip(together, expected, strict=True)
        assert sum(one.tokens == other.tokens for one, other in pairs) >= 12
    else:
        same(together, expected)
    assert [len(c.tokens) for c in together] == [s.max_new_tokens for s in samplings]


@pytest.fixture(scope="module")
def engine():
    """One engine for many requests: the full cache would grow with them."""
    return Engine(tiny_model(), config_of("key_diff"), max_rows=ROWS)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
def test_any_order_of_arrival(engine, seed, order):
    prompts, samplings = random_requests(6, seed)
    expected = engine.generate(prompts, samplings)
    requests = [
        Request(number, tuple(prompt), sampling)
        for number, (prompt, sampling) in enumerate(
            zip(prompts, samplings, strict=True)
        )
    ]
    order.shuffle(requests)
    done = [each.completion for each in engine.run(requests) if each.completion]
    same(sorted(done, key=lambda each: each.prompt), expected)


def test_a_thousand_requests_compile_nothing(engine):
    """Their number, lengths and sampling are data, and the memory stays the same."""
    prompts, samplings = random_requests(40, seed=1, longest=200, new=40)
    engine.generate(prompts, samplings)
    rng = np.random.default_rng(2)
    with compilations() as compiled:
        live, left = set(), 1000
        while left > 0:
            count = min(int(rng.integers(4, 200)), left)
            asked = random_requests(count, int(rng.integers(1e6)), 200, 6)
            engine.generate(*asked)
            live.add(sum(array.nbytes for array in jax.live_arrays()))
            left -= count
    assert compiled == []
    assert len(live) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("phases", PHASES)
def test_a_mesh_gives_what_one_device_gives(phases):
    config = config_of("h2o", phases=phases)
    prompts, samplings = random_requests(9, seed=4)
    one = Engine(tiny_model(), config, max_rows=2).generate(prompts, samplings)
    model = tiny_model()
    over = meshes.mesh("data:4,model:2", model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    split = model._replace(spec=placement.fitted(model.spec, over), params=params)
    engine = Engine(split, config, max_rows=2)
    done = engine.generate(prompts, samplings)
    assert [each.tokens for each in done] == [each.tokens for each in one]


def test_samples_of_a_prompt(engine):
    """A prompt is read once; its first sample is that of a single one."""
    prompts, _ = random_requests(3, seed=5)
    warm = Sampling(max_new_tokens=6, temperature=1.0)
    several = engine.generate(prompts, dataclasses.replace(warm, num_samples=4))
    assert [(c.prompt, c.sample) for c in several] == [
        (prompt, sample) for prompt in range(3) for sample in range(4)
    ]
    single = engine.generate(prompts, warm)
    same(several[::4], single)
    assert len({tuple(c.tokens) for c in several}) > 6


def test_logprobs_are_those_of_the_tokens(engine):
    """The chosen tokens' sum is the score of the same tokens, read instead of drawn."""
    prompts, _ = random_requests(3, seed=6)
    done = engine.generate(prompts, max_new_tokens=5, logprobs=3, ignore_eos=True)
    scores = engine.score(prompts, [each.tokens for each in done])
    for each, score in zip(done, scores, strict=True):
        found = each.logprobs
        np.testing.assert_allclose(found.tokens.sum(), score.logprob, rtol=1e-4)
        assert found.top_tokens[:, 0].tolist() == each.tokens  # greedy
        assert np.all(np.diff(found.top) <= 0)
        assert found.top.shape == (5, 3)
    assert engine.generate(prompts, max_new_tokens=2)[0].logprobs is None


def test_a_repetition_penalty_of_one_row_alone(engine):
    prompts, _ = random_requests(2, seed=7)
    plain = Sampling(max_new_tokens=16, ignore_eos=True)
    strong = dataclasses.replace(plain, repetition_penalty=50.0)
    free, bound = engine.generate([prompts[0]] * 2, [plain, strong])
    assert free.tokens == engine.generate(prompts[:1], plain)[0].tokens
    assert len(set(bound.tokens)) > 2 * len(set(free.tokens))


def test_beams_are_those_of_beam_search(engine):
    prompts, _ = random_requests(2, seed=8)
    options = {"num_beams": 3, "num_samples": 2, "max_new_tokens": 5}
    done = engine.generate(prompts, **options, length_penalty=2.0)
    expected = beam_search(
        engine.model,
        engine.spec(60),
        prompts,
        **options,
        length_penalty=2.0,
        eos=tokenization.end_tokens(engine.model),
    )
    assert [(c.tokens, c.score) for c in done] == [b for p in expected for b in p]
    assert done[0].score >= done[1].score
    with pytest.raises(UserError, match="a call of their own"):
        engine.generate(prompts, [Sampling(), Sampling(num_beams=2)])


@pytest.fixture(scope="module")
def words():
    return Engine(asking.tiny(), config_of("h2o"), max_rows=ROWS)


def test_a_stream_adds_up_to_the_completions(words):
    prompts = [asking.words(n, n) for n in (3, 9, 24, 40, 7)]
    whole = words.generate(prompts, max_new_tokens=20)
    stop = whole[0].text.split()[4]
    for options in ({}, {"stop": stop}):
        expected = words.generate(prompts, max_new_tokens=20, **options)
        texts, ended = [""] * len(prompts), {}
        for piece in words.stream(prompts, max_new_tokens=20, **options):
            texts[piece.prompt] += piece.text
            if piece.completion:
                ended[piece.prompt] = piece.completion
        same([ended[i] for i in range(len(prompts))], expected)
        assert texts == [each.text for each in expected]
    assert expected[0].text == whole[0].text.partition(stop)[0]
    assert expected[0].finish_reason == "stop"


def test_completions_come_as_they_end(words):
    """The short ones are there while the long one is still generated."""
    samplings = [Sampling(max_new_tokens=n, ignore_eos=True) for n in (40, 2, 2, 2, 2)]
    prompts = [[1, 2]] * 5
    found = words.generate(prompts, samplings, in_order=False)
    first = next(found)
    assert first.prompt != 0
    assert sorted(each.prompt for each in [first, *found]) == [0, 1, 2, 3, 4]


def test_rows_are_refilled_while_others_decode(words):
    """The steps are nearly the longest request's, not the sum of two batches."""
    steps, real = [], DeviceExecutor.step

    def step(self, limit, until) -> Drawn:
        drawn = real(self, limit, until)
        steps.append(drawn.steps)
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceExecutor, "step", step)
        new = [60, 20, 20, 20, 20, 20, 20]
        samplings = [Sampling(max_new_tokens=n, ignore_eos=True) for n in new]
        words.generate([[1, 2, 3]] * 7, samplings)
    assert sum(steps) < 75


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": [Sampling()]}, ["1 entries for 2 prompts"]),
        ({"sampling": [Sampling(), 3]}, ["sampling is 3", "kvjax.Sampling"]),
        ({"sampling": [Sampling()] * 2, "top_k": 2}, ["fields ['top_k']"]),
        ({"policy": "h2o"}, ["'policy' is unknown", "kvjax.Sampling"]),
        ({"context": "doc"}, ["context is 'doc'", "Engine.read"]),
        ({"num_samples": 0}, ["num_samples 0"]),
        ({"logprobs": 21}, ["logprobs 21"]),
        ({"repetition_penalty": 0}, ["repetition_penalty 0"]),
        ({"stop": "a"}, ["stop is ('a',)", "no tokenizer"]),
    ],
)
def test_bad_requests(engine, options, words):
    with pytest.raises(UserError) as caught:
        engine.generate([[1], [2]], **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_engines(tiny):
    with pytest.raises(UserError, match=r"kvjax.load"):
        Engine("smollm2")
    with pytest.raises(UserError, match="max_rows 0"):
        Engine(tiny, max_rows=0)
    with pytest.raises(UserError, match="'budge' is unknown: did you mean 'budget'"):
        Engine(tiny, budge=3)
