"""Budgets that are a share of the prompt, and heads that keep what they need of it."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import tiny_spec

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import budgets, calibrations, head_groups

NAME = "smollm2-135m-instruct"
SPEC = tiny_spec(name=NAME, num_layers=30, num_heads=9, num_kv_heads=3)


def config(budget, policy="key_diff", schedule=None, spec=SPEC, **options):
    return cache.make_spec(spec, policy, budget, schedule, **options)


def sizes(made):
    return np.reshape(made.head_budgets(SPEC), (30, 3))


def test_a_share_keeps_what_heads_need_where_that_is_known():
    made = config("25%", length=1000)
    assert made.budget_rule.name == "calibrated"
    found = sizes(made)
    assert found.sum() == 250 * 90
    assert found.min() == 48 and found.max() > 900
    assert made.policy == policies.protect(policies.key_diff(), 4, 16)
    shipped = calibrations.shipped(NAME)
    expected = shipped.sizes(SPEC, 250, length=1000, floor=48, multiple=64)
    np.testing.assert_array_equal(found, expected)
    assert len(set(found.flat)) <= 17  # every size is compiled
    assert made.schedule.prefill_chunk == 16  # half of the smallest head


def test_a_rule_says_how_far_its_share_is_kept_alike():
    rule = policies.retrieval_heads()
    found = sizes(config("25%", rule, length=1000))
    shipped = calibrations.shipped(NAME)
    how = {"length": 1000, "floor": 48, "multiple": 64, "even": 0.25}
    np.testing.assert_array_equal(found, shipped.sizes(SPEC, 250, **how))
    for wrapped in (
        policies.protect(rule, 4, 16),
        policies.smooth(rule),
        policies.criticalkv(policy=rule),
    ):
        assert wrapped.even == 0.25
    with pytest.raises(UserError, match=r"even.* 1\.5"):
        config("25%", rule._replace(even=1.5), length=1000)


def test_a_share_leaves_room_for_pinned_pairs():
    made = config("25%", policies.snapkv(), "after_prefill", length=1000)
    assert sizes(made).min() == 64  # 32 of its own, 20 of all, and some more
    made = config(
        "25%",
        policies.protect(policies.h2o(), 4, 32),
        Schedule(evict_size=32),
        length=1000,
    )
    assert sizes(made).min() == 96  # 36 + 20 pinned, 32 evicted, and some more
    made = config("25%", "h2o", Schedule(prefill_chunk=64), length=1000)
    assert sizes(made).min() == 128  # an eviction leaves half of it
    made = config("25%", "h2o", Schedule("prefill_only", 64), length=1000)
    assert sizes(made).min() == 128  # likewise
    few = config("50%", length=40)
    assert sizes(few).sum() == 20 * 90  # below the least size: all alike


def test_a_share_is_uniform_where_heads_may_not_differ():
    assert config("25%", "simlayerkv", length=1000).budget == (250,) * 30
    assert config("12.5 %", budget_rule="uniform", length=1000).budget == (125,) * 30


def test_other_models_are_told_the_command(tiny):
    words = r"no calibration of the weights of tiny .*kvjax\.calibrate\(model\)"
    with pytest.warns(UserWarning, match=words):
        made = config("50%", spec=tiny.spec, length=64)
    assert made.budget == (32, 32)
    prompts = [[1, 2, 3] * 20, [4] * 30]
    how = {"policy": "h2o", "schedule": "after_prefill", "budget_rule": "uniform"}
    how |= {"max_new_tokens": 4}
    done = kvjax.generate(tiny, prompts, budget="50%", **how)
    assert {len(head) for layer in done[0].kept_positions for head in layer} == {33}
    plan = kvjax.plan(tiny, prompt_tokens=60, budget="50%", memory_gb=0.1, **how)
    assert plan.job.config.budget == (30, 30)


def own(**changes):
    """A calibration of the tiny model, by its name."""
    fields = {
        "model": "tiny",
        "fingerprint": "1" * 16,
        "ratios": (0.5,),
        "shares": (((0.25, 0.75), (0.625, 0.375)),),
        "similarity": (),
    }
    return dataclasses.replace(calibrations.shipped(NAME), **(fields | changes))


@pytest.mark.parametrize("policy", ["key_diff", "retrieval_heads", "snapkv"])
@pytest.mark.parametrize("percent", ["50%", "25%", "12.5%"])
def test_a_path_is_a_share(tmp_path, policy, percent):
    """A file of the user's gives what the same calibration of the package does."""
    path, shipped = tmp_path / "mine.json", calibrations.shipped(NAME)
    shipped.save(path)
    spec = dataclasses.replace(SPEC, fingerprint=shipped.fingerprint)
    how = {"policy": getattr(policies, policy)(), "length": 1000, "spec": spec}
    expected = config(percent, **how)
    assert expected.policy.name.startswith("protect(") and len(set(expected.budget)) > 1
    for rule in (
        budgets.make("calibrated", path=str(path)),
        budgets.make("calibrated", path=path, target=None),
        shipped,
    ):
        made = config(percent, budget_rule=rule, **how)
        assert made.budget == expected.budget and made.policy == expected.policy
        assert made.schedule == expected.schedule
        pairs = round(float(percent[:-1]) * 10)
        assert config(pairs, budget_rule=rule, **how).budget == expected.budget


def test_a_floor_leaves_the_policy_alone():
    made = config(250, length=1000, budget_rule=budgets.make("calibrated", floor=40))
    assert made.policy == policies.key_diff() and sizes(made).min() == 40
    rule = budgets.make("calibrated", floor=40)
    heads = config(250, policies.retrieval_heads(), length=1000, budget_rule=rule)
    assert heads.budget == made.budget  # nor does it ask how even


