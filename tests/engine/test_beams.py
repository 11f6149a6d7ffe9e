"""Beam search against transformers, greedy decoding and teacher forcing."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import often
from testing import pooled, toys
from testing.engine import compilations, run_batch

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import codecs, offload
from kvjax.cache.spec import make_spec
from kvjax.engine import beam_steps, beams, footprint, jobs, likelihood
from kvjax.models import placement, weights
from kvjax.parallel import meshes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOUND = json.loads((GOLDEN / "beams.json").read_text())
MEMORY = 10**9
BUDGET, BLOCK, NEW = 24, 8, 14
LENGTHS = (5, 24, 40, 63)  # below, at and above the budget
SCHEDULES = ("prefill_and_decode", "after_prefill", "decode_only", "prefill_only")
CASES = [
    *(("average_attention", phases, "identity") for phases in SCHEDULES),
    ("key_diff", "prefill_and_decode", "identity"),
    ("key_diff", "prefill_and_decode", "int8"),
    ("snapkv", "after_prefill", "identity"),
    ("fastgen", "after_prefill", "int8"),
    (None, "none", "identity"),
]


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_the_tests():
    yield
    beams._programs.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """The checkpoint that transformers searched with."""
    tensors = dict(np.load(GOLDEN / f"{FOUND['model']}.npz"))
    (tmp_path / "config.json").write_text(str(tensors.pop("config")))
    only = {name: tensor for name, tensor in tensors.items() if "." in name}
    safetensors.numpy.save_file(only, tmp_path / "model.safetensors")
    return tmp_path


def same_sequences(found, expected, **tolerance):
    """Tokens are equal, scores close."""
    for mine, theirs in zip(found, expected, strict=True):
        assert [beam.tokens for beam in mine] == [tokens for tokens, _ in theirs]
        scores = [score for _, score in theirs]
        np.testing.assert_allclose([beam.score for beam in mine], scores, **tolerance)


@pytest.mark.parametrize("num_beams", often([2, 3, 5], [3], others="e2e"))
def test_sequences_are_those_of_transformers(folder, num_beams):
    """All W sequences and their scores, with end tokens that some of them reach."""
    model = weights.load(folder)
    full = make_spec(model.spec, None, None)
    cases = [case for case in FOUND["cases"] if case["num_beams"] == num_beams]
    assert {case["length_penalty"] for case in cases} == {0.0, 1.0, 2.0}
    for case in cases:
        expected = case["sequences"]
        found = beams.beam_search(
            model,
            full,
            FOUND["prompts"],
            num_beams=num_beams,
            num_samples=num_beams,
            max_new_tokens=FOUND["new"],
            length_penalty=case["length_penalty"],
            eos=(*case["eos"], -1)[:2],  # one program for one end token and for two
            memory_bytes=MEMORY,
        )
        same_sequences(found, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.e2e
@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.parametrize("num_beams", [2, 4])
def test_other_prompts_live(folder, num_beams):
    """Against transformers itself, where torch is installed: prompts of no file."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers")
    from golden import make_beams

    theirs, model = make_beams.load(), weights.load(folder)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 64, length).tolist() for length in (3, 8, 17)]
    for length_penalty in (-1.0, 0.0, 0.7, 1.0):
        case = {"num_beams": num_beams, "length_penalty": length_penalty, "eos": [23]}
        found = beams.beam_search(
            model,
            make_spec(model.spec, None, None),
            prompts,
            num_samples=num_beams,
            max_new_tokens=20,
            memory_bytes=MEMORY,
            **case,
        )
        expected = [make_beams.search(theirs, p, **case, new=20) for p in prompts]
        same_sequences(found, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.model
@pytest.mark.e2e
def test_smollm2_finds_what_transformers_finds(smollm2):
    known = json.loads((GOLDEN / "beams_smollm2.json").read_text())
    (case,) = known["cases"]
    found = beams.beam_search(
        smollm2,
        make_spec(smollm2.spec, None, None),
        known["prompts"],
        num_beams=case["num_beams"],
        num_samples=case["num_beams"],
        max_new_tokens=known["new"],
        eos=case["eos"],
    )
    same_sequences(found, case["sequences"], atol=1e-4)


def prompts(vocab=50):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, length).tolist() for length in LENGTHS]


def compressed(spec, name, phases, codec):
    schedule = Schedule(phases, prefill_chunk=BLOCK, evict_size=BLOCK)
    options = {"window": 6} if name == "snapkv" else {}
    policy = policies.make(name, **options) if name else None
    return make_spec(spec, policy, BUDGET if name else None, schedule, codec=codec)


