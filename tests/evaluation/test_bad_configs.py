"""Every mistake in a config or on a command line ends in one line, early."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import often

from kvjax import UserError
from kvjax.evaluation import quality, run
from kvjax.evaluation.run import from_config

ROOT = pathlib.Path(__file__).parents[2]


def config(**changes):
    fields = {
        "model": "none",
        "dtype": "float32",
        "memory_gb": 1.0,
        "seed": 0,
        "haystack": "",
        "budget": 32,
        "prefill_chunk": 8,
        "methods": [{"name": "a", "policy": "recency"}],
        "num_examples": 1,
        "prompt_tokens": 10,
        "tasks": [{"name": "needle"}],
        "max_new_tokens": 1,
        "fidelity": {"num_windows": 1, "prompt_tokens": 8, "continuation_tokens": 2},
    }
    return fields | changes


def asked(task, **options):
    return {"tasks": [{"name": task, "options": options}]}


SHARED = {"name": "a", "policy": "recency", "schedule": "decode_only"}
TWINS = [  # what tells them apart is in no table
    {"name": "a", "policy": "h2o", "series": "h2o"},
    {"name": "b", "policy": "h2o", "series": "h2o", "options": {"recent": 0.2}},
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": 1}, ["colour"]),
        ({"methods": [{"name": "a", "policy": "recency", "sinks": 3}]}, ["sinks"]),
        ({"methods": [{"name": "a", "policy": "oldest"}]}, ["oldest"]),
        ({"methods": []}, ["methods"]),
        ({"methods": "h2o"}, ["methods 'h2o'", "a dict for each"]),
        ({"methods": ["h2o"]}, ["method 'h2o'", "a dict of its fields"]),
        ({"methods": [{"name": "a", "options": 3}]}, ["options 3", "a dict"]),
        ({"tasks": ["needle"]}, ["task 'needle'", "a dict of its fields"]),
        ({"tasks": 3}, ["tasks 3"]),
        ({"fidelity": 3}, ["fidelity 3", "a dict"]),
        ({"num_examples": "ten"}, ["num_examples ten", "at least 1"]),
        ({"num_examples": None}, ["num_examples None", "at least 1"]),
        ({"seed": None}, ["seed None", "0 or more"]),
        ({"fidelity": {"num_windows": None}}, ["num_windows None", "0 or more"]),
        ({"haystack": 5}, ["haystack 5: give a text"]),
        ({"data_dir": 5}, ["data_dir 5: give a text"]),
        ({"tasks": [{"name": 5}]}, ["task name 5: give a text"]),
        ({"tasks": [{"name": None}]}, ["task name None: give a text"]),
        ({"methods": [{"name": "a", "policy": 5}]}, ["'a': policy 5: give a text"]),
        ({"data_dir": "nowhere"}, ["data_dir 'nowhere'", "folder"]),
        ({"haystack": "nowhere"}, ["haystack folder 'nowhere'", "does not exist"]),
        (
            {"methods": [SHARED | {"budget_rule": {"p": 0.3}}]},
            ["method 'a': budget_rule {'p': 0.3}", "no name"],
        ),
        (
            {"methods": [SHARED | {"budget_rule": {"name": "squeeze", "p": 2}}]},
            ["squeeze(p=2)", "above 0 and 1 at most"],
        ),
        (
            {"methods": [SHARED | {"budget_rule": {"name": "squeeze", "q": 2}}]},
            ["budget rule 'squeeze'", "'q'"],
        ),
        (
            {"methods": [SHARED | {"budget_rule": "squeeze", "evict_size": 11}]},
            ["budget 11", "larger than the 11 pairs"],
        ),
        ({"methods": [SHARED | {"pinned": 4}]}, ["pinned is 4", "two numbers"]),
        ({"methods": [SHARED | {"pinned": (4, -1)}]}, ["protect", "-1"]),
        ({"methods": [SHARED | {"pinned": (4, 30)}]}, ["pins 34 pairs"]),
        (
            {"methods": [SHARED | {"policy": "h2o", "options": {"recent": 30}}]},
            ["'h2o' pins 30 pairs"],
        ),
        ({"methods": TWINS}, ["'a' and 'b'", "series 'h2o'", "a series of its own"]),
        ({"methods": [{"name": "a"}, {"name": "a"}]}, ["different names"]),
        ({"num_examples": 0}, ["num_examples 0"]),
        ({"tasks": []}, ["tasks"]),
        ({"tasks": [{"name": "needle", "shots": 3}]}, ["needle", "shots"]),
        (
            asked("needle", shots=3),
            ["needle has no option 'shots'", "haystack, length"],
        ),
        (asked("needle", seed=3), ["needle has no option 'seed'"]),
        (asked("needle", depths=0.5), ["needle: depths is 0.5", "list of numbers"]),
        (asked("needle", depths="0.5"), ["depths is '0.5'", "list of numbers"]),
        (asked("passkey", depths=["low"]), ["passkey: depths is 'low'", "a number"]),
        (asked("ruler/cwe", length=1e3), ["length is 1000.0", "a whole number"]),
        (asked("gsm8k", shots="ten"), ["gsm8k: shots is 'ten'", "a whole number"]),
        (asked("bbh", subtask=3), ["bbh: subtask is 3", "give a text"]),
        ({"tasks": [{"name": "my_tasks:quiz"}]}, ["my_tasks:quiz", "imported"]),
        ({"tasks": [{"name": "needel"}]}, ["'needel'", "did you mean 'needle'"]),
        ({"fidelity": {"windows": 2}}, ["fidelity", "'windows'", "num_windows"]),
        ({"codec": "zip"}, ["codec 'zip'", "identity"]),
        ({"methods": [SHARED | {"codec": {"b": 8}}]}, ["codec {'b': 8}", "no name"]),
        (
            {"methods": [SHARED | {"codec": {"name": "int4", "group": 0}}]},
            ["group 0", "at least 1"],
        ),
        (
            {"methods": [SHARED | {"codec": {"name": "int4", "size": 8}}]},
            ["codec 'int4'", "'size'"],
        ),
        (
            {"methods": [{"name": "a", "policy": "recency", "batch_rule": "ed"}]},
            ["batch_rule", "throughput"],
        ),
        (
            {"methods": [{"name": "a", "policy": "recency", "batch_size": 4}]},
            ["batch_size", "throughput"],
        ),
        ({"experiment": "speed"}, ["'speed'", "quality, throughput"]),
        ({"mesh": "data:2", "layerwise": True}, ["layerwise"]),
        ({"budget": 8}, ["budget 8", "raise the budget"]),
        ({"memory_gb": -1.0}, ["memory_gb -1"]),
        ({"model": "none"}, ["'none'", "smollm2"]),
    ],
)
def test_experiment(tmp_path, changes, words):
    """Errors are found before long work, and no folder is left behind."""
    with pytest.raises(UserError) as caught:
        experiment = from_config(config(**changes), {})
        run.run(experiment, tmp_path / "runs" / "w", lambda what, units: None)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_quality_needs_a_tokenizer(tmp_path, tiny):
    asked = from_config(config(), {})
    setting = run.Setting(asked, tiny._replace(tokenizer=None), 0, tmp_path, [], [], {})
    with pytest.raises(UserError, match=r"model none has no tokenizer.*a folder with"):
        quality.rows(setting)


def test_throughput_s_methods_are_names_or_dicts():
    fields = {"experiment": "throughput", "max_new_tokens": 1, "min_timed_batches": 1}
    with pytest.raises(UserError, match="method 3: give a dict"):
        from_config(config(**fields, methods=[3]), {})


def test_methods_of_one_series_may_differ_in_what_reports_show():
    squeezed = {
        "schedule": "after_prefill",
        "budget_rule": {"name": "squeeze", "p": 0.3},
    }
    stored = {"codec": {"name": "int4", "group": 16}}
    for change in ({"budget": 16}, {"schedule": "after_prefill"}, squeezed, stored):
        methods = [TWINS[0], TWINS[1] | change]
        from_config(config(methods=methods), {}).check()


def test_workdir_of_another_experiment(tmp_path):
    first = from_config(config(), {})
    (tmp_path / "experiment.json").write_text(json.dumps(dataclasses.asdict(first)))
    (tmp_path / "batches.jsonl").write_text("")
    other = dataclasses.replace(first, seed=7)
    with pytest.raises(UserError, match=r"another configuration.*seed"):
        run.run(other, tmp_path, lambda what, units: None)


QUICKSTART = "--config=configs/quickstart.py"
SLIPS = [
    ([QUICKSTART, "--config.budget=0", "--workdir=w"], "budget 0"),
    ([QUICKSTART, "--config.budget=125%", "--workdir=w"], "budget is '125%'"),
    (["--workdir=w"], "--config"),
    ([QUICKSTART], "--workdir"),
    (["--config=configs/absent.py", "--workdir=w"], "absent.py"),
    ([QUICKSTART, "--config.colour=3", "--workdir=w"], "colour"),
    ([QUICKSTART, "--config.methods.1.x=3", "--workdir=w"], "is written methods.1.x"),
    ([QUICKSTART, "--memory_gb=much", "--workdir=w"], "much"),
    ([QUICKSTART, "--memory_gb=-2", "--workdir=w"], "-2"),
]


@pytest.mark.parametrize(
    ("arguments", "word"), often(SLIPS, SLIPS[:2], others="e2e", several=True)
)
def test_command_line(tmp_path, arguments, word):
    """Exit code 2, one line, no traceback."""
    arguments = [a.replace("--workdir=w", f"--workdir={tmp_path}") for a in arguments]
    done = subprocess.run(
        [sys.executable, "experiments/run.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1 and word in lines[0], done.stderr


BROKEN = [
    ("    x =", "line 5: invalid syntax"),
    ("    return 1 / 0", "line 5: ZeroDivisionError: division by zero"),
    ("    return nothing", "line 5: NameError: name 'nothing'"),
    ("    int('a\\nb')", "line 5: ValueError: invalid literal"),
    ("    return {}.x", "line 5: AttributeError"),
    ("    return {}", "has to return a ConfigDict"),
    ("    open('/nowhere')", "No such file"),
]


@pytest.mark.parametrize(
    ("body", "words"), often(BROKEN, BROKEN[:1], others="e2e", several=True)
)
def test_a_config_that_does_not_load(tmp_path, body, words):
    """The error is one line that names the file and the line."""
    (tmp_path / "mine.py").write_text(f"import sys\n\n\ndef get_config():\n{body}\n")
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "experiments/run.py",
            "--config=mine.py",
            "--workdir=w",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert words in line and ("mine.py" in line or "line" not in words)
    assert not (tmp_path / "w").exists()


HELP = [
    "batch_max/smollm2_cpu  Batch-Max's comparison on a CPU",
    "--config.budget=512 int",
    "--config.tasks[0].options.depths=(0.1, 0.3, 0.5, 0.7, 0.9) tuple",
    "--config.methods[4].policy=h2o",
    "scissorhands_released, simlayerkv,",
    "ruler/niah_multikey_1,",
    "--baseline_python",
]


def command_line(*arguments):
    return subprocess.run(
        [sys.executable, "experiments/run.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_help_tells_what_there_is():
    done = command_line("--help")
    told = " ".join(done.stdout.split())
    assert done.returncode == 0 and done.stderr == ""
    assert [words for words in HELP if " ".join(words.split()) not in told] == []
    other = command_line("--config=configs/quality.py:needle_1000", "--help").stdout
    assert "--config.data_dir=''" in other and "Fields of configs/quality" in other
    named = command_line("--config=quality:needle_1000", "--help").stdout
    assert named == other.replace("Fields of configs/quality", "Fields of quality")


OVERRIDES = [  # the help's examples
    "--config.budget=256",
    "--config.budget=25%",
    "--config.fidelity.num_windows=2",
    "--config.methods[4].policy=h2o",
    "--config.tasks[0].options.depths=(0.1,0.9)",
    '--config.methods=({"name": "Full cache"}, {"name": "H2O", "policy": "h2o"})',
]


def test_the_help_s_examples_work():
    """The only error left is the model's, which is loaded last."""
    for chosen in (OVERRIDES[:5], OVERRIDES[5:]):
        told = [f"--config={ROOT}/configs/quickstart.py", *chosen, "--workdir=w"]
        done = command_line(*told, "--config.model=nowhere")
        assert "error: no model named 'nowhere'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
