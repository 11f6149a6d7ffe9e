"""Every mistake ends in one line that names the value and the remedy, early."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import often, tiny_spec

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.config import make_config
from kvjax.engine import compiled
from kvjax.engine.planner import device_memory
from kvjax.engine.sampling import Sampling
from kvjax.evaluation import run
from kvjax.evaluation.run import from_config

ROOT = pathlib.Path(__file__).parents[1]
SPEC = tiny_spec()
RULE = {"policy": "recency"}


def compress(**changes):
    given = {
        "policy": policies.recency(),
        "budget": 32,
        "schedule": Schedule(prefill_chunk=8, evict_size=8),
    }
    return make_config(SPEC, **(given | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 0}, ["budget 0", "at least 1"]),
        ({"budget": -3}, ["budget -3"]),
        ({"budget": 8}, ["budget 8", "larger than the 8 pairs", "raise the budget"]),
        ({"budget": (32, 8)}, ["budget 8"]),
        ({"budget": (32, 32, 32)}, ["3 budgets", "2 layers"]),
        ({"budget": None}, ["needs a budget"]),
        ({"schedule": Schedule("none")}, ["'none'"]),
        ({"policy": None}, ["full cache", "budget 32"]),
        ({"policy": policies.streaming(sinks=24)}, ["pins 24", "leaves 24"]),
        (
            {"policy": policies.protect(policies.h2o(), 20, 20)},
            ["pins 40", "budget 32"],
        ),
        (
            {"schedule": Schedule(prefill_chunk=16, evict_size=8)},
            ["evict_size=8", "chunk of 16"],
        ),
        ({"policy": policies.snapkv(window=24)}, ["'snapkv' pins 24", "leaves 24"]),
        ({"policy": policies.h2o(20, sinks=4)}, ["'h2o' pins 24", "leaves 24"]),
        ({"eviction": "attic"}, ["attic"]),
        ({"rope_positions": "sideways"}, ["'sideways'", "'cache'"]),
        (
            {
                "policy": None,
                "budget": None,
                "schedule": None,
                "rope_positions": "sideways",
            },
            ["'sideways'"],
        ),
        (
            {"rope_positions": "cache", "eviction": "in_place"},
            ["'in_place'", "compact"],
        ),
        (
            {"rope_positions": "cache", "policy": policies.snapkv(4)},
            ["'snapkv'", "rope_positions='original'"],
        ),
    ],
)
def test_compression(changes, words):
    with pytest.raises(UserError) as caught:
        compress(**changes)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: policies.make("oldest"), ["'oldest'", "key_diff"]),
        (lambda: policies.make("h2o", share=0.2), ["h2o", "share"]),
        (lambda: policies.h2o(recent=1.5), ["recent=1.5", "pairs, 2 or more"]),
        (lambda: policies.h2o(recent=128.0), ["recent=128.0", "2 or more"]),
        (lambda: policies.h2o_sinks(recent=-2), ["recent=-2", "0 to 1"]),
        (lambda: (policies.h2o(1), policies.h2o(True)), ["recent=True", "0 to 1"]),
        (lambda: policies.streaming(sinks=-1), ["streaming(sinks=-1)", "0 or more"]),
        (lambda: policies.snapkv(window=-3), ["snapkv(window=-3)", "1 or more"]),
        (lambda: policies.snapkv(window=8.5), ["8.5", "whole number"]),
        (lambda: policies.snapkv(kernel=4), ["kernel=4", "odd"]),
        (lambda: policies.snapkv(pool="sum"), ["'sum'", "average, max"]),
        (lambda: policies.snapkv(group="first"), ["'first'", "pool_first, mean_first"]),
        (lambda: policies.sliding_window(0), ["window=0", "1 or more"]),
        (lambda: policies.roco(spread=-0.1), ["-0.1", "0 to 1"]),
        (lambda: policies.roco(recent=-1), ["recent=-1"]),
        (lambda: policies.scissorhands(history=0), ["history=0", "1 or more"]),
        (lambda: policies.scissorhands_released(heavy=0), ["heavy=0"]),
        (lambda: policies.simlayerkv(1.5), ["threshold=1.5", "0 to 1"]),
        (lambda: policies.fastgen(recover=2), ["recover=2", "0 to 1"]),
        (lambda: policies.fastgen(punctuation=(".",)), ["token='.'"]),
        (lambda: policies.expected_attention(future=0), ["future=0", "1 or more"]),
        (lambda: policies.expected_attention(epsilon=-1.0), ["epsilon=-1.0"]),
        (lambda: policies.criticalkv(first=1.2), ["first=1.2", "0 to 1"]),
        (lambda: policies.lag_kv(lag=1), ["lag=1", "2 or more"]),
        (lambda: policies.r_kv(alike=2), ["alike=2", "-1 to 1"]),
        (lambda: policies.chunk_kv(size=0), ["size=0", "1 or more"]),
        (lambda: policies.mix(policies.h2o(), policies.tova(), 7), ["weight=7"]),
        (lambda: policies.smooth(policies.h2o(), 2), ["kernel=2", "odd"]),
        (lambda: policies.per_head(policies.h2o(), total=-1), ["total=-1", "0 to 1"]),
        (lambda: policies.make("h2o", recent="half"), ["'half'", "0 to 1"]),
        (lambda: policies.protect(policies.recency(), recent=-2), ["-2"]),
        (lambda: Schedule("sometimes"), ["sometimes", "prefill_and_decode"]),
        (lambda: Schedule(prefill_chunk=0), ["prefill_chunk 0"]),
        (lambda: Schedule(first_chunk=64), ["first_chunk 64", "budget"]),
        (lambda: Sampling(temperature=-1.0), ["-1.0"]),
        (lambda: Sampling(top_p=0.0), ["top_p 0.0"]),
        (lambda: Sampling(top_k=-1), ["top_k -1"]),
        (lambda: device_memory(0.0), ["memory_gb 0.0"]),
        (
            lambda: policies.validate(
                policies.recency()._replace(required_stats=frozenset({"x"}))
            ),
            ["recency", "x", "attn_sum"],
        ),
    ],
)
def test_build_time(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ([], {}, ["prompts is []", "one or more"]),
        ([[1], []], {}, ["prompt 1 is empty"]),
        ([[1, 50]], {}, ["token 50", "0 to 49"]),
        ([[-1]], {}, ["token -1"]),
        (["text"], {}, ["no tokenizer"]),
        ([[1] * 250], {"max_new_tokens": 10}, ["250 tokens", "256", "shorten"]),
        ([[1]], {"max_new_tokens": 0}, ["max_new_tokens 0"]),
        ([[1]], {"memory_gb": 1e-5}, ["too small for one row", "more memory"]),
        ([[1]], {"memory_gb": 1e6}, ["memory_gb 1000000.0", "the device offers"]),
        ([[1]], {"memory_gb": "much"}, ["memory_gb", "'much'", "a number"]),
        (None, {}, ["prompts is None", "a list"]),
        ("text", {}, ["prompts is 'text'", "a list"]),
        ({"role": "user"}, {}, ["prompts is {'role'", "a list"]),
        ([{"role": "user", "content": "x"}], {}, ["prompt 0 is a message", "lists"]),
        ([[{"role": "user", "content": "x"}]], {}, ["conversation", "chat template"]),
        ([[1.0, 2.0]], {}, ["prompt 0 is [1.0, 2.0]", "whole token ids"]),
        ([[1], None], {}, ["prompt 1 is None"]),
        ([[1], 7], {}, ["prompt 1 is 7"]),
        ([["1", "2"]], {}, ["prompt 0 is ['1', '2']"]),
        ([[1]], {"policy": "oldest"}, ["policy 'oldest'", "key_diff"]),
        ([[1]], {"policy": "my_rules:oldest"}, ["my_rules:oldest", "imported"]),
        ([[1]], {"policy": policies.snapkv}, ["snapkv", "policies.snapkv()"]),
        ([[1]], {"policy": 3}, ["policy is 3", "kvjax.policies"]),
        ([[1]], {**RULE, "budget": 32.0}, ["budget is 32.0", "one int"]),
        ([[1]], {**RULE, "budget": "half"}, ["budget is 'half'", "one int"]),
        ([[1]], {**RULE, "budget": "32"}, ["budget is '32'"]),
        ([[1]], {**RULE, "budget": True}, ["budget is True"]),
        ([[1]], {**RULE, "budget": (32, 32.5)}, ["budget is 32.5", "whole number"]),
        ([[1]], {**RULE, "budget": np.float32(32)}, ["budget is", "one int"]),
        ([[1]], {**RULE, "budget": np.int64(0)}, ["budget 0", "at least 1"]),
        ([[1]], {**RULE, "schedule": "sometimes"}, ["'sometimes'", "after_prefill"]),
        ([[1]], {**RULE, "schedule": {"phases": "none"}}, ["schedule is", "Schedule("]),
        ([[1]], {**RULE, "codec": "zip"}, ["codec 'zip'", "identity"]),
        ([[1]], {**RULE, "codec": 4}, ["codec 4"]),
        ([[1]], {**RULE, "codec": "int4"}, ["'int4'", "head_dim of 8", "group=8"]),
        ([[1]], {**RULE, "budget_rule": "steep"}, ["budget rule 'steep'", "uniform"]),
        ([[1]], {**RULE, "budget_rule": 4}, ["budget rule 4"]),
        ([[1]], {**RULE, "implementation": "magic"}, ["'magic'", "reference"]),
        ([[1]], {"max_new_tokens": "8"}, ["max_new_tokens is '8'", "whole number"]),
        ([[1]], {"max_new_tokens": 8.5}, ["max_new_tokens is 8.5"]),
        ([[1]], {"max_new_tokens": None}, ["max_new_tokens is None"]),
        ([[1]], {"seed": 2**32}, ["seed 4294967296", "at most 2147483647"]),
        ([[1]], {"seed": -1}, ["seed -1"]),
        ([[1]], {"seed": "7"}, ["seed is '7'"]),
        ([[1]], {"top_k": 5.5}, ["top_k is 5.5", "whole number"]),
        ([[1]], {"top_k": "5"}, ["top_k is '5'"]),
        ([[1]], {"top_p": "0.9"}, ["top_p is '0.9'", "a number"]),
        ([[1]], {"top_p": 1.5}, ["top_p 1.5", "at most 1"]),
        ([[1]], {"temperature": float("nan")}, ["temperature is nan", "a number"]),
        ([[1]], {"temperature": "hot"}, ["temperature is 'hot'"]),
        ([[1]], {"temperature": None}, ["temperature is None"]),
        ([[1]], {"memory_gb": float("nan")}, ["memory_gb is nan"]),
        ([[1]], {"memory_gb": -1}, ["memory_gb -1", "larger than 0"]),
    ],
)
def test_generate(tiny, monkeypatch, prompts, changes, words):
    """Before anything is compiled."""
    monkeypatch.setattr(compiled, "compile_job", None)
    with pytest.raises(UserError) as caught:
        kvjax.generate(tiny, prompts, **changes)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("smollm2-135m-instruct", {}, ["'smollm2-135m-instruct'", "ModelSpec"]),
        (SPEC, {"prompt_tokens": 1000}, ["1000 tokens", "256", "shorten"]),
        (SPEC, {"prompt_tokens": 9.5}, ["prompt_tokens is 9.5"]),
        (SPEC, {"max_batch": 0}, ["max_batch 0"]),
        (SPEC, {"memory_gb": 0}, ["memory_gb 0"]),
        (SPEC, {"dtype": "float33"}, ["'float33'", "bfloat16"]),
        (SPEC, {"mesh": "rows:2"}, ["rows:2", "data"]),
        (SPEC, {**RULE, "budget": 0}, ["budget 0"]),
        (SPEC, {**RULE, "budget": "all"}, ["budget is 'all'"]),
        (SPEC, {**RULE, "eviction": "attic"}, ["attic"]),
    ],
)
def test_plan(model, changes, words):
    with pytest.raises(UserError) as caught:
        kvjax.plan(model, **changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_has_to_be_loaded_first():
    with pytest.raises(UserError, match=r"kvjax\.load"):
        kvjax.generate("smollm2-135m-instruct", ["text"])


def test_an_eviction_that_leaves_little_is_told():
    schedule = Schedule(prefill_chunk=24, evict_size=24)
    with pytest.warns(UserWarning, match="leaves 8 of the 32 pairs") as caught:
        compress(schedule=schedule)
    assert "16 or less" in str(caught[0].message)


def test_overflow_is_told(tiny):
    """Driven past its capacity, the state says so instead of losing pairs silently."""
    from kvjax.engine.steps import prefill

    config = make_config(SPEC, None, None, Schedule("none", prefill_chunk=8))
    state = cache.init(SPEC, config, 1, (8, 8))
    state, _ = prefill(
        tiny.params,
        state,
        np.ones((1, 16), np.int32),
        np.asarray([16], np.int32),
        spec=SPEC,
        config=config,
    )
    with pytest.raises(RuntimeError, match="no empty slot"):
        cache.raise_errors(state)


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


SHARED = {"name": "a", "policy": "recency", "phases": "decode_only"}
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
    """Found before long work, and no folder is left behind."""
    with pytest.raises(UserError) as caught:
        experiment = from_config(config(**changes), {})
        run.run(experiment, tmp_path / "runs" / "w", lambda what, units: None)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_throughput_s_methods_are_names_or_dicts():
    fields = {"experiment": "throughput", "max_new_tokens": 1, "min_timed_batches": 1}
    with pytest.raises(UserError, match="method 3: give a dict"):
        from_config(config(**fields, methods=[3]), {})


def test_methods_of_one_series_may_differ_in_what_reports_show():
    squeezed = {"phases": "after_prefill", "budget_rule": {"name": "squeeze", "p": 0.3}}
    stored = {"codec": {"name": "int4", "group": 16}}
    for change in ({"budget": 16}, {"phases": "after_prefill"}, squeezed, stored):
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
    """One line that names the file and the line."""
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
    "configs/batch_max/smollm2_cpu.py  Batch-Max's comparison on a CPU",
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
    assert "--config.data_dir=''" in other and "Fields of configs/quality.py" in other


OVERRIDES = [  # the help's examples
    "--config.budget=256",
    "--config.budget=25%",
    "--config.fidelity.num_windows=2",
    "--config.methods[4].policy=h2o",
    "--config.tasks[0].options.depths=(0.1,0.9)",
    '--config.methods=({"name": "Full cache"}, {"name": "H2O", "policy": "h2o"})',
]


def test_the_help_s_examples_work():
    """What is left to complain of is the model, which is asked for last."""
    for chosen in (OVERRIDES[:5], OVERRIDES[5:]):
        told = [f"--config={ROOT}/configs/quickstart.py", *chosen, "--workdir=w"]
        done = command_line(*told, "--config.model=nowhere")
        assert "error: no model named 'nowhere'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
