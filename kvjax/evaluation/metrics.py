"""Grades of generated text against references, each 0 (wrong) to 1 (right).

Where there are several references, the best counts, unless a metric says otherwise.
"""

import collections
import decimal
import difflib
import functools
import re
import string
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MARKED_NUMBER = re.compile(rf"####\s*({_NUMBER.pattern})")
_OPTION = re.compile(r"\(([A-Z])\)")


# --- overlap with a reference -------------------------------------------------------


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures `rouge1`, `rouge2` and `rougeL`, words stemmed (Lin 2004).

    By the package `rouge-score`, with the Porter stemmer as in HELM (Liang et al. 2022)
    and the papers that follow it. `rougeL` takes the text as one sequence of words.
    """
    scores = _rouge_scorer().score_multi(references, text)
    return {name: float(score.fmeasure) for name, score in scores.items()}


def longbench_rouge_l(text: str, references: Sequence[str]) -> float:
    """ROUGE-L's F-measure as LongBench has it: by the package `rouge`, not stemmed.

    That package splits at white space and full stops and scores sentence by sentence,
    so its values are not those of `rouge`. No text scores 0.
    """
    from rouge import Rouge

    def score(reference: str) -> float:
        try:
            return Rouge(["rouge-l"]).get_scores(text, reference)[0]["rouge-l"]["f"]
        except (ValueError, RecursionError):  # no words, or a sentence of thousands
            return 0.0

    return max(map(score, references))


def normal_squad(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD, LongBench)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def normal_trivia(text: str) -> str:
    """As `normal_squad`, but punctuation, curly quotes too, is a space (TriviaQA)."""
    signs = string.punctuation + "\u2018\u2019\u00b4"  # all single quotes
    bare = "".join(" " if c in signs else c for c in text.lower())
    return " ".join(_ARTICLES.sub(" ", bare).split())


def token_f1(
    text: str,
    references: Sequence[str],
    normal: Callable[[str], str] = normal_squad,
) -> float:
    """F1 of the words shared with a reference (Rajpurkar et al. 2016, section 6.1)."""

    def score(reference: str) -> float:
        ours, theirs = normal(text).split(), normal(reference).split()
        counts = collections.Counter(ours) & collections.Counter(theirs)
        return 2 * counts.total() / max(len(ours) + len(theirs), 1)

    return max(map(score, references))


def exact_match(
    text: str,
    references: Sequence[str],
    normal: Callable[[str], str] = normal_squad,
) -> float:
    """1 if the text is a reference, both normalised."""
    return float(normal(text) in map(normal, references))


# --- answers at the end of a chain of thought ---------------------------------------


def final_number(text: str) -> decimal.Decimal | None:
    """The number after the first `####`, else the last number, else None.

    Commas and dollar signs in a number and a full stop after it are no part of it.
    """
    found = _MARKED_NUMBER.findall(text)[:1] or _NUMBER.findall(text)[-1:]
    return decimal.Decimal(re.sub(r"[$,]", "", found[0])) if found else None


def number_match(text: str, references: Sequence[str]) -> float:
    """1 if the final number equals a reference's (GSM8K, Cobbe et al. 2021)."""
    number = final_number(text)
    return float(number is not None and number in map(final_number, references))


def stated_answer(text: str) -> str | None:
    """What follows the last "answer is" on its line, without a closing full stop."""
    _, stated, answer = text.rpartition("answer is ")
    line = answer.strip().partition("\n")[0]
    return line.strip().removesuffix(".") if stated else None


def answer_match(text: str, references: Sequence[str]) -> float:
    """1 if the stated answer is a reference to the letter (BBH, Suzgun et al. 2022).

    Where the reference is an option such as "(B)", its letter or the first option named
    in the answer counts. A text that states nothing has to be a reference itself.
    """
    answer = stated_answer(text)
    if answer is None:
        return float(text.strip() in references)
    named = _OPTION.search(answer)
    letter = named[1] if named else answer

    def score(reference: str) -> float:
        option = _OPTION.fullmatch(reference)
        return float(letter == option[1] if option else answer == reference)

    return max(map(score, references))


# --- strings that have to be there (RULER, Hsieh et al. 2024) -----------------------


def string_match_all(text: str, references: Sequence[str]) -> float:
    """The share of references that stand in the text, in upper or lower case."""
    return sum(map(functools.partial(_stands_in, text), references)) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """1 if any reference stands in the text, in upper or lower case."""
    return float(any(map(functools.partial(_stands_in, text), references)))


# --- LongBench's own (Bai et al. 2023, `metrics.py` and `eval.py`) ------------------


def first_line(text: str) -> str:
    """The first line that is not empty: all that counts after few shots."""
    return text.lstrip("\n").partition("\n")[0]


def classification_score(
    text: str, references: Sequence[str], classes: Sequence[str]
) -> float:
    """1 / (number of classes named) if the right one is among them, else 0.

    A class that is named only as a part of the right one's name does not count. (The
    authors' loop skips the class after one that it removes; so does this.)
    """

    def score(reference: str) -> float:
        named = [name for name in classes if name in text]
        for name in named:
            if name in reference and name != reference:
                named.remove(name)
        return 1 / len(named) if reference in named else 0.0

    return max(map(score, references))


def count_score(text: str, references: Sequence[str]) -> float:
    """The share of the numbers in the text that are the reference."""
    return max(_share(re.findall(r"\d+", text), reference) for reference in references)


def retrieval_score(text: str, references: Sequence[str]) -> float:
    """`count_score` with the number of a reference such as "Paragraph 12"."""
    numbers = [re.findall(r"Paragraph (\d+)", reference)[0] for reference in references]
    return count_score(text, numbers)


def code_similarity(text: str, references: Sequence[str]) -> float:
    """Likeness of the first line of code to the reference, in steps of 0.01.

    Lines with back quotes, `#` or `//` are taken for comments or markup and skipped.
    The likeness is `difflib`'s ratio, as in fuzzywuzzy, the authors' package.
    """
    lines = text.lstrip("\n").split("\n")
    code = (line for line in lines if not re.search("`|#|//", line))
    line = next(code, "")

    def score(reference: str) -> float:
        if not line or not reference:
            return 0.0
        return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100

    return max(map(score, references))


def _share(found: Sequence[str], wanted: str) -> float:
    return found.count(wanted) / max(len(found), 1)


def _stands_in(text: str, reference: str) -> bool:
    return reference.lower() in text.lower()


@functools.cache
def _rouge_scorer():
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
