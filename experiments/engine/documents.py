"""Documents with several keys to find, and a question for each of them."""

import bisect
import re
from typing import Any, NamedTuple

import numpy as np

from kvjax.types import UserError

_TASK = (
    "There are several important numbers hidden inside a lot of irrelevant text. Find "
    "them and memorize them."
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_SPLIT = "SPLIT"  # stands for the question where the chat template is applied
NEEDLES = (  # statement, question, how the answer opens: the key comes next
    (
        "The secret passkey number is {key}. Remember this number: {key} is the secret "
        "passkey.",
        "What is the secret passkey number mentioned in the text?",
        "The secret passkey number is",
    ),
    (
        "Anna's telephone number is {key}. You reach Anna at {key}.",
        "What is Anna's telephone number?",
        "Anna's telephone number is",
    ),
    (
        "The code of the red door is {key}. Only {key} opens the red door.",
        "What is the code of the red door?",
        "The code of the red door is",
    ),
    (
        "The winning lottery ticket in Boston was number {key}. Ticket {key} won "
        "everything.",
        "Which lottery ticket won in Boston?",
        "The winning lottery ticket in Boston was number",
    ),
    (
        "The invoice from Miller has the number {key}. Miller wants invoice {key} "
        "paid.",
        "Which number has the invoice from Miller?",
        "The invoice from Miller has the number",
    ),
)


class Question(NamedTuple):
    """Token ids that follow the document, and the five digits to find."""

    tokens: list[int]
    key: str


class Document(NamedTuple):
    tokens: list[int]
    questions: list[Question]


def documents(
    tokenizer: Any, count: int, length: int, seed: int, haystack: str
) -> list[Document]:
    """Returns documents of nearly `length` tokens, with one key for each needle.

    The needles stand at even distances, in a random order. The document is the
    beginning of a user's message, and a question is its end, with the chat template's
    rest and the beginning of the answer.

    Args:
      tokenizer: its chat template is used if it has one.
      count: number of documents.
      length: most tokens of a document.
      seed: draws keys and orders.
      haystack: prose; the documents' texts start at even distances in it.

    Raises:
      UserError: `length` cannot hold the needles.
    """
    sentences = _SENTENCE.split(haystack)
    rng = np.random.default_rng(seed)
    starts = np.arange(count) * len(sentences) // count
    return [_document(tokenizer, np.roll(sentences, -at), length, rng) for at in starts]


def _document(tokenizer, sentences, length, rng) -> Document:
    keys = [
        str(key) for key in rng.choice(90_000, len(NEEDLES), replace=False) + 10_000
    ]
    order = rng.permutation(len(NEEDLES))
    facts = [NEEDLES[i][0].format(key=keys[i]) for i in order]
    head, tail = _frame(tokenizer)
    written = lambda count: head + _text(sentences[:count], facts) + "\n\n"
    too_long = lambda count: len(_encoded(tokenizer, written(count))) > length
    count = bisect.bisect_left(range(len(sentences)), True, key=too_long) - 1
    if count < 1:
        raise UserError(f"--document={length}: too short for {len(facts)} needles")
    questions = [
        Question(_encoded(tokenizer, question + tail + opening, first=False), key)
        for (_, question, opening), key in zip(NEEDLES, keys, strict=True)
    ]
    return Document(_encoded(tokenizer, written(count)), questions)


def _text(sentences, facts) -> str:
    """Returns the sentences with the facts between them."""
    places = [
        len(sentences) * (2 * i + 1) // (2 * len(facts)) for i in range(len(facts))
    ]
    inserted = np.insert(np.asarray(sentences, object), places, facts)
    return " ".join(inserted)


def _frame(tokenizer) -> tuple[str, str]:
    """Returns what stands before the text, and between question and answer."""
    message = f"{_TASK}\n\n{_SPLIT}"
    if getattr(tokenizer, "chat_template", None):
        message = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            tokenize=False,
            add_generation_prompt=True,
        )
    else:
        message += "\n"
    head, tail = message.split(_SPLIT)
    return head, tail


def _encoded(tokenizer, text, first=True) -> list[int]:
    """Returns token ids; a chat template has already added the special tokens."""
    bare = first and not getattr(tokenizer, "chat_template", None)
    return list(tokenizer(text, add_special_tokens=bare, verbose=False)["input_ids"])
