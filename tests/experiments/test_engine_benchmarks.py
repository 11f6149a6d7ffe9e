"""Benchmarks of the engine: their documents, lengths, times and commands."""

import json
import pathlib
import subprocess
import sys
import time
import types

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))
sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "engine"))

import documents
import engine_runs
import mixed_lengths
import streaming_latency

from kvjax.types import UserError

FOLDER = pathlib.Path(engine_runs.__file__).parent
PROSE = "It was a cold day in April. The clocks struck thirteen, and nobody knew why. "


def test_documents_hold_a_key_for_every_question():
    """Within the length, in different orders, and the answer opens before the key."""
    tokenizer = engine_runs.tiny_model().tokenizer
    made = documents.documents(tokenizer, 3, 1000, 0, PROSE * 40)
    for document in made:
        text = tokenizer.decode(document.tokens)
        assert 900 < len(document.tokens) <= 1000
        for (fact, asked, opening), question in zip(
            documents.NEEDLES, document.questions, strict=True
        ):
            assert text.count(fact.format(key=question.key)) == 1
            ends = tokenizer.decode(question.tokens)
            assert ends.startswith(asked) and ends.endswith(opening)
    keys = [question.key for document in made for question in document.questions]
    assert len(set(keys)) == 15 and all(len(key) == 5 for key in keys)
    with pytest.raises(UserError, match="too short for 5 needles"):
        documents.documents(tokenizer, 1, 500, 0, PROSE * 40)


def test_lengths_stay_within_their_ends():
    found = mixed_lengths.lognormal_lengths(400, 4, 512, 1.5, 0)
    assert min(found) == 4 and max(found) == 512
    assert 35 < sorted(found)[200] < 60, "around the geometric mean, 45"
    assert found == mixed_lengths.lognormal_lengths(400, 4, 512, 1.5, 0)


def test_a_summary_compares_tokens_and_counts_steps():
    runs = {"fixed": [(4.0, 30), (6.0, 30)], "continuous": [(2.0, 12), (3.0, 12)]}
    tokens = {"fixed": [[1, 2], [3]], "continuous": [[1, 2], [3]]}
    found = mixed_lengths.summary(runs, tokens, [2, 1, 17], rows=2)
    assert found["ways"]["continuous"]["tokens_per_s"] == 8.0
    assert (found["least_steps"], found["speedup"]) == (17, 2.0)
    assert found["tokens_equal"]
    tokens["continuous"] = [[1, 2], [4]]
    assert not mixed_lengths.summary(runs, tokens, [2, 1, 17], 2)["tokens_equal"]


def test_times_between_pieces_are_per_token(monkeypatch):
    clock = iter([0.0, 1.0, 1.5, 3.0, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    piece = lambda prompt, tokens: types.SimpleNamespace(
        prompt=prompt, sample=0, tokens=tokens
    )
    pieces = [piece(0, [7]), piece(1, [7]), piece(0, [7, 7]), piece(1, [])]
    assert streaming_latency.times_of(pieces) == ([1.0, 1.5], [1.0, 1.0])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("mixed_lengths", ["--requests=8", "--rows=2", "--longest=24", "--prompt=32"]),
        ("streaming_latency", ["--batches=1,3", "--new=8", "--prompt=32"]),
        ("shared_document", ["--document=1500", "--questions=6", "--documents=1"]),
    ],
)
def test_commands(script, arguments):
    if script == "shared_document":  # calibrated sizes need a calibrated model
        arguments = [*arguments, "--only=speed"]
    command = [FOLDER / f"{script}.py", "--model=tiny", "--rounds=1"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["experiment"] == script and line["model"] == "tiny"
    if script == "mixed_lengths":
        ways = line["ways"]
        assert line["tokens_equal"]
        assert ways["continuous"]["steps"] < ways["fixed"]["steps"]
    if script == "shared_document":
        assert line["speed"]["tokens_equal"]


@pytest.mark.e2e
def test_answers_of_the_baseline_continue_their_document():
    """With the full cache, as transformers generates after document and question."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers")
    from baselines import questions

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(shape).eval()
    document, asked = list(range(3, 40)), [[5, 6, 7], [8], [5, 6, 7]]
    with torch.inference_mode():
        done = questions.answer(
            model,
            {
                "policy": None,
                "ratio": 0.0,
                "documents": [document],
                "questions": [asked],
                "new": 6,
            },
        )
        for tokens, question in zip(done["tokens"][0], asked, strict=True):
            whole = torch.tensor([document + question])
            expected = model.generate(whole, max_new_tokens=6, do_sample=False)
            assert tokens == expected[0, whole.shape[1] :].tolist()
    assert done["kept"] == [len(document)]
