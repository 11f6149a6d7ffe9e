"""Texts of completions: what new tokens add to those before them."""

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from kvjax import Sampling, generate
from kvjax.engine import stop_texts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "\u2581\u2581\u2581", "\u2581is", "\u2581Paris", "ing", ":", "0"]


def sentencepiece():
    """As Llama 2's: spaces are part of a token, other characters may be bytes."""
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *PIECES, *BYTES])}
    bpe = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return made(bpe, decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    return made(models.BPE(vocab, []), decoders.ByteLevel())


def words():
    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(40))]
    vocab = {word: index for index, word in enumerate(names)}
    return made(models.WordLevel(vocab, unk_token="<unk>"), None)


def made(model, decoder):
    core = tokenizers.Tokenizer(model)
    if decoder:
        core.decoder = decoder
    core.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encoded(tokenizer, text):
    """Bytes of a character where there is no token for it."""
    vocab, found = tokenizer.get_vocab(), []
    for word in text:
        known = [word] if word in vocab else [f"<0x{b:02X}>" for b in word.encode()]
        found += [vocab[piece] for piece in known]
    return found


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
                after = stop_texts.text_after(tokenizer, prompt, new, **how)
                assert before + after == whole, (prompt, new)


def test_a_first_space_is_text():
    tokenizer = sentencepiece()
    code = encoded(tokenizer, ["\u2581is", ":"])
    new = encoded(tokenizer, ["\u2581\u2581\u2581", "\u2581Paris"])
    assert tokenizer.decode(new) == "   Paris"  # one is lost
    assert stop_texts.text_after(tokenizer, code, new) == "    Paris"
    silent = [*code, *[1] * 40]  # nothing of the last tokens shows
    cut = stop_texts.completed(tokenizer, (), silent, new)[0]
    assert cut == "    Paris"
    assert stop_texts.text_after(tokenizer, [], new[1:]) == "Paris"


def test_a_stop_text_may_begin_with_the_first_space():
    tokenizer = sentencepiece()
    prompt, new = encoded(tokenizer, ["\u2581is"]), encoded(tokenizer, ["\u2581Paris"])
    assert stop_texts.stops(tokenizer, (" Par",), prompt, new)
    assert not stop_texts.stops(tokenizer, (" Par",), prompt, new[:0])
    assert stop_texts.completed(tokenizer, (" Par",), prompt, new)[0] == ""


@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_a_character_is_the_text_of_whoever_ends_it(make):
    tokenizer, smile = make(), "\U0001f600"
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [made for made, _ in of_bytes.pre_tokenize_str(smile * 30)]
    words = list(split[0]) if make is byte_level else [smile] * 30
    tokens = encoded(tokenizer, words)
    assert len(tokens) == 120
    for cut in (0, 4, 15, 16, 17, 98, 118, 120):
        text = stop_texts.text_after(tokenizer, tokens[:cut], tokens[cut:])
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
