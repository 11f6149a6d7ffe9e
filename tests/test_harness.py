"""The lm-evaluation-harness's requests, answered by a tiny model."""

import dataclasses
import functools
import importlib.util
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from conftest import tiny_model

from kvjax import (
    Schedule,
    cache,
    completions,
    compression,
    likelihood,
    policies,
    programs,
)
from kvjax.generate import compact, prefill, score_tokens
from kvjax.harness import Requests
from kvjax.models import decoder
from kvjax.sampling import Sampling
from kvjax.types import UserError

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is not installed")
SPECIAL = ["<unk>", "<bos>", "<eos>", "<stop>"]
WORDS = [f"w{i}" for i in range(46)]
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}<stop> {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}w9{% endif %}"
)
COMPRESSED = [
    ("streaming", "prefill+decode"),
    ("average_attention", "prefill+decode"),
    ("key_diff", "after_prefill"),
    ("average_attention", "decode"),
]
CASES = [(None, "full"), *COMPRESSED]


class Request(NamedTuple):
    """What the harness hands over, as far as a model looks at it."""

    args: tuple


def make_tokenizer(bos=False):
    """A token per word; words are `w0` to `w45`."""
    vocab = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<stop>"],
    )


@pytest.fixture(scope="module")
def model():
    return tiny_model()._replace(tokenizer=make_tokenizer())


def answering(model, policy=None, phases="prefill+decode", **changes):
    given = {"policy": policy, "memory_gb": 0.05}
    if policy and policy != "full":
        given |= {"schedule": phases, "budget": 24, "block": 8}
    return Requests(model, **(given | changes))


def words(seed, count):
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def pairs_of_texts():
    """Contexts of 1 to 90 words; some share one, some continuations are one word."""
    texts = [(words(n, n), " " + words(-n % 7, 1 + n % 4)) for n in (1, 7, 24, 40, 90)]
    texts += [(words(40, 40), f" w{i}") for i in range(3)]
    return [*texts, ("", words(3, 5)), (words(5, 30), " " + words(6, 20))]


def requests(texts):
    return [Request(pair) for pair in texts]


def full_forward(model, tokens):
    """Log-probabilities f64[T, V] after every token, by attention without a cache."""

    def attend(layer, q, k, v, ops, nothing):
        q, k = ops.rotate(q), ops.rotate(k)
        products = jnp.einsum("bkgtd,bksd->bkgts", q, k) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(products.shape[-2:], bool))
        weights = jax.nn.softmax(
            jnp.where(seen[None, None, None], products, -jnp.inf), axis=-1
        )
        return jnp.einsum("bkgts,bksd->bkgtd", weights, v), nothing

    given = jnp.asarray([tokens], jnp.int32)
    places = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden, _ = decoder.forward(model.params, model.spec, given, places, None, attend)
    return log_softmax(decoder.logits(model.params, hidden[0], model.spec))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def judged(logprobs, tokens):
    """The sum of the tokens' log-probabilities, and whether each was the likeliest."""
    chosen = logprobs[np.arange(len(tokens)), tokens]
    return chosen.sum(), bool((logprobs.argmax(-1) == tokens).all())


def ids(model, text):
    return model.tokenizer(text)["input_ids"]


def same(found, expected):
    np.testing.assert_allclose(
        [logprob for logprob, _ in found], [e[0] for e in expected], rtol=0, atol=2e-4
    )
    assert [greedy for _, greedy in found] == [bool(e[1]) for e in expected]


# --- log-likelihood -----------------------------------------------------------------


def test_full_cache_is_the_models_log_softmax(model):
    texts = pairs_of_texts()
    expected = []
    for context, continuation in texts:
        head, tail = ids(model, context) or [1], ids(model, continuation)
        expected.append(
            judged(full_forward(model, head + tail)[len(head) - 1 : -1], tail)
        )
    found = answering(model).loglikelihood(requests(texts), disable_tqdm=True)
    same(found, expected)


