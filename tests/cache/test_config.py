"""`CacheConfig`: one meaning, however its parts are spelled."""

import numpy as np
import pytest
from conftest import tiny_spec

import kvjax
from kvjax import CacheConfig, Schedule, cache, policies
from kvjax.cache import budgets, codecs
from kvjax.types import UserError

SPEC = tiny_spec(head_dim=16)


def test_names_dicts_and_objects_make_one_spec():
    objects = CacheConfig(
        policies.snapkv(window=4),
        24,
        budgets.pyramid(beta=2.0),
        Schedule("after_prefill", 8),
        codec=codecs.int8(16),
        offload=None,
    )
    dicts = CacheConfig(
        {"name": "snapkv", "window": 4},
        24,
        {"name": "pyramid", "beta": 2.0},
        {"phases": "after_prefill", "prefill_chunk": 8},
        codec={"name": "int8", "group": 16},
    )
    made = cache.checked(SPEC, objects)
    assert made == cache.checked(SPEC, dicts)
    assert hash(dicts) == hash(CacheConfig(**vars(dicts)))
    assert made.policy is policies.snapkv(window=4) and made.codec == codecs.int8(16)
    assert str(dicts.codec) == "int8(group=16)" and str(dicts.policy) == (
        "snapkv(window=4)"
    )


def test_options_may_be_codecs_with_options():
    inner = {"name": "int4", "group": 16}
    config = CacheConfig(codec={"name": "after_prompt", "codec": inner})
    assert cache.checked(SPEC, config).codec.name == "int4_after_prompt"
    assert str(config.codec) == "after_prompt(codec=int4(group=16))"


def test_everything_that_a_spec_says_can_be_said():
    """Of a cache; what is left follows from the model and the budget."""
    said = {field.name for field in CacheConfig.__dataclass_fields__.values()}
    kept = {field.name for field in cache.CacheSpec.__dataclass_fields__.values()}
    assert kept - said == {"mean_budget", "windows", "layer_codecs"}
    assert said - kept == {"pinned"}


@pytest.mark.parametrize(
    ("pinned", "held"), [(None, 20), ((2, 8), 10), ([0, 0], 0)], ids=str
)
def test_pinned_pairs_are_the_rules_or_the_users(pinned, held):
    """Sizes by a calibration rest on the first 4 and the newest 16 pairs."""
    name = "smollm2-135m-instruct"  # which comes with a calibration
    spec = tiny_spec(name=name, num_layers=30, num_heads=9, num_kv_heads=3)
    config = CacheConfig("key_diff", 512, "calibrated", pinned=pinned)
    made = cache.checked(spec, config, length=1000)
    assert made.policy.num_pinned == held
    assert len(set(made.head_budgets(spec))) > 1
    uniform = cache.checked(spec, CacheConfig("key_diff", 512, pinned=pinned))
    assert uniform.policy.num_pinned == (held if pinned else 0)


def test_generate_and_plan_take_it_whole_or_by_its_fields(tiny):
    fields = {
        "policy": "h2o",
        "budget": 16,
        "codec": {"name": "int8", "group": 8},
        "layout": "dense",
    }
    config, prompts = CacheConfig(**fields), [list(range(1, 40))]
    whole = kvjax.generate(
        tiny, prompts, kvjax.Sampling(max_new_tokens=8), cache=config
    )
    short = kvjax.generate(tiny, prompts, max_new_tokens=8, **fields)
    assert whole[0].tokens == short[0].tokens
    np.testing.assert_equal(whole[0].kept_positions, short[0].kept_positions)
    plans = [
        kvjax.plan(tiny, prompt_tokens=40, max_batch=2, memory_gb=1, **each)
        for each in ({"cache": config}, fields)
    ]
    assert plans[0].job == plans[1].job


def test_the_full_cache_ignores_a_budget():
    assert cache.checked(SPEC, CacheConfig(None, 64)).budget is None
    with pytest.raises(UserError, match="without a budget: got budget 64"):
        cache.make_spec(SPEC, None, 64)


def test_the_earlier_name_works():
    with pytest.warns(DeprecationWarning, match="make_spec"):
        assert cache.make_config is cache.make_spec
