"""How likely texts are, as the lm-evaluation-harness asks, by a tiny model."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from testing import asking
from testing.asking import (
    CASES,
    COMPRESSED,
    Request,
    answering,
    ids,
    make_tokenizer,
    needs_harness,
    requests,
    words,
)
from testing.engine import score_tokens

from kvjax import cache
from kvjax.cache import codecs
from kvjax.cache.spec import make_spec
from kvjax.engine import likelihood, runner
from kvjax.engine.steps import compact, prefill
from kvjax.models import decoder
from kvjax.types import UserError

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model():
    return asking.tiny()


def pairs_of_texts():
    """Contexts of 1 to 90 words; some share one, some continuations are one word."""
    texts = [(words(n, n), " " + words(-n % 7, 1 + n % 4)) for n in (1, 7, 24, 40, 90)]
    texts += [(words(40, 40), f" w{i}") for i in range(3)]
    return [*texts, ("", words(3, 5)), (words(5, 30), " " + words(6, 20))]


def full_forward(model, tokens):
    """Log-probabilities f64[T, V] after every token, by attention without a cache."""

    def attend(layer, q, k, v, ops, nothing):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
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


def same(found, expected):
    np.testing.assert_allclose(
        [logprob for logprob, _ in found], [e[0] for e in expected], rtol=0, atol=2e-4
    )
    assert [greedy for _, greedy in found] == [bool(e[1]) for e in expected]


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
    lm = answering(model, "streaming", "prefill_and_decode")
    contexts = [words(n, n) for n in (30, 60, 90)]
    asked = [Request((text, {"max_gen_toks": 6, "until": []})) for text in contexts]
    written = lm.generate_until(asked, disable_tqdm=True)
    assert all(len(text.split()) == 6 for text in written)  # no special token
    other = [
        " ".join([*head, "w1" if last == "w0" else "w0"])
        for *head, last in map(str.split, written)
    ]
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
        expected.append(
            judged(log_softmax(by_hand(model, lm.config, head, tail)), tail)
        )
    found = lm.loglikelihood(requests(texts), disable_tqdm=True)
    same(found, expected)
    full = answering(model).loglikelihood(requests(texts), disable_tqdm=True)
    differ = np.abs(np.asarray(found)[:, 0] - np.asarray(full)[:, 0]) > 1e-3
    assert any(differ) and not all(differ)  # short contexts lose nothing


def test_newest_pairs_stay_exact_as_in_decoding(model):
    """Of tokens fed together the first would see the newest of before encoded."""
    codec = codecs.pair(codecs.int2(8), codecs.int2(8), residual_length=8)
    config = make_spec(model.spec, None, None, codec=codec)
    head, tail = (ids(model, words(n, n)) for n in (12, 21))
    expected = judged(log_softmax(by_hand(model, config, head, tail)), tail)
    same(likelihood.likelihoods(model, config, [(head, tail)], 10**8), [expected])


def by_hand(model, config, head, tail):
    spec, params = model.spec, model.params
    size = -(-len(head) // 8) * 8
    tokens = jnp.asarray([head + [0] * (size - len(head))], jnp.int32)
    state = cache.init(spec, config, 1, config.prefill_capacity(spec, size, 32))
    length = jnp.asarray([len(head)], jnp.int32)
    state, first = prefill(params, state, tokens, length, spec=spec, config=config)
    if config.schedule.compacts:
        capacity = config.decode_capacity(spec, size, 32)
        state = compact(state, spec=spec, config=config, capacity=capacity)
    given = jnp.asarray([tail[:-1]], jnp.int32)
    _, rest = score_tokens(params, state, given, spec=spec, config=config)
    return np.concatenate([first, np.asarray(rest)[:, 0]])


def test_memory_decides_the_batch_and_not_the_answer(model, monkeypatch):
    sizes = []
    real = runner.Whole.prefill

    def prefill(self, prompts):
        sizes.append((len(prompts), self.job.batch))
        return real(self, prompts)

    monkeypatch.setattr(runner.Whole, "prefill", prefill)
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


def merging(model):
    """The model with a tokenizer that has "Answer" for "Ans" and "wer" together."""
    merges = [("A", "n"), ("An", "s"), ("w", "e"), ("we", "r"), ("Ans", "wer")]
    words = ["</s>", *"Answer: CD", *("".join(pair) for pair in merges)]
    vocab = {word: index for index, word in enumerate(words)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    return model._replace(tokenizer=fast)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("Ans", "wer"),  # one token spans both
        ("C: Ans", "wer"),
        ("Ans", ""),
        ("Ans", "z"),  # the tokenizer knows no z and leaves it out
        ("", ""),
        ("", "</s>"),  # the prefix token itself
    ],
)
def test_no_score_is_made_of_no_token(model, context, continuation):
    lm = answering(merging(model))
    asked = requests([("Ans", "CD"), (context, continuation)])
    told = f"continuation {continuation!r} of a context that ends in {context!r} has"
    with pytest.raises(UserError, match=re.escape(told)):
        lm.loglikelihood(asked, disable_tqdm=True)
    with pytest.raises(UserError, match="text 'zz' has no tokens to score"):
        lm.loglikelihood_rolling([Request(("zz",))], disable_tqdm=True)


def test_what_one_token_spans_is_the_context_s(model):
    lm = answering(merging(model))
    assert lm._encoded("Ans", "werD") == ([12], [10])
    assert lm._encoded("C: Ans ", "wer") == ([9, 7, 8, 12], [8, 14])


@needs_harness
@pytest.mark.parametrize("bos", [False, True])
def test_pairs_are_split_as_the_harness_splits_them(model, bos):
    from lm_eval.api.model import TemplateLM

    texts = [("w1 w2", " w3"), ("w1 ", "w2 w3"), ("w1 w2", "x w3"), ("<bos> w1", " w2")]
    lm = answering(model._replace(tokenizer=make_tokenizer(bos)))
    lm.backend = "causal"
    assert [lm._encoded(*pair) for pair in texts] == [
        TemplateLM._encode_pair(lm, *pair) for pair in texts
    ]


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
    config = make_spec(model.spec, None, None)
    ask = functools.partial(likelihood.likelihoods, model, config, memory_bytes=10**8)
    with pytest.raises(UserError, match="context 1 is empty"):
        ask([((1,), (2,)), ((), (2,))])
    with pytest.raises(UserError, match=r"context 0 holds token 50: .* 0 to 49"):
        ask([((1, 50), (2,))])
    with pytest.raises(UserError, match="continuation 0 is empty: it needs at least"):
        ask([((1,), ()), ((1,), (2,))])
    with pytest.raises(UserError, match="continuation 1 holds token -1: ids"):
        ask([((1,), (2,)), ((1,), (-1,))])
    with pytest.raises(UserError, match="256 tokens and one"):
        ask([((1,) * 250, (2,) * 8)])
    assert len(ask([((1,) * 250, (2,) * 7)])) == 1
    with pytest.raises(UserError, match="too small for one row"):
        likelihood.likelihoods(model, config, [((1,), (2,))], 1000)


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


def test_rolling_reads_bos_twice(model):
    """As the harness's own model: the prefix token, then what the tokenizer adds."""
    with_bos = model._replace(tokenizer=make_tokenizer(bos=True))
    text = words(8, 9)
    asked = [Request((text,)), Request(("",))]
    found = answering(with_bos).loglikelihood_rolling(asked, disable_tqdm=True)
    whole = [1, 1, *ids(model, text)]
    twice = judged(full_forward(model, whole)[:-1], whole[1:])[0]
    once = judged(full_forward(model, whole[1:])[:-1], whole[2:])[0]
    assert found[0] == pytest.approx(twice, abs=1e-3)
    assert abs(twice - once) > 1
    assert found[1] == pytest.approx(judged(full_forward(model, [1]), [1])[0], abs=1e-3)
