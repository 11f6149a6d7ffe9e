"""What answers are worth: where they end, and what their scores come to."""

import types

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
    """Token 3 is w3, and 1 ends a text, though its tokenizer would show it."""
    told = types.SimpleNamespace(eos_token_id=1)
    told.decode = lambda tokens, **_: " ".join(f"w{token}" for token in tokens)
    return tiny_model()._replace(tokenizer=told)


def answered(*answers):
    """A task whose prompts have these answers."""
    examples = [Example(f"t-{i}", "", (answer,)) for i, answer in enumerate(answers)]
    prompts = [Encoded((5, 6), 0)] * len(answers)
    return samples.Samples(TaskRun("t", len(answers)), TASK, examples, prompts, 9)


def test_what_follows_an_end_token_or_a_stop_text_is_not_graded(model):
    task = answered("w3", "w3", "w3")
    told = samples.graded(task, model, [0, 1, 2], [[2, 1, 3], [2, 3, 1], [2, 8, 3]])
    assert told["texts"] == ["w2", "w2 w3", "w2 w8 w3"]
    assert [score["said"] for score in told["scores"]] == [0, 1, 0]
    mixed = samples.mixed([task, answered("w4")])
    told = samples.mixed_graded(mixed, model, [0, 1], [[2, 1, 3], [4, 1]])
    assert told == {"texts": ["w2", "w4"], "scores": [{"said": 0.0}, {"said": 1.0}]}
