"""Grading: where answers end, and how their scores are averaged."""

import types

import numpy as np
import pytest
from conftest import tiny_model

from kvjax.evaluation import samples
from kvjax.evaluation.config import TaskRun
from kvjax.evaluation.tasks.base import Encoded, Example, Task


def said(text, example):
    return {"said": float(example.answers[0] in text)}


TASK = Task("t", lambda *_: [], said, "said", 9, "a test", stop=("w8",))


@pytest.fixture
def model():
    """A model whose token 3 is w3, and whose end token 1 decodes to text."""
    told = types.SimpleNamespace(eos_token_id=1)
    told.decode = lambda tokens, **_: " ".join(f"w{token}" for token in tokens)
    return tiny_model()._replace(tokenizer=told)


def answered(*answers):
    """Samples whose prompts have these answers."""
    examples = [Example(f"t-{i}", "", (answer,)) for i, answer in enumerate(answers)]
    prompts = [Encoded((5, 6), 0)] * len(answers)
    return samples.Samples(TaskRun("t", len(answers)), TASK, examples, prompts, 9)


def test_what_follows_an_end_token_or_a_stop_text_is_not_graded(model):
    task = answered("w3", "w3", "w3")
    told = samples.graded(task, model, [0, 1, 2], [[2, 1, 3], [2, 3, 1], [2, 8, 3]])
    assert told["texts"] == [" w2", " w2 w3", " w2 w8 w3"]
    assert [score["said"] for score in told["scores"]] == [0, 1, 0]
    mixed = samples.mixed([task, answered("w4")])
    told = samples.mixed_graded(mixed, model, [0, 1], [[2, 1, 3], [4, 1]])
    assert told == {"texts": [" w2", " w4"], "scores": [{"said": 0.0}, {"said": 1.0}]}


def test_shares_have_wilson_s_interval():
    wilson = samples.interval([1.0] * 9 + [0.0])  # as R's binom.confint(9, 10) has it
    assert wilson["interval"] == pytest.approx([0.5958500, 0.9821238], abs=1e-6)
    assert wilson["interval_method"] == "wilson"
    assert samples.interval([1.0])["interval"][0] == pytest.approx(0.2065, abs=1e-4)


@pytest.mark.parametrize(
    ("count", "quantile"),  # as R's qt(0.975, count - 1) has it
    [(3, 4.302653), (10, 2.262157), (11, 2.228139), (31, 2.042272), (1001, 1.962339)],
)
def test_other_scores_have_student_s_interval(count, quantile):
    scores = np.linspace(0.499, 0.501, count).tolist()
    found = samples.interval(scores)
    half = quantile * np.std(scores, ddof=1) / count**0.5
    low, high = found["interval"]
    assert [0.5 - low, high - 0.5] == pytest.approx([half, half], rel=2e-3)
    assert found["interval_method"] == "student"


def test_an_interval_is_between_0_and_1():
    assert samples.interval([0.25, 0.75])["interval"] == [0, 1]


@pytest.mark.parametrize("count", [1, 4])
def test_nothing_follows_from_scores_that_are_all_alike(count):
    assert samples.interval([0.75] * count)["interval"] is None