def test_greedy_is_what_greedy_decoding_writes(model):
    """Some continuations are made by the model itself: they, and no others, are."""
    lm = answering(model, "streaming", "prefill+decode")
    contexts = [words(n, n) for n in (5, 30, 60)]
    asked = [Request((text, {"max_gen_toks": 6, "until": []})) for text in contexts]
    written = lm.generate_until(asked, disable_tqdm=True)
    other = [" ".join([*text.split()[:-1], "w0"]) for text in written]
    assert all(a != b for a, b in zip(written, other, strict=True))
    texts = [
        (context, " " + tail)
        for context, *tails in zip(contexts, written, other, strict=True)
        for tail in tails
    ]
    found = lm.loglikelihood(requests(texts), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False] * 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_batched_is_single(model, case):
    asked = requests(pairs_of_texts())
    together = answering(model, *case).loglikelihood(asked, disable_tqdm=True)
    alone = answering(model, *case, max_batch_size=1)
    singly = [alone.loglikelihood([one], disable_tqdm=True)[0] for one in asked]
    np.testing.assert_allclose(
        [a[0] for a in together], [a[0] for a in singly], atol=2e-5, rtol=0
    )
    assert [a[1] for a in together] == [a[1] for a in singly]


@pytest.mark.parametrize("case", COMPRESSED, ids=lambda case: "-".join(case))
def test_compressed_is_feeding_by_hand(model, case):
    """Prompt, compaction, then token by token with `score_tokens`."""
    lm = answering(model, *case)
    texts = pairs_of_texts()
    expected = []
    for context, continuation in texts:
        head, tail = ids(model, context) or [1], ids(model, continuation)
        expected.append(judged(log_softmax(by_hand(model, lm.made, head, tail)), tail))
    found = lm.loglikelihood(requests(texts), disable_tqdm=True)
    same(found, expected)
    full = answering(model).loglikelihood(requests(texts), disable_tqdm=True)
    differ = np.abs(np.asarray(found)[:, 0] - np.asarray(full)[:, 0]) > 1e-3
    assert any(differ) and not all(differ)  # short contexts lose nothing


