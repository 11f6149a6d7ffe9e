"""Experiments whose budgets are shares of the prompt, divided between heads."""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest
from conftest import tiny_model, tiny_spec
from testing.prose import HAYSTACK, make_tokenizer

from kvjax.cache import calibrations, codecs, make_spec
from kvjax.cache.spec import checked
from kvjax.evaluation import run
from kvjax.evaluation.run import from_config
from kvjax.types import UserError

SHARES = ((0.25, 0.75), (0.625, 0.375))
METHODS = (
    {"name": "Full cache"},
    {"name": "by need", "budget_rule": {"name": "calibrated", "path": "mine.json"}},
    {"name": "alike", "budget_rule": "uniform", "budget": "50%"},
)
QUALITY = {
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.01,
    "seed": 0,
    "haystack": "texts",
    "budget": "60 %",
    "prefill_chunk": 8,
    "methods": METHODS[:1] + tuple({"policy": "key_diff"} | m for m in METHODS[1:]),
    "num_examples": 2,
    "max_new_tokens": 3,
    "tasks": ({"name": "needle", "prompt_tokens": 90},),
    "fidelity": {"num_windows": 1, "prompt_tokens": 120, "continuation_tokens": 3},
}
THROUGHPUT = {key: QUALITY[key] for key in QUALITY if key != "fidelity"} | {
    "experiment": "throughput",
    "min_timed_batches": 1,
    "methods": (
        {"batch_rule": "full"} | METHODS[0],
        *({"batch_rule": "batch_max", "policy": "key_diff"} | m for m in METHODS[1:]),
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts and a calibration; `run.load` returns a tiny model."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    found = calibrations.shipped("smollm2-135m-instruct")
    own = {"model": "tiny", "ratios": (0.5,), "shares": (SHARES,), "similarity": ()}
    dataclasses.replace(found, **own).save(tmp_path / "mine.json")
    model = tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_config(name):
    path = pathlib.Path(__file__).parents[2] / "configs" / name
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.get_config


@pytest.mark.parametrize("percent", ["50", "25", "12.5"])
def test_rules_of_the_comparison_share_out_as_much(percent):
    """`configs/heads.py`: every rule has the same total, and pins the same pairs."""
    fields = load_config("heads.py")(percent).to_dict()
    experiment = from_config(fields, {})
    experiment.check()
    spec = tiny_spec(num_layers=30, num_kv_heads=3, name="smollm2-135m-instruct")
    full, *methods = experiment.methods
    assert full.policy is None and full.cache.pinned is None and len(methods) == 42
    sizes = {each.name: checked(spec, each.cache, 1000) for each in methods}
    for name, config in sizes.items():
        mean = round(10 * float(percent))
        assert sum(config.head_budgets(spec)) == mean * 90, name
        sinks_or_window = {"Streaming": 4, "SnapKV": 32}.get(name.split(",")[0], 0)
        assert config.policy.num_pinned == 20 + sinks_or_window
        assert min(config.head_budgets(spec)) >= 40
    budgets = [sizes[name].budget for name in sizes if name.startswith("KeyDiff")]
    assert len(budgets) == 10  # an eighth needs no cap
    assert len(set(budgets)) == (9 if percent == "12.5" else 10)


def test_rules_of_the_survey():
    """`configs/perplexity.py`: every policy at every share, uniform over heads."""
    experiment = from_config(load_config("perplexity.py")().to_dict(), {})
    experiment.check()
    spec = tiny_spec(num_layers=30, num_kv_heads=3, name="smollm2-135m-instruct")
    full, *methods = experiment.methods
    assert full.policy is None and len(methods) == 9 * 5
    for method in methods:
        config = checked(spec, method.cache, 1000)
        assert set(config.head_budgets(spec)) == {round(1000 * method.share)}
        assert (config.schedule.evict_size, config.schedule.prefill_chunk) == (32, 32)
    assert {m.share for m in methods} == {0.2, 0.3, 0.4, 0.5, 0.6}
    assert experiment.fidelity.num_windows and len({m.policy for m in methods}) == 9


def test_rules_of_squeeze_attention():
    """`configs/squeeze/budgets.py`: each policy and share, with and without it."""
    experiment = from_config(load_config("squeeze/budgets.py")("0.4").to_dict(), {})
    experiment.check()
    spec = tiny_spec(num_layers=30, num_kv_heads=3, name="smollm2-135m-instruct")
    full, *methods = experiment.methods
    assert full.policy is None and len(methods) == 3 * 5 * 2
    configs = {method.name: checked(spec, method.cache, 500) for method in methods}
    for method in methods:
        config = configs[method.name]
        assert set(config.head_budgets(spec)) == {round(500 * method.share)}
        assert config.measures == ("squeezed" in method.name)
        schedule = config.schedule  # Algorithm 1: one goes for every new one
        assert (schedule.phases, schedule.evict_size) == ("decode_only", 1)
    assert {method.share for method in methods} == {0.1, 0.2, 0.4, 0.6, 0.8}
    few = from_config(load_config("squeeze/budgets.py")("0.4,20,80").to_dict(), {})
    shown = {method.share for method in few.methods if method.policy}
    assert shown == {0.2, 0.8} and len(few.methods) == 1 + 3 * 2 * 2


def test_batches_of_squeeze_attention():
    """`configs/squeeze/throughput.py`: the same total under every budget rule."""
    experiment = from_config(load_config("squeeze/throughput.py")().to_dict(), {})
    experiment.check()
    spec = tiny_spec(num_layers=30, num_kv_heads=3, name="smollm2-135m-instruct")
    methods = [method for method in experiment.methods if method.policy]
    assert len(experiment.methods) == 12 and len(methods) == 9
    sizes = {m.name: checked(spec, m.cache, 512).head_budgets(spec) for m in methods}
    assert {sum(each) for each in sizes.values()} == {round(0.2 * 512) * 90}
    assert set(sizes["H2O, squeezed, pool"]) == {36, 696}  # 27 layers lend to three
    schedules = {
        m.name: checked(spec, m.cache, 512).schedule for m in methods if "H2O" in m.name
    }
    assert len(schedules) == 6
    assert {(s.phases, s.evict_size) for s in schedules.values()} == {
        ("decode_only", 1)
    }


def records(folder, fields):
    return run.run(from_config(fields, {}), folder / "out", lambda *step: None)


@pytest.mark.e2e
def test_a_share_is_of_the_run_s_longest_prompt(folder):
    """The longest prompt over tasks and windows: here the windows' 120 tokens."""
    full, need, alike = records(folder, QUALITY)
    assert full["budget"] is full["budget_share"] is None and "sizes" not in full
    assert (need["budget"], need["budget_share"]) == (72, 0.6)
    assert need["budget_rule"] == "calibrated(path=mine.json)"
    own = calibrations.Calibration.load("mine.json")
    spec = tiny_model().spec
    sizes = own.sizes(spec, 72, length=120, floor=40, multiple=32)
    assert need["sizes"] == sizes.tolist() and np.ptp(sizes)
    told = [need[f"{which}_slots"] for which in ("mean", "smallest", "largest")]
    assert told == [72, sizes.min(), sizes.max()]
    assert (alike["budget"], alike["budget_share"]) == (60, 0.5)
    assert (alike["budget_rule"], alike["sizes"]) == ("uniform", None)
    assert alike["mean_slots"] == alike["smallest_slots"] == 60
    assert need["kl"] > 0 and need["num_examples"] == 2


@pytest.mark.e2e
def test_throughput_of_shares(folder):
    (need,) = records(folder, THROUGHPUT | {"methods": THROUGHPUT["methods"][1:2]})
    assert 80 < need["prompt_tokens"] <= 90 and need["output_tokens_per_s"] > 0
    assert need["budget"] == round(0.6 * need["prompt_tokens"]) and need["sizes"]


@pytest.mark.parametrize("budget", ["0%", "125%", "25", "a lot"])
@pytest.mark.parametrize("method", [False, True])
def test_no_such_share(folder, monkeypatch, budget, method):
    """The error comes before a model is loaded."""
    monkeypatch.setattr(run, "load", None)
    fields = QUALITY | {"budget": budget}
    if method:
        own = {"name": "own", "policy": "h2o", "budget": budget}
        fields = QUALITY | {"methods": (*QUALITY["methods"], own)}
    with pytest.raises(UserError, match=f"budget is {budget!r}: give pairs"):
        records(folder, fields)


@pytest.mark.parametrize("percent", ["50", "25", "12.5"])
def test_rules_in_equal_bytes(percent):
    """`configs/equal_bytes.py`: equal bytes, or all pairs if these take fewer."""
    experiment = from_config(load_config("equal_bytes.py")(percent).to_dict(), {})
    experiment.check()
    spec = tiny_spec(
        num_layers=30, num_kv_heads=3, head_dim=64, name="smollm2-135m-instruct"
    )
    full, *methods = experiment.methods
    assert full.policy is None and len(methods) == 4 * 4
    for method in methods:
        config = checked(spec, method.cache, 1000)
        pair = 4 + codecs.pair_bytes(config.codec, 64, "bfloat16")
        share = min(1.0, float(percent) / 100 * (4 + 2 * 2 * 64) / pair)
        assert abs(np.mean(config.head_budgets(spec)) - 1000 * share) <= 1


@pytest.mark.parametrize("percent", ["0", "-1", "101", "nan"])
def test_bytes_that_are_no_part_of_the_full_caches(percent):
    with pytest.raises(OSError, match=f"{percent}% of the bytes: write more than 0"):
        load_config("equal_bytes.py")(percent)


def test_blocks_are_larger_where_nothing_is_evicted_from_them():
    """`configs/heads.py`: `--config.prefill_chunk` sets only the smaller chunks."""
    fields = load_config("heads.py")("25")
    fields.prefill_chunk = fields.evict_size = 32
    blocks = {
        method.schedule.phases: method.schedule.prefill_chunk
        for method in from_config(fields.to_dict(), {}).methods
    }
    assert blocks == {"none": 64, "after_prefill": 64, "prefill_and_decode": 32}


def test_some_ways_to_share_out():
    """`configs/heads.py`: all rows, or those of the budget rules that are named."""
    get_config = load_config("heads.py")
    every, some = (get_config(f"12.5{more}").methods for more in ("", ",alike,by_head"))
    assert len(every) == 1 + 10 + 11 + 3 * 7 and len(some) == 1 + 5 + 4
    named = "Full cache", ", alike", ", by head"
    assert [*some] == [each for each in every if each["name"].endswith(named)]
    with pytest.raises(OSError, match="'head' shares nothing out: use alike, pyramid"):
        get_config("25,head")


def test_one_thing_changed_at_a_time():
    """`configs/reasoning.py`: rows keep their share; heads hold pinned pairs."""
    shipped = calibrations.__file__.replace("calibrations/__init__.py", "calibrated")
    get_config = load_config("reasoning.py")
    fields = get_config(f"{shipped}/smollm2-135m-instruct.json").to_dict()
    experiment = from_config(fields, {})
    experiment.check()
    full, *methods = experiment.methods
    assert full.policy is None and len(methods) == 14
    spec = tiny_spec(num_layers=30, num_kv_heads=3, name="smollm2-135m-instruct")
    for method in methods:
        heads = np.array(checked(spec, method.cache, 600).head_budgets(spec))
        assert heads.mean() == (300 if method.name.endswith("50") else 150)
        assert heads.min() >= sum(method.cache.pinned) + 16
    some = get_config("mine.json,key_diff_pinned,full").methods
    assert some[0]["name"] == "Full cache" and len(some) == 3
    with pytest.raises(OSError, match=r"no calibration: write reasoning\.py:FILE"):
        get_config()


@pytest.mark.parametrize("name", ["heads.py", "equal_bytes.py"])
def test_other_lengths_are_of_prompts_and_texts(name):
    """`prompt_tokens` also sets the texts' length, so that shares are equal."""
    fields = load_config(name)()
    fields.prompt_tokens = 2000
    experiment = from_config(fields.to_dict(), {})
    assert {task.prompt_tokens for task in experiment.tasks} == {2000}
    assert experiment.fidelity.prompt_tokens == 2000


@pytest.mark.parametrize("when", ["as_it_comes", "after_prompt"])
def test_codecs_that_are_compared(when):
    """`configs/codecs.py`: the same codecs, from the start or after the prompt."""
    experiment = from_config(load_config("codecs.py")(when).to_dict(), {})
    experiment.check()
    full, *methods = experiment.methods
    configs = [checked(tiny_spec(head_dim=64), m.cache, 1000) for m in methods]
    assert not full.policy and len(configs) == 12
    assert {c.codec.after_prompt for c in configs} == {when == "after_prompt"}
    told = {
        "as_it_comes": "int8(group=32)",
        "after_prompt": "after_prompt(codec=int8(group=32))",
    }
    assert methods[1].stored == told[when]
    same = make_spec(tiny_spec(head_dim=64), None, None, codec=codecs.int8(32))
    assert configs[1].codec.key is same.codec.key
    json.dumps(dataclasses.asdict(experiment))  # as a run's folder has it
    with pytest.raises(OSError, match="'never' is not"):
        load_config("codecs.py")("never")
