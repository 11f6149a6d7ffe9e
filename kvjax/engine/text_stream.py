"""Decodes new tokens to text as they come, and finds stop texts in it."""

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_BROKEN = "\ufffd"  # decoders write it for an incomplete character
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's name of a token of one byte
_CHARACTER = 4  # bytes of the longest character in UTF-8
_CONTEXT = 16  # prompt tokens that new ones are decoded with, or more if needed


def text_after(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], **options: Any
) -> str:
    """Returns the text that tokens add to the prompt that they follow.

    Tokens are decoded together with the end of their prompt. Decoded alone, they would
    lose their first space: SentencePiece's decoders (Llama 2, Mistral, Phi-3) drop a
    space at the start of a text, and others put spaces only between tokens.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: token ids, of any number.
      tokens: the ids that follow.
      **options: of the tokenizer's `decode`.
    """
    decode = functools.partial(tokenizer.decode, **options)
    size = _CONTEXT
    before = decode(end := list(prompt[-size:]))
    # An end without text cannot keep the space, and one that starts inside a character
    # could break the next ones.
    while size < len(prompt) and (not before or before.startswith(_BROKEN)):
        size *= 2
        before = decode(end := list(prompt[-size:]))
    whole = decode(end + list(tokens))
    for begun in range(_CHARACTER):  # new tokens may complete a character of the prompt
        before = decode(end[: len(end) - begun]) if begun else before
        if whole.startswith(before):
            return whole[len(before) :]
    return decode(list(tokens))


def before_stop(text: str, stop: Iterable[str]) -> str:
    """Returns the text before the first stop text."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found, default=len(text))]


class TextStream:
    """The text of one completion, piece by piece.

    A piece never ends inside a character, and never contains text that later tokens
    could change or turn into a stop text. All pieces together are the text that the
    tokens add to their prompt, without special tokens, up to the first stop text.

    The first token that completes a stop text ends the completion. Stop texts are found
    in the text without special tokens, and in the text that shows them. In the second
    case the stop text's ordinary tokens stay in the completion's text.

    Tokens are decoded together with the few before them: n tokens take a number of
    decodes that is linear in n, each of a short list.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: the ids that the tokens follow.
      stop: texts that end the completion. One with U+FFFD, which stands for incomplete
        characters, ends nothing.

    Attributes:
      ended: whether a stop text was found; further tokens are ignored.
      tokens_used: how many tokens were pushed; after a stop text, those up to and
        including its last.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Iterable[str] = ()):
        self.ended = False
        self.tokens_used = 0
        self._stop = tuple(text for text in stop if _BROKEN not in text)
        # The completion's text; and, to find stop texts, the one with special tokens.
        hidden = (True, False) if self._stop else (True,)
        vocabularies = [_Vocabulary(tokenizer, each) for each in hidden]
        self._is_byte = vocabularies[0].is_byte
        self._texts = [_Text(each, prompt, prompt) for each in vocabularies]

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens make certain; it may be empty."""
        if self.ended:
            return ""
        for chunk in self._chunks(tokens):
            self._take(chunk)
            if self.ended:
                return self.finish()
        return self._piece()

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        shown = self._texts[0]
        self._texts[0] = shown.emptied()
        return before_stop(shown.whole(), self._stop)

    def _chunks(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yields single byte tokens, and the runs of other tokens between them.

        A byte may undo the text of those before it. Within a run of other tokens, a
        stop text that the first n complete is still there after n + 1.
        """
        for is_byte, run in itertools.groupby(tokens, self._is_byte):
            chunk = list(run)
            yield from ([token] for token in chunk) if is_byte else [chunk]

    def _take(self, tokens: Sequence[int]) -> None:
        """Adds tokens, up to the first that completes a stop text."""
        texts = self._extended(tokens)
        if self._stops(texts):
            self.ended = True
            counts = range(1, len(tokens))
            stops = lambda count: self._stops(self._extended(tokens[:count]))
            tokens = tokens[: 1 + bisect.bisect_left(counts, True, key=stops)]
            texts = self._extended(tokens)
        self.tokens_used += len(tokens)
        shown, *searched = texts
        self._texts = [shown, *(each.cut(self._certain(each)) for each in searched)]

    def _extended(self, tokens: Sequence[int]) -> list["_Text"]:
        return [text.extended(tokens) for text in self._texts]

    def _stops(self, texts: Iterable["_Text"]) -> bool:
        return any(stop in text.so_far for text in texts for stop in self._stop)

    def _piece(self) -> str:
        """Takes the text that no later token changes or makes part of a stop text."""
        shown, certain = self._texts[0], self._certain(self._texts[0])
        self._texts[0] = shown.cut(certain)
        return shown.settled[:certain]

    def _certain(self, text: "_Text") -> int:
        """Returns the number of settled characters that are in no stop text to come."""
        settled = text.settled
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(settled) - longest + 1), len(settled))
        begins = lambda at: any(stop.startswith(settled[at:]) for stop in self._stop)
        return next(filter(begins, starts), len(settled))