def by_hand(model, made, head, tail):
    spec, params = model.spec, model.params
    size = -(-len(head) // 8) * 8
    tokens = jnp.asarray([head + [0] * (size - len(head))], jnp.int32)
    state = cache.init(spec, made, 1, made.prefill_capacity(spec, size, 32))
    length = jnp.asarray([len(head)], jnp.int32)
    state, first = prefill(params, state, tokens, length, spec=spec, made=made)
    if made.schedule.compacts:
        capacity = made.decode_capacity(spec, size, 32)
        state = compact(state, spec=spec, made=made, capacity=capacity)
    given = jnp.asarray([tail[:-1]], jnp.int32)
    _, rest = score_tokens(params, state, given, spec=spec, made=made)
    return np.concatenate([first, np.asarray(rest)[:, 0]])


def test_memory_decides_the_batch_and_not_the_answer(model, monkeypatch):
    sizes = []
    real = completions.read

    def read(params, job, prompts):
        sizes.append((len(prompts), job.batch))
        return real(params, job, prompts)

    monkeypatch.setattr(completions, "read", read)
    texts = [(words(i, 20 + i), " " + words(i, 2)) for i in range(12)]
    asked = requests(texts)
    much = answering(model, memory_gb=0.05).loglikelihood(asked, disable_tqdm=True)
    assert sizes == [(12, 12)]
    del sizes[:]
    little = answering(model, memory_gb=0.0006)
    found = little.loglikelihood(asked, disable_tqdm=True)
    assert len(sizes) > 1 and sum(size for size, _ in sizes) == 12
    same(found, much)


def test_context_and_continuation_are_encoded_together(model):
    """As the harness has it: white space between them is the continuation's."""
    lm = answering(model)
    assert lm._encoded("w1 w2", " w3") == lm._encoded("w1 w2 ", "w3")
    assert lm._encoded("w1 w2", "x w3") == ([5, 6], [7])  # `w2x` is one unknown token
    assert lm._encoded("", "w3 w4") == ([1], [7, 8])
    assert lm._encoded("", "<bos> w4") == ([1], [8])
    assert lm._encoded("  ", "w4") == ([1], [8])
    with_bos = answering(model._replace(tokenizer=make_tokenizer(bos=True)))
    assert with_bos._encoded("w1", " w3") == ([1, 5], [7])
    assert with_bos._encoded("<bos> w1", " w3") == ([1, 5], [7])
    assert with_bos._encoded("", "w3") == ([1], [7])


def test_empty_continuation_is_certain(model):
    asked = requests([("w1 w2", ""), ("w1", " w2")])
    found = answering(model).loglikelihood(asked, disable_tqdm=True)
    assert found[0] == (0.0, True) and found[1][0] < 0


def test_long_contexts_lose_their_beginning_and_a_warning_counts_them(model):
    small = model._replace(spec=dataclasses.replace(model.spec, context_length=32))
    tail = " " + words(1, 3)
    texts = [(words(2, 50), tail), (words(3, 10), tail), (words(4, 30), tail)]
    with pytest.warns(UserWarning, match=r"1 of 3 contexts .* up to 20 tokens"):
        found = answering(small).loglikelihood(requests(texts), disable_tqdm=True)
    short = (" ".join(words(2, 50).split()[-30:]), tail)  # 33 tokens, 32 of them read
    expected = answering(model).loglikelihood(
        requests([short, *texts[1:]]), disable_tqdm=True
    )
    same(found, expected)
    with pytest.raises(UserError, match="continuation of 40 tokens"):
        answering(small).loglikelihood(requests([("w1", " " + words(1, 40))]))


def test_likelihoods_refuse_what_does_not_fit(model):
    made = compression.make(model.spec, None, None)
    ask = functools.partial(likelihood.likelihoods, model, made, memory_bytes=10**8)
    with pytest.raises(UserError, match="context 1 is empty"):
        ask([((1,), (2,)), ((), (2,))])
    with pytest.raises(UserError, match="256 tokens and one"):
        ask([((1,) * 250, (2,) * 8)])
    assert len(ask([((1,) * 250, (2,) * 7)])) == 1
    with pytest.raises(UserError, match="too small for one row"):
        likelihood.likelihoods(model, made, [((1,), (2,))], 1000)


# --- rolling ------------------------------------------------------------------------


def test_windows_of_the_harness_documentation():
    """The example that `LM.loglikelihood_rolling` gives: BOS, and a context of 4."""
    assert likelihood.windows(list(range(10)), -1, 4) == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert likelihood.windows([], -1, 4) == []
    assert likelihood.windows([5], -1, 4) == [([-1], [5])]


@needs_harness
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 23])
def test_windows_are_the_harness_own(count):
    from lm_eval import utils

    cut = utils.get_rolling_token_windows(list(range(count)), -1, 4, 1)
    expected = [utils.make_disjoint_window(pair) for pair in cut]
    assert likelihood.windows(list(range(count)), -1, 4) == expected


def test_rolling_adds_up_the_windows(model):
    small = model._replace(spec=dataclasses.replace(model.spec, context_length=32))
    texts = [words(8, 75), words(9, 20), ""]
    expected = []
    for text in texts:
        total = 0.0
        for head, tail in likelihood.windows(ids(model, text), 1, 32):
            total += judged(full_forward(model, head + tail)[len(head) - 1 : -1], tail)[
                0
            ]
        expected.append(total)
    asked = [Request((text,)) for text in texts]
    found = answering(small).loglikelihood_rolling(asked, disable_tqdm=True)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)
    assert found[2] == 0.0
    late = answering(small, "key_diff", "after_prefill")
    with pytest.warns(UserWarning, match="'after_prefill' compresses prompts"):
        late.loglikelihood_rolling(asked[1:], disable_tqdm=True)


# --- generation ---------------------------------------------------------------------