def search(model, config, **changes):
    options = {"max_new_tokens": NEW, "memory_bytes": MEMORY, "num_beams": 3}
    options |= {"num_samples": 3} if "num_beams" not in changes else {}
    return beams.beam_search(model, config, prompts(), **(options | changes))


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_one_beam_is_greedy(tiny, case):
    config = compressed(tiny.spec, *case)
    size = jobs.bucket(tiny.spec, config, max(LENGTHS), NEW)
    job = jobs.Job(tiny.spec, config, len(LENGTHS), size, NEW)
    greedy = run_batch(tiny.params, job, prompts(), range(4)).tokens
    eos = greedy[2][NEW // 2]  # the third prompt ends early
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in greedy]
    assert any(len(row) < NEW for row in cut)
    found = search(tiny, config, num_beams=1, eos=(eos,))
    assert [row[0].tokens for row in found] == cut


@pytest.mark.parametrize("case", often(CASES, CASES[4:5], others="e2e"))
def test_scores_are_those_of_teacher_forcing(tiny, case):
    """Each sequence read alone under the same policy: a beam has its own pairs."""
    config = compressed(tiny.spec, *case)
    check_scores(tiny, config, search(tiny, config, length_penalty=0.0))


def check_scores(model, config, found):
    pairs = [
        (prompt, beam.tokens)
        for prompt, row in zip(prompts(), found, strict=True)
        for beam in row
    ]
    alone = likelihood.likelihoods(model, config, pairs, MEMORY)
    scores = [beam.score for row in found for beam in row]
    np.testing.assert_allclose(scores, [one.logprob for one in alone], atol=1e-4)
    assert not all(one.greedy for one in alone)
    for row in found:
        assert len({tuple(beam.tokens) for beam in row}) == len(row)
        assert row == sorted(row, key=lambda beam: -beam.score)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a CPU's program")
def test_the_vocabulary_is_not_sorted():
    """XLA's sort of 4 x 49,152 tokens takes 140 ms a step, its top_k takes 1 ms."""
    begun = beam_steps.start(jnp.ones((2,), bool), 4, 8)
    one = jnp.ones((2,), jnp.int32)
    options = beam_steps.SearchOptions(one, one[:, None], jnp.ones((2,)))
    logits = jnp.zeros((2, 4, 1000))
    extend = jax.jit(beam_steps.extend).lower(begun, logits, jnp.int32(1), options)
    sorts = [
        line for line in extend.compile().as_text().splitlines() if "sort(" in line
    ]
    assert sorts and not any("4000" in line for line in sorts)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_parents_stay_in_their_rows(width):
    """So that copies can be made one after the other."""
    drawn = np.random.default_rng(width).integers(0, width, (40, width))
    order, parents = map(np.asarray, beam_steps._in_place(jnp.asarray(drawn)))
    rows = np.arange(width)
    assert (np.sort(order, axis=1) == rows).all()
    np.testing.assert_array_equal(np.take_along_axis(drawn, order, axis=1), parents)
    np.testing.assert_array_equal(np.take_along_axis(parents, parents, axis=1), parents)


def test_copies_keep_the_error_bits_of_every_row(tiny):
    spec = tiny.spec
    state = cache.init(spec, make_spec(spec, None, None), 6, (4, 4))
    numbers = jnp.arange(6, dtype=jnp.int32)
    errors = jnp.tile(jnp.uint32([[0], [1], [2], [0], [0], [2]]), (1, 2))
    parents = jnp.int32([[0, 0, 2], [1, 1, 1]])
    state = state.replace(next_pos=numbers, error=errors)
    moved = jax.jit(beam_steps._copied)(state, parents)
    np.testing.assert_array_equal(moved.next_pos, [0, 0, 2, 4, 4, 4])
    np.testing.assert_array_equal(moved.error[:, 0], [0, 1, 2, 0, 0, 2])


def test_options_are_data(tiny):
    """Prompts with other lengths, penalties and end tokens share one program."""
    config = compressed(tiny.spec, *CASES[4])
    job = jobs.job_of(tiny, config, jobs.bucket(tiny.spec, config, 63, NEW), NEW)
    job, programs = beams._planned(job, 2, MEMORY, 2)
    run = functools.partial(beams._searched, tiny.params, job, programs, prompts()[:2])
    usual = beams._options(job, 1.0)
    (first, second), eos = run(usual), np.int32([[-1], [-1]])
    eos[1] = second[0].tokens[3]
    other = beam_steps.SearchOptions(np.int32([5, NEW]), eos, np.float32([0, 2]))
    with compilations() as made:
        mixed = run(other)
        alone = [
            run(jax.tree.map(lambda leaf, row=row: np.repeat(leaf[[row]], 2, 0), other))
            for row in range(2)
        ]
    assert not made
    assert mixed == [alone[0][0], alone[1][1]]
    assert {len(beam.tokens) for beam in mixed[0]} == {5}
    assert mixed[1] != second and mixed[0] != first


