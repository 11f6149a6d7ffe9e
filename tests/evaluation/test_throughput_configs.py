"""Throughput's configs, the shapes that they name, the report and the command."""

import dataclasses
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvjax import load
from kvjax.cache.spec import checked
from kvjax.engine import footprint, steps
from kvjax.evaluation import batch_rules, report, run, search, tasks, throughput
from kvjax.evaluation.batch_rules import divisors
from kvjax.models import decoder, presets
from kvjax.parallel import limits
from kvjax.types import Model, UserError

pytestmark = pytest.mark.e2e

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


# Of Metel et al. 2024: models; tasks, their shots and metric; and for each of both the
# memory in GB, and |kv| and batch of Batch-Max.
MODELS = {"llama2_13b": "random:llama-2-13b", "phi35": "random:phi-3.5-mini"}
TASKS = {
    "cnn_dm": ("cnn_dailymail", 1, "rouge2"),
    "narrativeqa": ("narrativeqa", 2, "rouge2"),
    "gsm8k": ("gsm8k", 16, "exact_match"),
}
PAPER = {
    ("cnn_dm", "llama2_13b"): (4 * 32, [(1024, 32), (896, 40)]),
    ("narrativeqa", "llama2_13b"): (4 * 32, [(1792, 15), (1728, 16)]),
    ("gsm8k", "llama2_13b"): (2 * 32, [(1536, 8), (1408, 10)]),
    ("cnn_dm", "phi35"): (4 * 12, [(2176, 5)]),
    ("narrativeqa", "phi35"): (4 * 12, [(1984, 6)]),
    ("gsm8k", "phi35"): (4 * 12, [(1664, 8)]),
}
P, SAMPLES, LONGEST, NEW = 64, 960, 3584, 512
ED = [(2, 1), (65, 64)]  # |kv|, and what an eviction drops
D = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48, 60, 64, 80, 96, 120]
D += [160, 192, 240, 320, 480, 960]
ONE_STAYS = "ignore:an eviction leaves 1 of the 65 pairs"  # as ED has it


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    """A device with the memory of the configs; `check` refuses more than there is."""
    monkeypatch.setattr(limits, "host_bytes", lambda: 10**12)


def config_of(path, *which):
    return runpy.run_path(str(path))["get_config"](*which)


def of_rule(asked, rule):
    return [method for method in asked.methods if method.batch_rule == rule]


@pytest.mark.filterwarnings(ONE_STAYS)
@pytest.mark.parametrize(("task", "model"), PAPER, ids=map("_".join, PAPER))
def test_the_papers_settings(task, model):
    """Task, model, sizes and machine; every method, and no other."""
    memory, pairs = PAPER[task, model]
    name, shots, metric = TASKS[task]
    fields = config_of(CONFIGS / "batch_max" / "paper.py", f"{task}_{model}")
    asked = run.from_config(fields.to_dict(), {})
    asked.check()
    (run_of,) = asked.tasks
    assert (run_of.name, run_of.options) == (name, (("shots", shots),))
    assert tasks.get(name).metric == metric
    assert (run_of.num_examples, run_of.prompt_tokens) == (SAMPLES, LONGEST)
    told = asked.model, asked.dtype, asked.memory_gb, asked.max_new_tokens
    assert told == (MODELS[model], "bfloat16", memory, (NEW,))
    (full,), eds, own = (of_rule(asked, rule) for rule in ("full", "ed", "fixed"))
    assert len(asked.methods) == 1 + len(eds) + len(own)
    assert (full.policy, full.stored) == (None, "identity")
    assert [(ed.budget, ed.schedule.evict_size) for ed in eds] == ED
    assert {(ed.policy, ed.schedule.phases) for ed in eds} == {
        ("recency", "decode_only")
    }
    assert [(each.budget, each.batch_size) for each in own] == pairs
    assert {batch for _, batch in pairs} < set(D)
    assert {each.policy for each in own} == {"average_attention"}
    spec = presets.spec(asked.model.removeprefix("random:"))
    bare = Model(spec, decoder.param_shapes(spec, "bfloat16"), None)
    for method in asked.methods:
        job = throughput._job(bare, method, LONGEST, NEW)
        batch_rules.check(method.batch_rule, job, memory * 10**9)
        schedule = job.config.schedule
        assert (schedule.prefill_chunk, job.max_new_tokens) == (P, NEW)
        assert job.eos == steps.NO_EOS
        if method in own:
            assert (schedule.phases, schedule.evict_size) == ("prefill_and_decode", P)