@pytest.mark.parametrize("how", [Sampling(), Sampling(0.9, 20, 0.8)], ids=repr)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_pauses_change_nothing(model, case, how):
    """Looked at every 5 tokens, rows write what they write in one go."""
    policy, phases = case
    schedule = Schedule(phases, 8, 8)
    made = compression.make(
        model.spec,
        policies.make(policy) if policy else None,
        24 if policy else None,
        schedule,
    )
    prompts = [ids(model, words(n, n)) for n in (3, 24, 61)]
    size = programs.bucket(model.spec, made, 61, 18)
    whole = programs.Job(model.spec, made, 4, size, 18, how=how, eos=(11, 17))
    paused = dataclasses.replace(whole, steps=5)
    at_once, by_fives = (
        completions.run_batch(model.params, job, prompts, range(3), seed=2)
        for job in (whole, paused)
    )
    assert by_fives.tokens == at_once.tokens
    assert max(map(len, at_once.tokens)) > 5
    for a, b in zip(at_once.state.layers, by_fives.state.layers, strict=True):
        np.testing.assert_array_equal(a.pos, b.pos)


def test_stopped_rows_end_at_the_next_look(model):
    made = compression.make(model.spec, None, None)
    prompts = [ids(model, words(n, n)) for n in (3, 24)]
    job = programs.Job(model.spec, made, 2, 128, 18, steps=5)
    whole = completions.run_batch(model.params, job, prompts, range(2))
    long = len(whole.tokens[1]) == 18 and whole.tokens[0][:5] != whole.tokens[1][:5]
    assert long, "choose other prompts"
    found = completions.run_batch(
        model.params,
        job,
        prompts,
        range(2),
        stop=lambda new: new[:5] == whole.tokens[0][:5],
    )
    assert found.tokens == [whole.tokens[0][:5], whole.tokens[1]]


def plain(model, context, new, case=(None, "full"), **how):
    """What the model writes if nothing stops it but its end token."""
    policy, phases = case
    schedule = Schedule(phases, 8, 8) if policy else None
    return completions.generate(
        model,
        [context],
        policy=policies.make(policy) if policy else None,
        budget=24,
        schedule=schedule,
        max_new_tokens=new,
        **how,
    )[0].text


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: "-".join(map(str, case)))
def test_generation_is_cut_at_its_stops(model, case):
    contexts = [words(n, n) for n in (12, 35, 71)]
    texts = [plain(model, context, 40, case) for context in contexts]
    stop = " ".join(texts[0].split()[9:11])  # of two tokens
    asked = [
        *(Request((c, {"until": [stop], "max_gen_toks": 40})) for c in contexts),
        Request((contexts[1], {"until": "nothing", "max_gen_toks": 3})),
        Request((contexts[2], {"max_new_tokens": 40})),
    ]
    found = answering(model, *case).generate_until(asked, disable_tqdm=True)
    assert found[:3] == [text.partition(stop)[0] for text in texts]
    assert len(found[0]) < len(texts[0])
    assert found[3] == " ".join(texts[1].split()[:3])
    assert found[4] == texts[2]


def test_special_tokens_stop_and_do_not_show():
    tokenizer = make_tokenizer()
    cut = functools.partial(completions.text_before, tokenizer)
    tokens = [5, 6, 3, 7, 2, 8]  # w1 w2 <stop> w3 <eos> w4
    assert cut(("<stop>",), tokens).split() == ["w1", "w2"]
    assert cut(("<eos>",), tokens).split() == ["w1", "w2", "w3"]
    assert cut(("w3", "<eos>"), tokens).split() == ["w1", "w2"]
    assert cut((), tokens).split() == ["w1", "w2", "w3", "w4"]
    assert cut(("w1",), tokens) == ""
    assert cut(("w1",), []) == ""