@pytest.mark.e2e
def test_batches_of_any_size(tiny):
    """Prompts that fit only two at a time find what they find together."""
    config = compressed(tiny.spec, *CASES[0])
    together = search(tiny, config)
    job = jobs.job_of(tiny, config, jobs.bucket(tiny.spec, config, 63, NEW), NEW)
    two = dataclasses.replace(job, batch=2)
    limit = beams._programs(two, 3).peak_bytes
    assert beams._planned(job, 3, limit, 4)[0] == two
    apart = search(tiny, config, memory_bytes=limit)
    for mine, theirs in zip(apart, together, strict=True):
        pairs = [(beam.tokens, beam.score) for beam in theirs]
        same_sequences([mine], [pairs], rtol=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change",
    [
        {"eviction": "compact"},
        {"layout": pooled.POOLED},
        {"rope_positions": "cache"},
        {"offload": offload.Offload(top_n=8)},
        {"budget": ((16, 32), (24, 24))},
        {"codec": toys.OF_8_CHANNELS["k8v4_but_ends"]},
        {
            "codec": codecs.after_prompt(codecs.kivi(2, 8, 8)),
            "schedule": Schedule("after_prefill", prefill_chunk=BLOCK),
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_scores_in_other_states(tiny, change):
    """Layouts, codecs and head groups of all kinds move with their beams."""
    schedule = Schedule("prefill_and_decode", prefill_chunk=BLOCK, evict_size=BLOCK)
    fields = {"policy": "key_diff", "budget": BUDGET, "schedule": schedule} | change
    config = make_spec(tiny.spec, **fields)
    check_scores(tiny, config, search(tiny, config, length_penalty=0.0))


def test_bytes_grow_with_the_beams(tiny):
    """A row of KV pairs for every beam; the programs take no less than the shapes."""
    config = compressed(tiny.spec, *CASES[4])
    job = jobs.job_of(tiny, config, jobs.bucket(tiny.spec, config, 63, NEW), NEW)
    job = dataclasses.replace(job, batch=2)
    found = [beams.beam_bytes(job, num_beams) for num_beams in (4, 5, 6)]
    row = footprint.state_bytes(dataclasses.replace(job, batch=1))["decode"]
    assert np.diff(found).tolist() == [2 * row] * 2
    assert beams.beam_bytes(job, 2) <= beams._programs(job, 2).peak_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 4}, "num_samples 4 is more than num_beams 3"),
        ({"num_beams": 0}, "num_beams 0: must be at least 1"),
        ({"num_beams": 50, "eos": (1,)}, "tiny has 49 tokens to begin a beam with"),
        ({"length_penalty": 11}, "length_penalty 11.0: must be at most 10"),
        ({"max_new_tokens": 250}, "exceed the context"),
        ({"memory_bytes": 10**4}, "too small for the 3 beams of one prompt of tiny"),
    ],
)
def test_refuses(tiny, change, message):
    config = compressed(tiny.spec, *CASES[4])
    with pytest.raises(UserError, match=message):
        search(tiny, config, **({"num_samples": 1, "num_beams": 3} | change))


def test_refuses_prompts_and_models_it_cannot_search(tiny):
    config = compressed(tiny.spec, *CASES[4])
    find = functools.partial(beams.beam_search, num_beams=2, max_new_tokens=4)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        find(tiny, config, [[1], []])
    with pytest.raises(UserError, match="prompt 0 holds token 50"):
        find(tiny, config, [[50]])
    measuring = make_spec(
        tiny.spec, "key_diff", 24, "after_prefill", budget_rule="squeeze"
    )
    with pytest.raises(UserError, match="budget rule 'squeeze' measures prompts"):
        find(tiny, measuring, [[1]])
    over = meshes.mesh("data:8,model:1", tiny.spec.num_kv_heads)
    split = tiny._replace(params=placement.split(tiny.spec, tiny.params, over))
    with pytest.raises(UserError, match="load the model without a mesh"):
        find(split, config, [[1]])