@pytest.mark.filterwarnings(ONE_STAYS)
def test_the_papers_procedure():
    """The config with searched |kv| differs from the other only in |kv|."""
    path = CONFIGS / "batch_max" / "paper.py"
    for task, model in PAPER:
        fixed, sought = (
            run.from_config(config_of(path, f"{task}_{model}{how}").to_dict(), {})
            for how in ("", ",search")
        )
        sought.check()
        (own,) = of_rule(sought, "search")
        assert (own.policy, own.budget) == ("average_attention", None)
        rest = [method for method in fixed.methods if method.batch_rule != "fixed"]
        again = dataclasses.replace(sought, methods=fixed.methods)
        assert again == fixed and sought.methods == (*rest, own)


@pytest.mark.model
def test_the_search_on_a_cpu(smollm2):
    """Less room than for four prompts' full cache; one row's heads differ."""
    path, spec = CONFIGS / "batch_max" / "search.py", smollm2.spec
    asked = run.from_config(config_of(path).to_dict(), {})
    sought = of_rule(asked, "search")
    told = [search.bounds(method, spec, 3000, (64,)) for method in sought]
    assert told == [(128, 2999)] * 3
    kept = checked(spec, search.at(sought[-1], 1024).cache, 3000)
    assert len(set(kept.head_budgets(spec))) > 2 and kept.policy.num_pinned == 20
    job = throughput._job(smollm2, asked.methods[0], 3000, 512)
    row = max(footprint.state_bytes(job).values())
    weights = footprint.weights_bytes(job)
    assert weights + 3 * row < asked.memory_gb * 1e9 < weights + 4 * row
    (other,) = run.from_config(config_of(path, "multi_news").to_dict(), {}).tasks
    assert (other.name, other.num_examples) == ("multi_news", 12)


def test_the_papers_batches():
    assert divisors(SAMPLES) == D


@pytest.mark.filterwarnings(ONE_STAYS)
@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "batch_max").glob("*.py")), ids=lambda path: path.stem
)
def test_configs(path):
    """The configs are valid, and fit the models that they name."""
    fields = config_of(path).to_dict()
    asked = run.from_config(fields, {})
    assert asked.experiment == "throughput"
    asked.check()
    assert of_rule(asked, "ed") and of_rule(asked, "full")
    assert path.stem in runpy.run_path(str(path))["__doc__"]
    assert len(divisors(sum(task.num_examples for task in asked.tasks))) >= 6
    if asked.model.startswith("random:"):
        spec = presets.spec(asked.model.removeprefix("random:"))
        bare = Model(spec, decoder.param_shapes(spec), None)
        length = asked.tasks[0].prompt_tokens
        for method in asked.methods:
            for new in asked.max_new_tokens:
                job = throughput._job(bare, method, length, new)
                assert job.max_new_tokens == new


def test_kcache_at_two_limits():
    """Values in 6 GB of host memory beside 2 GB; one layer keeps its own."""
    asked = run.from_config(
        config_of(CONFIGS / "kcache" / "throughput.py").to_dict(), {}
    )
    asked.check()
    away = [method for method in asked.methods if method.cache.offload]
    assert [method.cache.offload.top_n for method in away] == [32, 64, 128]
    for method in away:
        kept = checked(presets.spec("llama-2-7b"), method.cache)
        assert kept.compacts and not kept.recalls(0) and kept.recalls(1)
        assert (asked.memory_gb, kept.offload.memory_gb) == (2.0, 6.0)


@pytest.mark.parametrize("length", [1000, 3500])
def test_kcache_s_table_2(length):
    fields = config_of(CONFIGS / "kcache" / "quality.py", str(length)).to_dict()
    asked = run.from_config(fields, {})
    asked.check()
    table = {
        (kept.top_n, kept.device_layers)
        for kept in (method.cache.offload for method in asked.methods)
        if kept and not kept.renormalize
    }
    assert table == {(n, layers) for n in (16, 32, 64, 128) for layers in range(4)}
    assert asked.tasks[0].prompt_tokens == length and asked.tasks[0].num_examples == 50