def test_sampling_follows_gen_kwargs(model):
    context = words(9, 9)
    warm = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "until": []}
    asked = [Request((context, warm))] * 3
    asked += [Request((context, warm | {"do_sample": False}))]
    lm = answering(model)
    found = lm.generate_until(asked, disable_tqdm=True)
    assert len(set(found)) == 4  # repeats of a request are samples of their own
    assert found[3] == plain(model, context, 12)
    assert found[0] == plain(model, context, 12, temperature=1.0)
    assert lm.generate_until(asked, disable_tqdm=True) == found
    assert answering(model, seed=1).generate_until(asked, disable_tqdm=True) != found
    with pytest.warns(UserWarning, match="gen_kwargs num_beams: not known"):
        lm.generate_until([Request((context, warm | {"num_beams": 4}))])


def test_long_prompts_leave_room_for_the_answer(model):
    small = model._replace(spec=dataclasses.replace(model.spec, context_length=32))
    given = {"max_gen_toks": 12, "until": []}
    with pytest.warns(UserWarning, match=r"1 of 1 contexts .* up to 10 tokens"):
        found = answering(small).generate_until(
            [Request((words(2, 30), given))], disable_tqdm=True
        )
    assert found == [plain(model, " ".join(words(2, 30).split()[-20:]), 12)]
    for new in (0, 32):
        with pytest.raises(UserError, match=f"max_gen_toks {new}"):
            answering(small).generate_until([Request(("w1", {"max_gen_toks": new}))])


def test_answers_are_handed_to_the_cache_hook(model):
    kept = []

    class Hook:
        def add_partial(self, *given):
            kept.append(given)

    lm = answering(model)
    lm.cache_hook = Hook()
    args = ("w1", {"max_gen_toks": 2, "until": []})
    text = lm.generate_until([Request(args)], disable_tqdm=True)[0]
    odds = lm.loglikelihood([Request(("w1", " w2"))], disable_tqdm=True)[0]
    total = lm.loglikelihood_rolling([Request(("w1 w2",))], disable_tqdm=True)[0]
    assert kept == [
        ("generate_until", args, text),
        ("loglikelihood", ("w1", " w2"), odds),
        ("loglikelihood_rolling", ("w1 w2",), total),
    ]


# --- chat templates and arguments ---------------------------------------------------


def with_template(model, template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return answering(model._replace(tokenizer=tokenizer))


def test_chat_template(model):
    lm = with_template(model, CHAT)
    said = [{"role": "user", "content": "w1"}]
    assert lm.chat_template(True) == CHAT and lm.chat_template(False) is None
    assert lm.apply_chat_template(said) == "<stop> w1 w9"
    answer = [*said, {"role": "assistant", "content": "w2"}]
    assert lm.apply_chat_template(answer, add_generation_prompt=False).endswith("w2")
    with pytest.warns(UserWarning, match="refuses a system message"):
        told = [{"role": "system", "content": "w5"}, *said]
        assert lm.apply_chat_template(told) == "<stop> w1 w9"
    with pytest.raises(UserError, match="has only one"):
        lm.chat_template("rag")
    with pytest.raises(UserError, match="has no chat template"):
        answering(model).chat_template(True)


def test_chat_template_by_name(model):
    lm = with_template(model, {"default": CHAT, "short": "{{ messages[0].content }}"})
    said = [{"role": "user", "content": "w1"}]
    assert lm.chat_template(True) == CHAT
    assert lm.apply_chat_template(said) == "<stop> w1 w9"
    lm.chat_template("short")
    assert lm.apply_chat_template(said) == "w1"
    with pytest.raises(UserError, match=r"'rag'.*default, short"):
        lm.chat_template("rag")


def test_arguments(model):
    lm = answering(model, "streaming", "decode", evict=4, **{"policy.sinks": 7})
    assert lm.made.policy is policies.streaming(sinks=7)
    assert lm.made.schedule == Schedule("decode", 8, 4)
    assert answering(model, "h2o", budget=[24, 32]).made.budget == (24, 32)
    assert lm.get_model_info()["kv_schedule"] == "decode, 8, 4"
    for size, most in (
        (1, None),
        ("auto", None),
        ("auto:4", None),
        ("8", 8),
        (None, None),
    ):
        assert answering(model, batch_size=size).most == most
    assert answering(model, batch_size=8, max_batch_size=3).most == 3
    assert answering(model, policy="full", device="cuda:0").made.policy is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "oldest"}, "'oldest'"),
        ({"sinks": 4}, "policy.sinks=..."),
        ({"policy.": 4}, "'policy.' is unknown"),
        ({"policy": "h2o", "policy.share": 4}, "share"),
        ({"policy": "h2o", "budget": None}, "needs a budget"),
        ({"budget": 24}, "full cache"),
        ({"policy": "h2o", "budget": 24, "schedule": "never"}, "never"),
        ({"memory_gb": -1}, "memory_gb -1"),
    ],
)
def test_wrong_arguments(model, changes, message):
    with pytest.raises(UserError, match=message):
        answering(model, **changes)


