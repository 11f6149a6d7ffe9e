"""Text of tokens as they come: always the text of all of them at the end."""

import collections
import functools
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st
from testing import small_tokenizers
from testing.small_tokenizers import byte_tokens, encoded, sentencepiece

from kvjax.engine import stop_texts
from kvjax.engine.text_stream import TextStream

KINDS = ("sentencepiece", "byte_level", "merged_bytes", "words")
SMILE, NI = "\U0001f600", "\u4f60"
TEXTS = st.text("ab :\n0e\u00e9\u0301" + SMILE + NI, max_size=12)
BROKEN = "\ufffd"
QUICK = hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


@functools.cache
def made(kind):
    return getattr(small_tokenizers, kind)()


def added(tokenizer, prompt, tokens, skip):
    """The text that tokens add, by decoding everything at once."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=skip)
    whole = decode([*prompt, *tokens])
    for begun in range(4):  # tokens may complete a character of the prompt
        before = decode(prompt[: len(prompt) - begun])
        if whole.startswith(before):
            return whole[len(before) :]
    return decode(tokens)


def by_definition(tokenizer, prompt, tokens, stop):
    """The text before the first stop text, and the number of tokens up to it."""
    for count in range(1, len(tokens) + 1):
        both = [
            added(tokenizer, prompt, tokens[:count], skip) for skip in (False, True)
        ]
        if any(each in text.rstrip(BROKEN) for each in stop for text in both):
            break
    else:
        return added(tokenizer, prompt, tokens, True), len(tokens), False
    first = min((at for at in map(both[1].find, stop) if at >= 0), default=None)
    return both[1][:first], count, True


@st.composite
def completions(draw, tokenizer):
    """Draws a prompt, new tokens, stop texts and a way to split the tokens."""
    ids = st.integers(0, len(tokenizer) + 1)  # and ids beyond the vocabulary
    sources = [st.lists(ids, max_size=8)]
    if len(tokenizer) > 100:
        sources.append(st.builds(functools.partial(byte_tokens, tokenizer), TEXTS))
        usual = (
            st.sampled_from(range(3, 11)) if "<0x00>" in tokenizer.get_vocab() else ids
        )
        sources.append(st.lists(usual, max_size=8))
    parts = st.lists(st.one_of(sources), max_size=5)
    prompt, tokens = (list(itertools.chain(*draw(parts))) for _ in range(2))
    prompt = prompt[-15:]  # of more, `text_after` may read only the end
    text = added(tokenizer, prompt, tokens, draw(st.booleans()))
    stop = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop.append(text[start : start + draw(st.integers(1, 6))])
    stop += draw(st.lists(TEXTS.filter(bool), max_size=1))
    stop = tuple(each for each in stop if each and BROKEN not in each)
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens))))
    return prompt, tokens, stop, cuts


def split(tokens, cuts):
    edges = [0, *cuts, len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def check(tokenizer, prompt, tokens, stop, pushes):
    stream = TextStream(tokenizer, prompt, stop)
    pieces = [stream.push(some) for some in pushes]
    pieces.append(stream.finish())
    text, used, ended = by_definition(tokenizer, prompt, tokens, stop)
    assert "".join(pieces) == text
    assert (stream.tokens_used, stream.ended) == (used, ended)
    assert stream.push(tokens) == stream.finish() == "" or not ended
    assert stop_texts.completed(tokenizer, stop, prompt, tokens) == (
        text,
        tokens[:used],
    )


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@hypothesis.given(data=st.data())
def test_pieces_are_the_text_of_all_tokens(kind, data):
    """Of any tokens, also halves of characters, in any pushes and after any prompt."""
    tokenizer = made(kind)
    prompt, tokens, stop, cuts = data.draw(completions(tokenizer))
    check(tokenizer, prompt, tokens, stop, split(tokens, cuts))
    check(tokenizer, prompt, tokens, stop, [[token] for token in tokens])


def pieces_of(tokenizer, tokens, stop=(), prompt=(1,)):
    stream = TextStream(tokenizer, prompt, stop)
    return [*(stream.push([token]) for token in tokens), stream.finish()]


@pytest.mark.parametrize("kind", ["byte_level", "merged_bytes"])
def test_an_incomplete_character_waits(kind):
    """It may have begun in the prompt."""
    tokenizer = made(kind)
    begun, *rest = byte_tokens(tokenizer, SMILE)
    for prompt in ([begun], [begun, 1]):  # special tokens are not in the way
        assert pieces_of(tokenizer, rest, prompt=prompt) == ["", "", SMILE, ""]
    prompt, rest = [begun, 1, rest[0]], rest[1:]
    assert pieces_of(tokenizer, rest, prompt=prompt) == ["", SMILE, ""]
    assert pieces_of(tokenizer, [begun, *rest[:1]], [BROKEN])[-1] == BROKEN
    tokens = byte_tokens(tokenizer, f"a{SMILE}e\u0301")
    found = pieces_of(tokenizer, tokens)
    assert found == ["a", "", "", "", SMILE, "e", "", "\u0301", ""]
    assert pieces_of(tokenizer, tokens[:3])[-1] == BROKEN


def test_a_run_of_bytes_waits_for_its_end():
    """One byte that is not UTF-8 turns all characters of its run into U+FFFD."""
    tokenizer = sentencepiece()
    run, after = byte_tokens(tokenizer, NI + SMILE), encoded(tokenizer, ["ing"])
    found = pieces_of(tokenizer, run + after)
    assert found == [""] * 7 + [f"{NI}{SMILE}ing", ""]
    broken = [*run, *encoded(tokenizer, ["<0xFF>"]), *after]
    assert "".join(pieces_of(tokenizer, broken)) == BROKEN * 8 + "ing"
    stream = TextStream(tokenizer, [1], [SMILE])
    assert stream.push(broken) == NI, "a stop text is found at once"
    assert (stream.ended, stream.tokens_used) == (True, 7)


def test_the_beginning_of_a_stop_text_waits():
    tokenizer = made("byte_level")
    tokens = byte_tokens(tokenizer, "x\n\ny\n\n\nz")
    found = pieces_of(tokenizer, tokens, ["\n\n\n", "y!"])
    assert found == ["x", "", "", "\n\n", "y", "", "", "", ""]
    stream = TextStream(tokenizer, [1], ["\n\n\n", "y!"])
    assert stream.push(tokens) == "x\n\ny"
    assert (stream.ended, stream.tokens_used) == (True, 7)


def test_special_tokens_stop_and_are_not_text():
    tokenizer = made("byte_level")
    a, b = byte_tokens(tokenizer, "ab")
    stream = TextStream(tokenizer, [a], ["</s>"])
    assert stream.push([a, 1, b, 2, a]) == "ab"
    assert (stream.ended, stream.tokens_used) == (True, 4)
    stream = TextStream(tokenizer, [a], ["ab"])
    assert stream.push([b, a, 1, b, a]) == "b", "a stop text may go around one"
    assert (stream.ended, stream.tokens_used) == (True, 4)


class Counted:
    """A tokenizer that counts its decodes by the number of tokens."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sizes = collections.Counter()

    def decode(self, tokens, **options):
        self.sizes[len(tokens)] += 1
        return self.tokenizer.decode(tokens, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("byte_level", "the key is 12\n"),
        ("byte_level", SMILE),
        ("byte_level", b"\x80"),
        ("byte_level", b"\xff\xf0\x9f"),
        ("sentencepiece", NI),
        ("sentencepiece", b"\x80"),
        ("sentencepiece", ["\u2581is", "ing", "<0x0A>"]),
        ("words", ["w1", "w2"]),
    ],
    ids=repr,
)
def test_each_token_costs_a_few_decodes_of_a_few_tokens(kind, text):
    tokenizer = Counted(made(kind))
    encode = encoded if isinstance(text, list) else byte_tokens
    some, costs = encode(tokenizer, text), []
    for length in (200, 800):
        tokenizer.sizes.clear()
        stream = TextStream(tokenizer, [1] * 1000, ["never", "\n\n\n"])
        for at in range(length):
            stream.push([some[at % len(some)]])
        stream.finish()
        sizes = tokenizer.sizes
        costs.append((sizes.total(), sum(size * sizes[size] for size in sizes)))
    calls, tokens = (more - few for few, more in zip(*costs, strict=True))
    assert calls < 8 * 600 and tokens < 60 * 600


@pytest.mark.model
@pytest.mark.e2e
@QUICK
@hypothesis.given(data=st.data())
def test_pieces_of_smollm2_tokens(smollm2, data):
    tokenizer = smollm2.tokenizer
    text = st.text(max_size=30) | TEXTS
    prompt, text = (data.draw(text) for _ in range(2))
    prompt, tokens = (
        tokenizer(each, add_special_tokens=False)["input_ids"]
        for each in (prompt, text)
    )
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(tokens)))
        tokens.insert(at, tokenizer.eos_token_id)
    start = data.draw(st.integers(0, len(text)))
    stop = text[start : start + 3], "<|im_end|>\n"
    stop = tuple(each for each in stop if each and BROKEN not in each)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=9)))
    check(tokenizer, prompt, tokens, stop, split(tokens, cuts))
    if not prompt and tokenizer.eos_token_id not in tokens:
        assert "".join(pieces_of(tokenizer, tokens, prompt=[])) == text
