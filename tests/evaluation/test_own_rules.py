"""Runs a config with the user's own policy, task and codec by command."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from testing import asking, checkpoints

from kvjax.evaluation.report.records import read_records

pytestmark = pytest.mark.e2e

ROOT = pathlib.Path(__file__).parents[2]
RULES = """\
from kvjax import policies
from kvjax.cache import codecs
from kvjax.evaluation.tasks.base import Example, Task


def keep_digits(size=1):
    return policies.stateless(f"digits {size}", lambda view: view.positions)


def as_they_are():
    return codecs.identity


def _examples(tokenizer, count, seed):
    words = [f"w{i % 40}" for i in range(60)]
    return [Example(f"quiz-{i}", " ".join(words[i:]), ("w0",)) for i in range(count)]


def _grade(text, example):
    return {"said": float(bool(text.split())), "right": float("w0" in text)}


quiz = Task("quiz", _examples, _grade, "said", 4, "a test")


def late_quiz():
    return quiz
"""
CONFIG = """\
from ml_collections import ConfigDict


def get_config():
    shared = {"policy": "my_rules:keep_digits", "options": {"size": 2}}
    return ConfigDict(
        {
            "experiment": "EXPERIMENT",
            "model": "model",
            "dtype": "float32",
            "memory_gb": 0.1,
            "seed": 0,
            "haystack": "",
            "budget": 24,
            "prefill_chunk": 8,
            "codec": "my_rules:as_they_are",
            "methods": ({"name": "Full cache", **FULL}, {"name": "Mine", **MINE}),
            "tasks": ({"name": "TASK"},),
            "num_examples": 3,
            "max_new_tokens": 4,
            **MORE,
        }
    )
"""
QUALITY = {"FULL": "{}", "MINE": "shared", "TASK": "my_rules:quiz", "MORE": "{}"}
SPEED = {
    "FULL": '{"batch_rule": "full"}',
    "MINE": '(shared | {"batch_rule": "batch_max"})',
    "TASK": "my_rules:late_quiz",
    "MORE": '{"min_timed_batches": 1}',
}


LAST = {
    "quality": ("Mine: my_rules:quiz, 3 prompts at once", " (6 of 6)"),
    "throughput": ("Mine, 4 new: 3 prompts at once", " (2 of 2)"),
}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "KVJAX_PROGRESS": ""}


@pytest.fixture
def command(tmp_path):
    """Runs experiments/run.py in a folder with a model, the rules and configs."""
    folder = checkpoints.write_folder(tmp_path / "model", checkpoints.tensors())
    asking.make_tokenizer().save_pretrained(folder)
    (tmp_path / "my_rules.py").write_text(RULES)
    for name, words in (("quality", QUALITY), ("throughput", SPEED)):
        text = CONFIG.replace("EXPERIMENT", name)
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        (tmp_path / f"{name}.py").write_text(text)

    def run(name, *more):
        flags = f"--config={name}.py", f"--workdir=runs/{name}"
        return subprocess.run(
            [sys.executable, ROOT / "experiments/run.py", *flags, *more],
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize("name", ["quality", "throughput"])
def test_a_config_names_the_user_s_own(command, tmp_path, name):
    """The module lies in the current folder; the second run measures nothing."""
    done = command(name)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    full, mine = read_records(tmp_path / "runs" / name / "records.jsonl")
    assert {"Full cache", "Mine"} == set(told["methods"])
    assert (full["policy"], mine["policy"]) == (None, "digits 2")
    assert (full["codec"], mine["codec"]) == ("identity", "my_rules:as_they_are")
    assert mine["budget"] == 24 and mine["experiment"] == name
    (task,) = mine["tasks"].values()
    assert 0 < task["score"] == mine["score"] and task["num_examples"] == 3
    assert mine["provenance"]["command"].endswith(f"--workdir=runs/{name}")
    assert "Full cache" in done.stdout and "\r" not in done.stderr
    ended = re.findall(r"^kvjax: (.*): [\d.]+ s( \(.*\))?$", done.stderr, re.M)
    assert ended[-1] == LAST[name]  # a line for all that ended, and all on stderr
    assert any("Mine" in what and "compiling" in what for what, _ in ended)
    again = command(name)
    assert again.stdout == done.stdout


def test_what_is_not_there_is_told(command):
    done = command("quality", "--config.codec=my_rules:keep")
    lines = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(lines) == 1 and "codec 'my_rules:keep'" in lines[0]
    assert "module my_rules has no function 'keep'" in lines[0]
