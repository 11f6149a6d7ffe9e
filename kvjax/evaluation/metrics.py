"""Metrics of generated text against references, each from 0 (wrong) to 1 (right).

The best of several references counts, unless a metric says otherwise.
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
    """Returns F-measures `rouge1`, `rouge2` and `rougeL`, words stemmed (Lin 2004).

    Uses the package `rouge-score` and the Porter stemmer as HELM (Liang et al. 2022)
    and the papers that follow it. `rougeL` treats the text as one sequence of words.
    """
    scores = _rouge_scorer().score_multi(references, text)
    return {name: float(score.fmeasure) for name, score in scores.items()}


def longbench_rouge_l(text: str, references: Sequence[str]) -> float:
    """Returns ROUGE-L's F-measure as LongBench does: `rouge`, no stemming.

    That package splits at white space and full stops and scores sentence by sentence,
    so its values differ from those of `rouge`. An empty text scores 0.
    """
    from rouge import Rouge

    def score(reference: str) -> float:
        try:
            return Rouge(["rouge-l"]).get_scores(text, reference)[0]["rouge-l"]["f"]
        except (ValueError, RecursionError):  # no words, or a sentence of thousands
            return 0.0

    return max(map(score, references))


def normal_squad(text: str) -> str:
    """Returns lower case without punctuation and articles (SQuAD, LongBench)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def normal_trivia(text: str) -> str:
    """Returns `normal_squad` with spaces for punctuation and quotes (TriviaQA)."""
    signs = string.punctuation + "\u2018\u2019\u00b4"  # all single quotes
    bare = "".join(" " if c in signs else c for c in text.lower())
    return " ".join(_ARTICLES.sub(" ", bare).split())


def token_f1(
    text: str,
    references: Sequence[str],
    normal: Callable[[str], str] = normal_squad,
) -> float:
    """Returns F1 of the words shared with a reference (Rajpurkar et al. 2016, 6.1)."""

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
    """Returns 1 if the text equals a reference, both normalised."""
    return float(normal(text) in map(normal, references))


# --- answers at the end of a chain of thought ---------------------------------------


def final_number(text: str) -> decimal.Decimal | None:
    """Returns the number after the first `####`, else the last number, else None.

    Commas, dollar signs and a full stop after the number are ignored.
    """
    found = _MARKED_NUMBER.findall(text)[:1] or _NUMBER.findall(text)[-1:]
    return decimal.Decimal(re.sub(r"[$,]", "", found[0])) if found else None


def number_match(text: str, references: Sequence[str]) -> float:
    """Returns 1 if the final number equals a reference's (GSM8K, Cobbe et al. 2021)."""
    number = final_number(text)
    return float(number is not None and number in map(final_number, references))


def stated_answer(text: str) -> str | None:
    """Returns the rest of the line after the last "answer is", without a full stop."""
    _, stated, answer = text.rpartition("answer is ")
    line = answer.strip().partition("\n")[0]
    return line.strip().removesuffix(".") if stated else None


def answer_match(text: str, references: Sequence[str]) -> float:
    """Returns 1 if the stated answer equals a reference (BBH, Suzgun et al. 2022).

    Where the reference is an option such as "(B)", its letter or the first option named
    in the answer counts. A text without a stated answer must itself be a reference.
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
    """Returns the share of references that occur in the text, ignoring case."""
    return sum(map(functools.partial(_stands_in, text), references)) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """Returns 1 if any reference occurs in the text, ignoring case."""
    return float(any(map(functools.partial(_stands_in, text), references)))


# --- LongBench's own (Bai et al. 2023, `metrics.py` and `eval.py`) ------------------


def first_line(text: str) -> str:
    """Returns the first line that is not empty, which few-shot tasks score."""
    return text.lstrip("\n").partition("\n")[0]


def classification_score(
    text: str, references: Sequence[str], classes: Sequence[str]
) -> float:
    """Returns 1 / (number of classes named) if the right one is among them, else 0.

    A class whose name is a part of the right one's name does not count. (As in the
    authors' code, the loop skips the class after one that it removes.)
    """

    def score(reference: str) -> float:
        named = [name for name in classes if name in text]
        for name in named:
            if name in reference and name != reference:
                named.remove(name)
        return 1 / len(named) if reference in named else 0.0

    return max(map(score, references))


def count_score(text: str, references: Sequence[str]) -> float:
    """Returns the share of the numbers in the text that equal the reference."""
    return max(_share(re.findall(r"\d+", text), reference) for reference in references)


def retrieval_score(text: str, references: Sequence[str]) -> float:
    """Returns `count_score` with the number of a reference such as "Paragraph 12"."""
    numbers = [re.findall(r"Paragraph (\d+)", reference)[0] for reference in references]
    return count_score(text, numbers)


def code_similarity(text: str, references: Sequence[str]) -> float:
    """Returns the similarity of the first line of code to the reference, to 0.01.

    Lines with back quotes, `#` or `//` are skipped as comments or markup. Similarity
    is `difflib`'s ratio, as in fuzzywuzzy, the authors' package.
    """
    lines = text.lstrip("\n").split("\n")
    code = (line for line in lines if not re.search("`|#|//", line))
    line = next(code, "")

    def score(reference: str) -> float:
        if not line or not reference:
            return 0.0
        return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100

    return max(map(score, references))


def _share(found: Sequence[str], reference: str) -> float:
    return found.count(reference) / max(len(found), 1)


def _stands_in(text: str, reference: str) -> bool:
    return reference.lower() in text.lower()


@functools.cache
def _rouge_scorer():
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
