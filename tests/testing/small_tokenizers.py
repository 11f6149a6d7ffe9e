"""Small tokenizers of each kind whose decoders differ."""

import functools

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "\u2581\u2581\u2581", "\u2581is", "\u2581Paris", "ing", ":", "0"]
SPECIAL = ["<unk>", "<s>", "</s>"]
_LEARNED = "\u4f60\u597d \U0001f600\U0001f601 e\u0301 abab caf\u00e9 the stop\n\nstop"


def sentencepiece():
    """As Llama 2's: spaces are part of a token, other characters may be bytes."""
    vocab = {w: i for i, w in enumerate([*SPECIAL, *PIECES, *BYTES])}
    bpe = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return made(bpe, decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


def byte_level():
    """As GPT-2's, where every token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {w: i for i, w in enumerate([*SPECIAL, *alphabet])}
    return made(models.BPE(vocab, []), decoders.ByteLevel())


def merged_bytes():
    """As GPT-2's, with tokens of several characters and of parts of one."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learn = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([_LEARNED] * 9, learn)
    return made(core.model, decoders.ByteLevel(), core.pre_tokenizer)


def words():
    """Whole words, between which the decoder puts spaces."""
    vocab = {w: i for i, w in enumerate([*SPECIAL, *(f"w{i}" for i in range(40))])}
    return made(models.WordLevel(vocab, unk_token="<unk>"), None)


def made(model, decoder, splitter=None):
    core = tokenizers.Tokenizer(model)
    if decoder:
        core.decoder = decoder
    if splitter:
        core.pre_tokenizer = splitter
    core.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encoded(tokenizer, pieces):
    """Returns a token for each piece, or those of its bytes where there is none."""
    vocab, found = tokenizer.get_vocab(), []
    for piece in pieces:
        known = [piece] if piece in vocab else [f"<0x{b:02X}>" for b in piece.encode()]
        found += [vocab[each] for each in known]
    return found


def byte_tokens(tokenizer, text):
    """Returns the tokens of the bytes of a text, or of bytes, one each."""
    vocab = tokenizer.get_vocab()
    names = BYTES if "<0x00>" in vocab else _byte_names()
    data = text.encode() if isinstance(text, str) else text
    return [vocab[names[byte]] for byte in data]


@functools.cache
def _byte_names():
    """Returns GPT-2's names of bytes: of printable ones themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return names