def test_phi35_keeps_its_longrope():
    """RoPE of the whole context: each frequency is scaled by its own factor."""
    spec = presets.spec("phi-3.5-mini")
    rope = spec.rope
    assert (rope.kind, rope.factor, rope.original) == ("longrope", 32, 4096)
    assert len(rope.factors) == spec.head_dim // 2 == 48
    assert sorted(rope.factors) == list(rope.factors)
    assert (rope.factors[0], rope.factors[-1]) == pytest.approx((1.08, 64.84))
    assert rope.scale == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)


def test_random_models(monkeypatch):
    """The published shape, the same weights every time, and no tokenizer."""
    small = presets._config("LlamaForCausalLM", 1, 16, 32, 4, 2, 50, 64)
    monkeypatch.setitem(presets.CONFIGS, "small", small)
    one, two = load("random:small"), load("random:small", "bfloat16")
    assert one.spec == presets.spec("small") and one.tokenizer is None
    assert one.params["embed"].shape == (50, 16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(two.params)} == {"bfloat16"}
    at_once = jax.jit(decoder.random_params, static_argnums=0)
    jax.tree.map(
        np.testing.assert_array_equal,
        one.params,
        at_once(one.spec, jax.random.key(0)),
    )
    again = load("random:small")
    jax.tree.map(np.testing.assert_array_equal, one.params, again.params)
    with pytest.raises(UserError, match="no shape of 'medium'"):
        load("random:medium")


def test_random_weights_that_do_not_fit_are_not_made(tmp_path, monkeypatch):
    """They are refused before weights are drawn, and no folder is left behind."""
    monkeypatch.setattr(run, "load", lambda *_, **__: pytest.fail("weights were made"))
    fields = dict(config_of(CONFIGS / "batch_max" / "random_8b.py"))
    asked = run.from_config(fields, {"memory_gb": 16})
    message = r"llama-3.1-8b in bfloat16 take 16\.1 GB of 16: give more"
    with pytest.raises(UserError, match=message):
        run.run(asked, tmp_path / "run", lambda what, finished: None)
    assert not (tmp_path / "run").exists()


def test_methods_of_a_series_differ_in_their_batch():
    given = dict(config_of(CONFIGS / "squeeze" / "throughput.py"))
    asked = run.from_config(given, {})
    asked.check()
    assert len({method.series for method in asked.methods}) == 4
    twins = [asked.methods[0], dataclasses.replace(asked.methods[0], name="again")]
    with pytest.raises(UserError, match="'Full cache, 5 at once' and 'again' share"):
        dataclasses.replace(asked, methods=tuple(twins)).check()


def test_table_and_report(tmp_path):
    records = [
        {"experiment": "throughput", "method": name, "batch_rule": rule}
        | {"format": 2, "new_tokens": new, "output_tokens_per_s": speed * new}
        | {"budget": 64, "engine": "kvjax"}
        for new in (3, 6)
        for name, rule, speed in (("ED", "ed", 2.0), ("Batch|Max", "batch_max", 5.0))
    ]
    table = report.overview(records)
    assert table.count(" 2.50 ") == 2 and table.count(" 1.00 ") == 2
    assert "| 30.0 | 2.50 |" in " ".join(table.split()) and "Batch\\|Max" in table
    path = report.write_report(records, tmp_path)
    page = " ".join(path.read_text().split())
    assert "| 30.0 | 2.50 |" in page and "Batch\\|Max" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "report.md",
        "throughput_vs_batch.png",
    ]
    labels = list(report.summary(records)["methods"])
    names = ("ED", "Batch|Max")
    assert labels == [f"{name} ({new} new)" for new in (3, 6) for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs/batch_max/paper.py:xsum"], "no 'xsum': write paper.py:NAME"),
        (
            ["configs/batch_max/random_8b.py", "--config.experiment=x"],
            "experiment 'x' is",
        ),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, arguments, message):
    config, *more = arguments
    command = ["experiments/run.py", f"--config={config}", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *command, *more],
        cwd=CONFIGS.parent,
        env=os.environ | {"PYTHONPATH": str(CONFIGS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