class _Vocabulary:
    """What `_Text` asks a tokenizer.

    Args:
      tokenizer: a transformers tokenizer.
      hides_special: whether texts are without special tokens.
    """

    def __init__(self, tokenizer: Any, hides_special: bool):
        hide = {"skip_special_tokens": hides_special}
        self.decode = functools.partial(text_after, tokenizer, **hide)
        self._name = tokenizer.convert_ids_to_tokens
        added = tokenizer.added_tokens_decoder if hides_special else {}
        self._hidden = {token for token, each in added.items() if each.special}

    def with_text(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that are not hidden, and not beyond the vocabulary."""
        is_known = lambda token: self._name(token) is not None
        return tuple(t for t in tokens if t not in self._hidden and is_known(t))

    def is_byte(self, token: int) -> bool:
        return bool(_BYTE.fullmatch(self._name(token) or ""))


@dataclasses.dataclass(frozen=True)
class _Text:
    """The text of tokens so far, decoded in short windows.

    A byte-level token (GPT-2) may end inside a character, whose text settles with the
    token that completes it. SentencePiece's decoders read a run of byte tokens as one:
    a single byte that is not UTF-8 turns all its characters into U+FFFD, so that none
    is settled before the run's end. Complete characters of such a run are expected to
    stay, and later bytes are decoded with the last of them alone.

    Attributes:
      vocabulary: of the tokenizer.
      context: tokens whose text is settled.
      near: tokens that `last` is decoded with.
      settled: their text that was not cut off.
      open: the text of `pending`, which later tokens may change.
      pending: tokens after `context`.
      run: the text of `pending` before `last`.
      last: the end of `pending`.
    """

    vocabulary: _Vocabulary
    context: Sequence[int]
    near: Sequence[int]
    settled: str = ""
    open: str = ""
    pending: tuple[int, ...] = ()
    run: str = ""
    last: tuple[int, ...] = ()

    @property
    def so_far(self) -> str:
        return self.settled + self.open

    def whole(self) -> str:
        """Returns the text if no token follows."""
        return self.settled + self.vocabulary.decode(self.context, self.pending)

    def cut(self, count: int) -> "_Text":
        """Drops the first settled characters."""
        return dataclasses.replace(self, settled=self.settled[count:])

    def emptied(self) -> "_Text":
        return self.cut(len(self.settled))._settle("", len(self.pending))

    def extended(self, tokens: Sequence[int]) -> "_Text":
        """Adds one byte token, or several others."""
        tokens = self.vocabulary.with_text(tokens)
        if not tokens:
            return self
        new = dataclasses.replace(
            self, pending=self.pending + tokens, last=self.last + tokens
        )
        in_bytes = self.vocabulary.is_byte(tokens[-1])
        if in_bytes and new._is_broken():
            return new
        text = self.vocabulary.decode(new.near, new.last)
        if not text or text.endswith(_BROKEN):  # inside a character, maybe the prompt's
            return new._wait(text, in_bytes)
        if in_bytes:
            return new._expect(text)
        if self.run and _BROKEN in text:  # the run was broken
            text = self.vocabulary.decode(new.context, new.pending)
        else:
            text = self.run + text
        return new._settle(text, len(new.pending))

    def _is_broken(self) -> bool:
        """Returns whether the run of bytes cannot be UTF-8 any more."""
        last = self.last
        return len(last) > _CHARACTER + 1 and all(map(self.vocabulary.is_byte, last))

    def _expect(self, text: str) -> "_Text":
        """Ends `run` with a complete character."""
        size, text = len(text[-1].encode()), self.run + text
        near = (*self.near[-_CHARACTER:], *self.last)[-size:]
        return dataclasses.replace(self, run=text, open=text, near=near, last=())

    def _wait(self, text: str, in_bytes: bool) -> "_Text":
        """Keeps tokens pending, unless they are many."""
        new = dataclasses.replace(self, open=self.run + text)
        count = len(self.last) - _CHARACTER
        if in_bytes or self.run or count < _CHARACTER:
            return new
        # What the last four tokens have left as it was cannot change any more.
        head = self.vocabulary.decode(self.context, self.pending[:count])
        if not text.startswith(head):
            return new
        return dataclasses.replace(new._settle(head, count), open=text[len(head) :])

    def _settle(self, text: str, count: int) -> "_Text":
        """Settles the text of the first pending tokens."""
        context, rest = self.pending[:count], self.pending[count:]
        if not text:  # tokens without text do not keep the next one's first space
            context = (*self.context, *context)
        settled = self.settled + text
        return _Text(
            self.vocabulary, context, context, settled, pending=rest, last=rest
        )
