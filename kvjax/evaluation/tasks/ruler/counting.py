"""RULER's aggregation: the most common words (cwe) and the most frequent ones (fwe)."""

import functools
import itertools
import math
import string
from typing import NamedTuple

import numpy as np

from kvjax.evaluation.tasks.fit import Draft, Writer, stream
from kvjax.evaluation.tasks.ruler.words import every_word, pair

# The texts are those of scripts/data/synthetic/constants.py of NVIDIA/RULER.
COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than "
    "others. Memorize the ones that appear most often.\n"
    "{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PRIMER = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find "
    "the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PRIMER = (
    " Answer: According to the coded text above, the three most frequently appeared "
    "words are:"
)
_COMMON = 10
_FREQUENT = 3
_LETTERS = 6  # of a coded word
_NOISE = "..."  # the most frequent "word"; it is not an answer
_LEAST_WORDS = 75  # the fewest for which the third answer has no tie


class _Repeats(NamedTuple):
    common: int
    other: int


def common_words(length: int) -> Writer:
    """Returns the writer of cwe; its size is the number of different words.

    Ten words of each list occur more often than the others. A solved example begins the
    prompt. Lengths below 4,096 tokens have fewer repetitions.
    """
    if length < 4096:
        shot, repeats = (20, _Repeats(3, 1)), _Repeats(6, 1)
    else:
        shot, repeats = (40, _Repeats(10, 3)), _Repeats(30, 3)
    return Writer(functools.partial(_write_common, shot, repeats), _COMMON + 1)


def frequent_words(length: int, reserved: int) -> Writer:
    """Returns the writer of fwe; its size is the total number of coded words.

    The word of rank k occurs size / (zeta(2) k^2) times. Different words are as many as
    `length` tokens suggest, without those reserved for the answer.
    """
    different = max((length - reserved) // 50, _FREQUENT + 2)
    return Writer(functools.partial(_write_frequent, different), _LEAST_WORDS)


def _write_common(
    shot: tuple[int, _Repeats], repeats: _Repeats, seed: tuple[int, ...], size: int
) -> Draft:
    example, solution = _numbered(stream(seed, 0), stream(seed, 1), *shot)
    context, answers = _numbered(stream(seed, 2), stream(seed, 3), size, repeats)
    question = COMMON_TEMPLATE.format(context=example)
    solved = f"{question}{COMMON_PRIMER} {_enumerate(solution)}"
    prompt = f"{solved}\n{COMMON_TEMPLATE.format(context=context)}"
    return Draft(prompt, tuple(answers), COMMON_PRIMER)


def _numbered(
    words_rng: np.random.Generator,
    order_rng: np.random.Generator,
    size: int,
    repeats: _Repeats,
) -> tuple[str, list[str]]:
    """Returns a list of `size` different words in random order, and the common ones."""
    words = _sample(words_rng, size)
    common, other = words[:_COMMON], words[_COMMON:]
    listed = common * repeats.common + other * repeats.other
    return _enumerate(order_rng.permutation(listed).tolist()), common


def _enumerate(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def _sample(rng: np.random.Generator, size: int) -> list[str]:
    """Draws different words, or different pairs if there are too few words."""
    if size <= len(every_word()):
        return rng.permutation(every_word())[:size].tolist()
    pairs: dict[str, None] = {}
    while len(pairs) < size:
        pairs[pair(rng)] = None
    return list(pairs)


def _write_frequent(different: int, seed: tuple[int, ...], size: int) -> Draft:
    words = _coded_words(stream(seed, 0), different)
    counts = (int(size / (math.pi**2 / 6 * rank**2)) for rank in itertools.count(1))
    ranks = zip([_NOISE, *words[1:]], counts, strict=False)
    text = [word for word, count in ranks for _ in range(count)]
    context = " ".join(stream(seed, 1).permutation(text).tolist())
    prompt = FREQUENT_TEMPLATE.format(context=context)
    return Draft(prompt, tuple(words[1 : 1 + _FREQUENT]), FREQUENT_PRIMER)


def _coded_words(rng: np.random.Generator, different: int) -> list[str]:
    letters = np.array(list(string.ascii_lowercase))
    words: dict[str, None] = {}
    while len(words) < different:
        words["".join(rng.choice(letters, _LETTERS).tolist())] = None
    return list(words)