def test_weights_that_were_calibrated(tiny, own_calibrations):
    """Found by them, not by a name; others of the same name and shape are refused."""
    spec = dataclasses.replace(tiny.spec, name="renamed", fingerprint="1" * 16)
    calibrations.keep(own())
    made = config("50%", spec=spec, length=200)
    assert made.budget_rule.name == "calibrated"
    expected = own().sizes(spec, 100, length=200, floor=48, multiple=32)
    assert made.budget == tuple(map(tuple, expected.tolist()))
    others = dataclasses.replace(tiny.spec, fingerprint="2" * 16)
    with pytest.warns(UserWarning, match="no calibration of the weights of tiny"):
        assert config("50%", spec=others, length=200).budget == (100, 100)
    path = calibrations.kept_path(own())
    for given in (own(), budgets.make("calibrated", path=path)):
        with pytest.raises(UserError, match=r"other weights .1111\w+. .*2222"):
            config("50%", spec=others, length=200, budget_rule=given)
    with pytest.raises(UserError, match=r"no calibration of the .* kvjax\.calibrate"):
        config("50%", spec=others, length=200, budget_rule="ada")


def test_a_rule_from_a_file(tiny, tmp_path):
    """As a config names it."""
    own().save(tmp_path / "mine.json")
    path = str(tmp_path / "mine.json")
    named = rule("calibrated", length=64, path=path, floor=8, multiple=8)
    made = config(32, spec=tiny.spec, budget_rule=named)
    assert made.budget == ((16, 48), (40, 24))
    assert made.heads(tiny.spec) == (((0,), (1,)), ((1,), (0,)))
    assert head_groups.distinct_sizes(made.budget) == {16, 24, 40, 48}
    found = json.loads((tmp_path / "mine.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(found | {"model": "other"}))
    with pytest.raises(UserError, match=r"'other'.*does not fit 'tiny'"):
        config(32, spec=tiny.spec, budget_rule=named)


def test_what_shares_out_pairs():
    """Layers, whose heads are alike then; or the heads of each layer."""
    layers = config(250, budget_rule=rule("calibrated", among="layers"))
    assert all(isinstance(each, int) for each in layers.budget)
    assert sum(layers.budget) == 250 * 30 and len(set(layers.budget)) > 3
    within = config(250, budget_rule=rule("ada"))
    assert within.budget_rule.name == "ada"
    found = sizes(within)
    assert set(found.sum(axis=1)) == {750} and found.min() >= 32
    assert (found.max(axis=1) > found.min(axis=1)).mean() > 0.5
    even = config(250, budget_rule=rule("ada", even=0.2))
    assert sizes(even).std() < found.std()
    assert config(250, budget_rule=rule("ada", even=1)).budget == (250,) * 30
    assert config(250, "tova", budget_rule=rule("calibrated", among="layers")).budget


@pytest.mark.parametrize("name", ["calibrated", "ada"])
def test_a_rule_is_told_the_length(name):
    """By `make_spec`, which is told it, where nobody has told the rule."""
    told = config(250, budget_rule=rule(name))
    assert config(250, budget_rule=name, length=1000).budget == told.budget
    assert config("25%", budget_rule=name, length=1000).budget == told.budget
    assert config(250, budget_rule=rule(name), length=2000).budget == told.budget
    with pytest.raises(UserError, match=f"rule '{name}' .* as in length=1000"):
        config(250, budget_rule=name)


def rule(name, **options):
    return budgets.make(name, **{"length": 1000, **options})


@pytest.mark.parametrize("name", ["calibrated", "ada"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, r"\(length\) 0: must be at least 1"),
        ({"length": "many"}, r"\(length\) is 'many'"),
        ({"path": 3}, r"\(path\) is 3: give a calibration's file"),
        ({"floor": 0}, r"\(floor\) 0"),
        ({"multiple": 0}, r"\(multiple\) 0"),
        ({"even": 1.1}, r"\(even\) 1\.1: must be at most 1"),
        ({"even": "half"}, r"\(even\) is 'half'"),
        ({"evens": 1}, "unexpected keyword argument 'evens'"),
    ],
)
def test_options_refused(name, options, words):
    with pytest.raises(UserError, match=f"{name}.*{words}"):
        rule(name, **options)


def test_calibrations_by_other_targets():
    """Those that are known are by one of three; a file says its own."""
    by_loss, by_need = (
        config(250, budget_rule=rule("calibrated", target=target)).budget
        for target in ("loss", "repetition")
    )
    assert by_loss != by_need == config(250, budget_rule=rule("calibrated")).budget
    with pytest.raises(UserError, match="target is 'mass': use one of"):
        rule("calibrated", target="mass")
    with pytest.raises(UserError, match=r"target='loss'\) is of no file: give path or"):
        rule("calibrated", target="loss", path="mine.json")
    with pytest.raises(
        UserError, match="no calibration by loss of the weights of tiny"
    ):
        config(250, spec=tiny_spec(), budget_rule=rule("calibrated", target="loss"))


def test_nobody_else_shares_out():
    with pytest.raises(UserError, match=r"among is 'rows': use one of \('heads'"):
        rule("calibrated", among="rows")


@pytest.mark.parametrize(
    ("budget", "length", "words"),
    [
        ("25", 100, "budget is '25': give pairs per head"),
        ("a lot", 100, "budget is 'a lot'"),
        ("0%", 100, "budget is '0%'"),
        ("101%", 100, "budget is '101%'"),
        ("-3%", 100, "budget is '-3%'"),
        ("25%", None, "whose length is not known here"),
    ],
)
def test_refused(budget, length, words):
    with pytest.raises(UserError, match=words):
        config(budget, length=length)
