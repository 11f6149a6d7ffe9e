"""The lm-evaluation-harness's generation requests, and its own interface."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from conftest import tiny_model
from testing import asking
from testing.asking import (
    CASES,
    HAS_HARNESS,
    Request,
    answering,
    ids,
    make_tokenizer,
    needs_harness,
    requests,
    words,
)
from testing.engine import run_batch

from kvjax import Offload, Schedule, policies
from kvjax.cache import codecs
from kvjax.cache.spec import make_spec
from kvjax.engine import api, jobs, stop_texts
from kvjax.engine.sampling import Sampling, SamplingSpec
from kvjax.types import UserError

pytestmark = pytest.mark.e2e

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}<stop> {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}w9{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    return asking.tiny()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.8)], ids=repr
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_pauses_change_nothing(model, case, sampling):
    """Pausing every 5 tokens to search stop texts does not change the tokens."""
    policy, phases = case
    schedule = Schedule(phases, 8, 8)
    config = make_spec(
        model.spec,
        policies.make(policy) if policy else None,
        24 if policy else None,
        schedule,
    )
    prompts = [ids(model, words(n, n)) for n in (3, 24, 61)]
    size = jobs.bucket(model.spec, config, 61, 18)
    spec = SamplingSpec(sampling.samples)
    whole = jobs.Job(model.spec, config, 4, size, 18, sampling=spec, eos=(11, 17))
    paused = dataclasses.replace(whole, decode_chunk=5)
    at_once, by_fives = (
        run_batch(model.params, job, prompts, range(3), seed=2, sampling=sampling)
        for job in (whole, paused)
    )
    assert by_fives.tokens == at_once.tokens
    assert max(map(len, at_once.tokens)) > 5
    for a, b in zip(at_once.state.layers, by_fives.state.layers, strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)


def test_stopped_rows_end_at_the_next_look(model):
    config = make_spec(model.spec, None, None)
    prompts = [ids(model, words(n, n)) for n in (3, 24)]
    job = jobs.Job(model.spec, config, 2, 128, 18, decode_chunk=5)
    whole = run_batch(model.params, job, prompts, range(2))
    long = len(whole.tokens[1]) == 18 and whole.tokens[0][:5] != whole.tokens[1][:5]
    assert long, "choose other prompts"
    found = run_batch(
        model.params,
        job,
        prompts,
        range(2),
        stop=lambda prompt, new: prompt == prompts[0] and len(new) >= 5,
    )
    assert found.tokens == [whole.tokens[0][:6], whole.tokens[1]], "looks at 1 and 6"


def plain(model, context, new, case=(None, "none"), **how):
    """Returns the text that the model generates without stop texts."""
    policy, phases = case
    schedule = Schedule(phases, 8, 8) if policy else None
    return api.generate(
        model,
        [context],
        policy=policies.make(policy) if policy else None,
        budget=24,
        schedule=schedule,
        max_new_tokens=new,
        **how,
    )[0].text


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: "-".join(map(str, case)))
def test_generation_is_cut_at_its_stops(model, case):
    contexts = [words(n, n) for n in (12, 35, 71)]
    texts = [plain(model, context, 40, case) for context in contexts]
    stop = " ".join(texts[0].split()[9:11])  # of two tokens
    asked = [
        *(Request((c, {"until": [stop], "max_gen_toks": 40})) for c in contexts),
        Request((contexts[1], {"until": "nothing", "max_gen_toks": 3})),
        Request((contexts[2], {"max_new_tokens": 40})),
    ]
    found = answering(model, *case).generate_until(asked, disable_tqdm=True)
    assert found[:3] == [text.partition(stop)[0] for text in texts]
    assert len(found[0]) < len(texts[0])
    assert found[3] == " " + " ".join(texts[1].split()[:3])
    assert found[4] == texts[2]


def test_special_tokens_stop_and_do_not_show():
    tokenizer = make_tokenizer()
    cut = lambda until, tokens: stop_texts.completed(tokenizer, until, [9], tokens)[0]
    tokens = [5, 6, 3, 7, 2, 8]  # w1 w2 <stop> w3 <eos> w4
    assert cut(("<stop>",), tokens).split() == ["w1", "w2"]
    assert cut(("<eos>",), tokens).split() == ["w1", "w2", "w3"]
    assert cut(("w3", "<eos>"), tokens).split() == ["w1", "w2"]
    assert cut((), tokens).split() == ["w1", "w2", "w3", "w4"]
    assert cut(("w1",), tokens) == " "  # what the new tokens add before the stop
    assert cut(("w1",), []) == ""


def test_sampling_follows_gen_kwargs(model):
    context = words(9, 9)
    warm = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "until": []}
    asked = [Request((context, warm))] * 3
    asked += [Request((context, warm | {"do_sample": False}))]
    lm = answering(model)
    found = lm.generate_until(asked, disable_tqdm=True)
    assert len(set(found)) == 4  # repeats of a request are samples of their own
    assert found[3] == plain(model, context, 12)
    assert found[0] == plain(model, context, 12, temperature=1.0)
    assert lm.generate_until(asked, disable_tqdm=True) == found
    assert answering(model, seed=1).generate_until(asked, disable_tqdm=True) != found
    with pytest.warns(UserWarning, match="gen_kwargs num_beams: not known"):
        lm.generate_until([Request((context, warm | {"num_beams": 4}))])


def test_long_prompts_leave_room_for_the_answer(model):
    small = model._replace(spec=dataclasses.replace(model.spec, context_length=32))
    given = {"max_gen_toks": 12, "until": []}
    with pytest.warns(UserWarning, match=r"1 of 1 contexts .* up to 10 tokens"):
        found = answering(small).generate_until(
            [Request((words(2, 30), given))], disable_tqdm=True
        )
    assert found == [plain(model, " ".join(words(2, 30).split()[-20:]), 12)]
    for new in (0, 32):
        with pytest.raises(UserError, match=f"max_gen_toks {new}"):
            answering(small).generate_until([Request(("w1", {"max_gen_toks": new}))])


def test_answers_are_handed_to_the_cache_hook(model):
    kept = []

    class Hook:
        def add_partial(self, *given):
            kept.append(given)

    lm = answering(model)
    lm.cache_hook = Hook()
    args = ("w1", {"max_gen_toks": 2, "until": []})
    text = lm.generate_until([Request(args)], disable_tqdm=True)[0]
    odds = lm.loglikelihood([Request(("w1", " w2"))], disable_tqdm=True)[0]
    total = lm.loglikelihood_rolling([Request(("w1 w2",))], disable_tqdm=True)[0]
    assert kept == [
        ("generate_until", args, text),
        ("loglikelihood", ("w1", " w2"), odds),
        ("loglikelihood_rolling", ("w1 w2",), total),
    ]


# --- chat templates and arguments ---------------------------------------------------


def with_template(model, template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return answering(model._replace(tokenizer=tokenizer))


def test_chat_template(model):
    lm = with_template(model, CHAT)
    said = [{"role": "user", "content": "w1"}]
    assert lm.chat_template(True) == CHAT and lm.chat_template(False) is None
    assert lm.apply_chat_template(said) == "<stop> w1 w9"
    answer = [*said, {"role": "assistant", "content": "w2"}]
    assert lm.apply_chat_template(answer, add_generation_prompt=False).endswith("w2")
    with pytest.warns(UserWarning, match="refuses a system message"):
        told = [{"role": "system", "content": "w5"}, *said]
        assert lm.apply_chat_template(told) == "<stop> w1 w9"
    with pytest.raises(UserError, match="has only one"):
        lm.chat_template("rag")
    with pytest.raises(UserError, match="has no chat template"):
        answering(model).chat_template(True)


def test_chat_template_by_name(model):
    lm = with_template(model, {"default": CHAT, "short": "{{ messages[0].content }}"})
    said = [{"role": "user", "content": "w1"}]
    assert lm.chat_template(True) == CHAT
    assert lm.apply_chat_template(said) == "<stop> w1 w9"
    lm.chat_template("short")
    assert lm.apply_chat_template(said) == "w1"
    with pytest.raises(UserError, match=r"'rag'.*default, short"):
        lm.chat_template("rag")


def test_arguments(model):
    lm = answering(
        model, "streaming", "decode_only", evict_size=4, **{"policy.sinks": 7}
    )
    assert lm.config.policy is policies.streaming(sinks=7)
    assert lm.config.schedule == Schedule("decode_only", 8, 4)
    assert answering(model, "h2o", budget=[24, 32]).config.budget == (24, 32)
    assert lm.get_model_info()["kv_schedule"] == "decode_only, 8, 4"
    assert lm.get_model_info()["kv_budget_rule"] == "uniform"
    share = {"budget": "50%", "prompt_tokens": 60, "budget_rule": "uniform"}
    assert answering(model, "h2o", **share).config.budget == (30, 30)
    told = {"budget_rule": "pyramid", "budget_rule.beta": 1.5}
    assert answering(model, "h2o", **told).config.budget == (32, 16)
    few_bits = {"codec": "int4", "codec.group": 4}
    assert answering(model, "h2o", **few_bits).config.codec == codecs.int4(4)
    few = {"offload": 8, "offload.device_layers": 1}
    found = answering(model, "h2o", **few)
    assert found.config.offload == Offload(8, 1)
    assert found.get_model_info()["kv_offload"]["top_n"] == 8
    assert lm.get_model_info()["kv_offload"] is None
    for size, most in (
        (1, None),
        ("auto", None),
        ("auto:4", None),
        ("8", 8),
        (None, None),
    ):
        assert answering(model, batch_size=size).most == most
    assert answering(model, batch_size=8, max_batch_size=3).most == 3
    assert answering(model, policy="full", device="cuda:0").config.policy is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "oldest"}, "'oldest'"),
        ({"sinks": 4}, "policy.sinks=..."),
        ({"policy.": 4}, "'policy.' is unknown"),
        ({"policy": "h2o", "policy.share": 4}, "share"),
        ({"policy": "h2o", "budget": None}, "needs a budget"),
        ({"budget": 24}, "full cache"),
        ({"policy": "h2o", "budget": "25"}, "budget is '25'"),
        ({"policy": "h2o", "budget": "25%"}, "'25%' .* give prompt_tokens"),
        ({"policy": "h2o", "budget": "25%", "prompt_tokens": 0}, "prompt_tokens 0"),
        ({"policy": "h2o", "budget": 24, "budget_rule": "ada"}, "give prompt_tokens"),
        ({"budget_rule.even": 1, "budget_rule": "pyramid"}, "'even'"),
        ({"policy": "h2o", "budget": 24, "schedule": "never"}, "never"),
        ({"codec": "int4", "codec.groups": 4}, "codec 'int4': .*'groups'"),
        ({"offload": 0}, "offload 0: must be at least 1"),
        ({"offload": 8, "offload.top": 3}, "offload has an unknown field 'top'"),
        ({"memory_gb": -1}, "memory_gb -1"),
    ],
)
def test_wrong_arguments(model, changes, message):
    with pytest.raises(UserError, match=message):
        answering(model, **changes)


def test_model_without_tokenizer():
    with pytest.raises(UserError, match="tiny has no tokenizer"):
        answering(tiny_model())


def test_tokenizer_without_ends(model):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    lm = answering(model._replace(tokenizer=tokenizer))
    given = {"max_gen_toks": 3, "until": ["w3"]}
    assert lm._generation(given).stop == ("w3",)
    tokenizer.bos_token = None
    with pytest.raises(UserError, match="neither BOS nor EOS"):
        answering(model._replace(tokenizer=tokenizer))


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_without_the_harness():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvjax.evaluation.lm_harness",
            "--model",
            "kvjax",
            "--tasks",
            "x",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: lm_eval is not installed: pip install")


# --- the harness itself -------------------------------------------------------------


def made_up_data(**_):
    """Three questions with three choices each, and their texts."""
    import datasets

    rows = [
        {"text": words(i, 20 + i), "choices": ["w1", "w2 w3", "w4"], "answer": i}
        for i in range(3)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def task(kind, **fields):
    common = {
        "task": f"made_up_{kind}",
        "custom_dataset": made_up_data,
        "output_type": kind,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
    }
    return common | fields


@needs_harness
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: "-".join(map(str, case)))
def test_tasks_of_all_kinds_run(model, case):
    """One task per kind of request; the metrics follow from our answers."""
    import lm_eval

    from kvjax.evaluation.lm_harness import model_class

    policy, phases = case
    given = {"schedule": phases, "budget": 24, "prefill_chunk": 8} if policy else {}
    lm = model_class()(model, policy=policy, memory_gb=0.05, **given)
    tasks = [
        task(
            "multiple_choice",
            doc_to_choice="choices",
            doc_to_target="answer",
            metric_list=[{"metric": "acc"}],
        ),
        task(
            "generate_until",
            generation_kwargs={"until": ["w3"], "max_gen_toks": 5},
            metric_list=[{"metric": "exact_match"}],
        ),
        task(
            "loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "word_perplexity"}],
        ),
    ]
    found = lm_eval.simple_evaluate(lm, tasks=tasks, bootstrap_iters=0)
    texts = [words(i, 20 + i) for i in range(3)]
    choices = [[(t, f" {c}") for c in ("w1", "w2 w3", "w4")] for t in texts]
    right = [
        np.argmax([a for a, _ in lm.loglikelihood(requests(c), True)]) == i
        for i, c in enumerate(choices)
    ]
    results = found["results"]
    assert results["made_up_multiple_choice"]["acc,none"] == np.mean(right)
    total = sum(lm.loglikelihood_rolling([Request((t,)) for t in texts], True))
    perplexity = np.exp(-total / sum(len(t.split()) for t in texts))
    rolled = results["made_up_loglikelihood_rolling"]["word_perplexity,none"]
    assert rolled == pytest.approx(perplexity, rel=1e-6)
    written = [s["resps"][0][0] for s in found["samples"]["made_up_generate_until"]]
    asked = [Request((t, {"until": ["w3"], "max_gen_toks": 5})) for t in texts]
    assert written == lm.generate_until(asked, True)
    assert found["config"]["kv_policy"] == policy


@needs_harness
def test_the_command_line_knows_kvjax():
    from lm_eval.api.registry import get_model

    from kvjax.evaluation import lm_harness

    lm_harness.register()
    lm_harness.register()
    assert get_model("kvjax") is lm_harness.model_class()