def test_model_without_tokenizer():
    with pytest.raises(UserError, match="tiny has no tokenizer"):
        answering(tiny_model())


def test_tokenizer_without_ends(model):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    lm = answering(model._replace(tokenizer=tokenizer))
    given = {"max_gen_toks": 3, "until": ["w3"]}
    assert lm._generation(given)[2] == ("w3",)
    tokenizer.bos_token = None
    with pytest.raises(UserError, match="neither BOS nor EOS"):
        answering(model._replace(tokenizer=tokenizer))


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_without_the_harness():
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.harness", "--model", "kvjax", "--tasks", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: lm_eval is not installed: pip install")


# --- the harness itself -------------------------------------------------------------


def made_up_data(**_):
    """Three questions with three choices each, and their texts."""
    import datasets

    rows = [
        {"text": words(i, 20 + i), "choices": ["w1", "w2 w3", "w4"], "answer": i}
        for i in range(3)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def task(kind, **fields):
    common = {
        "task": f"made_up_{kind}",
        "custom_dataset": made_up_data,
        "output_type": kind,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
    }
    return common | fields


@needs_harness
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: "-".join(map(str, case)))
def test_tasks_of_all_kinds_run(model, case):
    """One task of each kind of request; the metrics follow from our answers."""
    import lm_eval

    from kvjax.harness import model_class

    policy, phases = case
    given = {"schedule": phases, "budget": 24, "block": 8} if policy else {}
    lm = model_class()(model, policy=policy, memory_gb=0.05, **given)
    tasks = [
        task(
            "multiple_choice",
            doc_to_choice="choices",
            doc_to_target="answer",
            metric_list=[{"metric": "acc"}],
        ),
        task(
            "generate_until",
            generation_kwargs={"until": ["w3"], "max_gen_toks": 5},
            metric_list=[{"metric": "exact_match"}],
        ),
        task(
            "loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "word_perplexity"}],
        ),
    ]
    found = lm_eval.simple_evaluate(lm, tasks=tasks, bootstrap_iters=0)
    texts = [words(i, 20 + i) for i in range(3)]
    choices = [[(t, f" {c}") for c in ("w1", "w2 w3", "w4")] for t in texts]
    right = [
        np.argmax([a for a, _ in lm.loglikelihood(requests(c), True)]) == i
        for i, c in enumerate(choices)
    ]
    results = found["results"]
    assert results["made_up_multiple_choice"]["acc,none"] == np.mean(right)
    total = sum(lm.loglikelihood_rolling([Request((t,)) for t in texts], True))
    perplexity = np.exp(-total / sum(len(t.split()) for t in texts))
    rolled = results["made_up_loglikelihood_rolling"]["word_perplexity,none"]
    assert rolled == pytest.approx(perplexity, rel=1e-6)
    written = [s["resps"][0][0] for s in found["samples"]["made_up_generate_until"]]
    asked = [Request((t, {"until": ["w3"], "max_gen_toks": 5})) for t in texts]
    assert written == lm.generate_until(asked, True)
    assert found["config"]["kv_policy"] == policy


@needs_harness
def test_the_command_line_knows_kvjax():
    from lm_eval.api.registry import get_model

    from kvjax import harness

    harness.register()
    harness.register()
    assert get_model("kvjax") is harness.model_class()
