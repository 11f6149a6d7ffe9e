"""Texts of completions: what new tokens add to those before them."""

import numpy as np
import pytest
from testing.small_tokenizers import (
    PIECES,
    byte_level,
    byte_tokens,
    encoded,
    sentencepiece,
    words,
)

from kvjax import Sampling, generate
from kvjax.engine import stop_texts
from kvjax.engine.text_stream import text_after


@pytest.mark.parametrize("make", [sentencepiece, byte_level, words])
def test_prompt_and_text_are_the_text_of_all_tokens(make):
    """Of prompts of any length, that end in BOS, spaces or nothing that shows."""
    tokenizer, rng = make(), np.random.default_rng(0)
    usual = range(3, min(len(tokenizer), 3 + len(PIECES) + 128))  # whole characters
    for _ in range(200):
        tokens = rng.choice(usual, rng.integers(1, 60)).tolist()
        cut = int(rng.integers(len(tokens) + 1))
        prompt, new = [1, *tokens[:cut], *[1] * rng.integers(3)], tokens[cut:]
        for skip in (True, False):
            how = {"skip_special_tokens": skip}
            before = tokenizer.decode(prompt, **how)
            whole = tokenizer.decode(prompt + new, **how)
            if whole.startswith(before):
                after = text_after(tokenizer, prompt, new, **how)
                assert before + after == whole, (prompt, new)


def test_a_first_space_is_text():
    tokenizer = sentencepiece()
    code = encoded(tokenizer, ["\u2581is", ":"])
    new = encoded(tokenizer, ["\u2581\u2581\u2581", "\u2581Paris"])
    assert tokenizer.decode(new) == "   Paris"  # one is lost
    assert text_after(tokenizer, code, new) == "    Paris"
    silent = [*code, *[1] * 40]  # nothing of the last tokens shows
    cut = stop_texts.completed(tokenizer, (), silent, new)[0]
    assert cut == "    Paris"
    assert text_after(tokenizer, [], new[1:]) == "Paris"


def test_a_stop_text_may_begin_with_the_first_space():
    tokenizer = sentencepiece()
    prompt, new = encoded(tokenizer, ["\u2581is"]), encoded(tokenizer, ["\u2581Paris"])
    assert stop_texts.stops(tokenizer, (" Par",), prompt, new)
    assert not stop_texts.stops(tokenizer, (" Par",), prompt, new[:0])
    assert stop_texts.completed(tokenizer, (" Par",), prompt, new)[0] == ""


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_a_character_is_the_text_of_whoever_ends_it(make):
    tokenizer, smile = make(), "\U0001f600"
    tokens = byte_tokens(tokenizer, smile * 30)
    assert len(tokens) == 120
    for cut in (0, 4, 15, 16, 17, 98, 118, 120):
        text = text_after(tokenizer, tokens[:cut], tokens[cut:])
        assert text == smile * (30 - cut // 4), cut


def test_generate_ends_before_a_stop_text(tiny):
    """Its tokens end with the stop's last, and others go on to the most."""
    model = tiny._replace(tokenizer=words())
    prompts = [[5, 6, 7], [8, 9]]
    whole = generate(model, prompts, max_new_tokens=40, ignore_eos=True)
    stop = model.tokenizer.decode(whole[0].tokens[2])
    first = [model.tokenizer.decode(token) for token in whole[0].tokens].index(stop)
    sampling = Sampling(max_new_tokens=40, stop=stop, ignore_eos=True)
    cut, _ = generate(model, prompts, sampling)
    assert cut.tokens == whole[0].tokens[: first + 1]
    assert stop not in cut.text and whole[0].text.startswith(cut.text)
