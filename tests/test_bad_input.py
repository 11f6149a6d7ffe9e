"""Every mistake ends in one line that names the value and the remedy, early."""

import numpy as np
import pytest
from conftest import tiny_spec

import kvjax
from kvjax import Schedule, UserError, cache, policies
from kvjax.cache import budgets, codecs
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled
from kvjax.engine.memory import device_memory
from kvjax.engine.sampling import Sampling

SPEC = tiny_spec()
RULE = {"policy": "recency"}


def rule_of(sizes, smallest=None):
    return budgets.BudgetRule("own", lambda spec, mean: sizes, smallest=smallest)


def broken(x):
    raise RuntimeError("no")


BROKEN = codecs.Codec(
    "mine", codecs.plain._replace(name="broken", encode=broken), codecs.plain
)


def compress(**changes):
    given = {
        "policy": policies.recency(),
        "budget": 32,
        "schedule": Schedule(prefill_chunk=8, evict_size=8),
    }
    return make_spec(SPEC, **(given | changes))


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
        ({"rows_per_eviction": "4"}, ["rows_per_eviction is '4'", "whole number"]),
        ({"rows_per_eviction": 2.5}, ["rows_per_eviction is 2.5"]),
        ({"rows_per_eviction": 0}, ["rows_per_eviction 0", "at least 1"]),
        ({"implementation": 5}, ["implementation is 5", "reference"]),
        ({"budget": "25%", "length": "abc"}, ["length is 'abc'", "whole number"]),
        ({"budget": "25%", "length": 0}, ["length 0", "at least 1"]),
        ({"mean_budget": 3, "foo": 1}, ["unknown field 'foo'", "eviction"]),
        ({"offload": {"renormalize": "no"}}, ["renormalize is 'no'", "True or False"]),
        ({"budget_rule": rule_of(None)}, ["'own' gives None", "every layer"]),
        ({"budget_rule": rule_of((None, 64))}, ["(None, 64)", "32 x 2 = 64"]),
        ({"budget_rule": rule_of((np.nan, 32))}, ["(nan, 32)", "32 x 2 = 64"]),
        ({"budget_rule": rule_of((24.5, 39.5))}, ["add up to 64.0", "whole numbers"]),
        ({"budget_rule": rule_of((24, 39))}, ["add up to 63", "32 x 2 = 64"]),
        ({"budget_rule": rule_of((32, 32), lambda m: 8.5)}, ["budget is 8.5"]),
        ({"codec": BROKEN}, ["'mine': broken: encode raises RuntimeError: no"]),
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
        (lambda: policies.make("h2o", share=0.2), ["h2o", "share", "takes recent"]),
        (lambda: policies.h2o(recnt=8), ["policy 'h2o'", "'recnt'", "takes recent"]),
        (lambda: policies.recency(1), ["'recency'", "too many", "takes no options"]),
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
        (lambda: policies.per_head(policies.h2o(), total=0), ["total=0", "above 0"]),
        (lambda: policies.make("h2o", recent="half"), ["'half'", "0 to 1"]),
        (lambda: policies.make(5), ["policy is 5", "key_diff"]),
        (lambda: policies.random(0.2), ["random(seed) is 0.2", "whole number"]),
        (lambda: policies.criticalkv(epsilon=np.inf), ["epsilon=inf", "finite"]),
        (lambda: policies.make("criticalkv", policy="tova"), ["'tova'", "h2o()"]),
        (lambda: policies.protect(policies.h2o), ["'h2o' is no Policy", "h2o()"]),
        (lambda: policies.smooth("h2o"), ["'h2o' is no Policy"]),
        (lambda: policies.chunked("h2o"), ["'h2o' is no Policy"]),
        (lambda: policies.shared_heads("h2o"), ["'h2o' is no Policy"]),
        (lambda: policies.per_head("h2o"), ["'h2o' is no Policy"]),
        (lambda: policies.mix("h2o", policies.tova()), ["'h2o' is no Policy"]),
        (lambda: policies.by_size(policies.h2o(), "tova"), ["'tova' is no Policy"]),
        (lambda: policies.protect(policies.recency(), recent=-2), ["-2"]),
        (lambda: budgets.make("explicit", sizes=64), ["explicit(sizes=64)", "layer"]),
        (lambda: codecs.kivi(bits=4.0), ["kivi bits is 4.0", "whole number"]),
        (lambda: Schedule().of_budget(32.5), ["budget is 32.5", "whole number"]),
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
        ([[1]] + [[1] * 250] * 3, {"max_new_tokens": 10}, ["prompt 1 has 250", "256"]),
        ([[1] * 250], {"max_new_tokens": 10}, ["to 246", "truncate='left'"]),
        ([[1]], {"max_new_tokens": 256}, ["max_new_tokens 256", "256", "fewer"]),
        ([[1]], {"truncate": "right"}, ["'right'", "error, left, middle"]),
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
        ([[1]], {**RULE, "schedule": 4}, ["schedule is 4", "Schedule("]),
        ([[1]], {**RULE, "schedule": {"when": "none"}}, ["unknown field 'when'"]),
        ([[1]], {"num_beams": 0}, ["num_beams 0"]),
        ([[1]], {"num_beams": 2, "num_samples": 3}, ["num_samples 3 of num_beams 2"]),
        ([[1]], {"num_beams": 2, "stop": "a"}, ["stop ('a',) beside num_beams 2"]),
        ([[1]], {"stop": ["a"]}, ["stop is ('a',)", "no tokenizer"]),
        ([[1]], {"stop": ["a", ""]}, ["stop is ['a', '']", "not empty"]),
        ([[1]], {"min_p": 2}, ["min_p 2"]),
        ([[1]], {"polcy": "h2o"}, ["'polcy' is unknown", "did you mean 'policy'"]),
        ([[1]], {"cache": "h2o"}, ["cache is 'h2o'", "give a kvjax.CacheConfig"]),
        (
            [[1]],
            {"cache": kvjax.CacheConfig("h2o"), "budget": 64},
            ["budget=64 beside cache=", "kvjax.CacheConfig"],
        ),
        (
            [[1]],
            {"sampling": kvjax.Sampling(), "top_k": 5},
            ["top_k=5 beside sampling=", "kvjax.Sampling"],
        ),
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

    config = make_spec(SPEC, None, None, Schedule("none", prefill_chunk=8))
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
