"""Other libraries beside kvjax: the protocol, the search for a batch, the records.

None of it needs torch: a script plays the worker. The last test drives the real ones,
where KVJAX_BASELINE_PYTHON names an interpreter that has them.
"""

import json
import os
import pathlib
import random
import sys
import textwrap

import pytest

import kvjax
from kvjax.evaluation import report
from kvjax.evaluation.report.records import append_record, read_records
from kvjax.evaluation.tasks import text
from kvjax.models import presets
from kvjax.models.weights import hub
from kvjax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import baselines  # noqa: E402
from baselines import memory, presses, throughput  # noqa: E402
from baselines.throughput import Method  # noqa: E402

pytestmark = pytest.mark.e2e

LENGTH, NEW, PROMPTS = 10, 3, 9

WORKER = """\
    #!{python}
    # A model of {weights} bytes whose rows take `row` bytes, and less in chunks.
    import json, os, signal, sys

    def say(content):
        print(json.dumps(content), flush=True)

    def answer(request):
        if "methods" in request:
            return {{"weights": {weights}, "device": "cpu", "dtype": "float32",
                     "threads": 1, "versions": {{"kvpress": "1"}}}}
        batch = len(request["batches"][0])
        rehearsal = request["limit"] is not None
        if batch >= {dies_from} and rehearsal:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch >= {fails_from} and rehearsal or batch >= {fails_timed_from}:
            return {{"out_of_memory": "CUDA out of memory. Tried to allocate 1 GiB"}}
        row = {row_in_chunks} if request["chunk"] else {row}
        peak = {weights} + row * batch * (2 if request["retain_freed_memory"] else 1)
        rows = [row for rows in request["batches"] for row in rows]
        times = range(1, len(request["batches"]) + 1)
        seconds = 1 if request["chunk"] else {seconds}
        kept = {kept} or round(len(rows[0]) * (1 - (request["ratio"] or 0)) - 0.5)
        if request["policy"] is None:
            kept = len(rows[0])
        return {{"seconds": {{"prefill": [seconds * t for t in times],
                              "decode": [2 * seconds * t for t in times]}},
                 "bytes": {{"prefill": peak, "decode": peak - 1}},
                 "kept": [kept],
                 "tokens": [row[:1] * request["new"] for row in rows]}}

    assert sys.argv[1:] == ["-m", "baselines.worker"]
    say({{"torch": "2"}})
    sys.stdin.readline()
    say({{}})
    for line in sys.stdin:
        say(answer(json.loads(line)))
"""


@pytest.fixture
def fake(tmp_path):
    """Makes an interpreter that plays the worker."""
    defaults = {
        "row": 100,
        "row_in_chunks": 100,
        "dies_from": 10**6,
        "fails_from": 10**6,
        "fails_timed_from": 10**6,
        "seconds": 1,
        "kept": None,
    }

    def make(**changes):
        fields = defaults | changes | {"python": sys.executable, "weights": 1000}
        path = tmp_path / "python"
        path.write_text(textwrap.dedent(WORKER).format(**fields))
        path.chmod(0o755)
        return str(path)

    return make


PROMPT_LIST = [[i] * LENGTH for i in range(PROMPTS)]
KEY_DIFF = Method("key_diff", 4)


def measure(python, limit, method=KEY_DIFF, min_timed_batches=1, **rest):
    arguments = "model.gguf", [method], PROMPT_LIST, NEW, limit, min_timed_batches
    (record,) = throughput.measure(python, *arguments, **rest)
    return record


# ------------------------------------------------------------------ search for a batch


@pytest.mark.parametrize("limit", [1100, 1399, 1400, 1899, 1900, 9999])
def test_largest_batch_that_fits(fake, limit):
    record = measure(fake(), limit)
    assert record["batch_size"] == min((limit - 1000) // 100, PROMPTS)
    assert record["measured_bytes"] == 1000 + 100 * record["batch_size"] <= limit
    whole = record["batch_size"] == PROMPTS
    assert record["limited_by"] == ("prompts" if whole else "prefill")


def test_freed_memory_kept_is_timed_at_the_batch_that_fits_without(fake):
    record = measure(fake(), 1400, KEY_DIFF._replace(retain_freed_memory=True))
    assert record["method"] == "kvpress KeyDiff (4), freed memory kept"
    assert record["batch_size"] == 4
    assert record["measured_bytes"] == 1800 > record["memory_bytes"]


@pytest.mark.parametrize("limit", [1099, 500])
def test_nothing_fits(fake, limit):
    with pytest.raises(UserError, match=r"too small for one prompt of 10 tokens with"):
        measure(fake(), limit)


@pytest.mark.parametrize("reason", ["dies_from", "fails_from", "fails_timed_from"])
def test_memory_runs_out(fake, reason):
    """Killed, or told so: one row fewer than that; the worker is started again."""
    record = measure(fake(**{reason: 6}), 1800)
    assert record["batch_size"] == 5
    assert record["measured_bytes"] == 1500
    failed = [each for each in record["tried_batches"] if each["why"]]
    words = "the worker died (-9)" if reason == "dies_from" else "CUDA out of memory"
    assert failed and all(words in each["why"] for each in failed)


def test_dies_at_any_batch(fake):
    with pytest.raises(UserError, match="died"):
        measure(fake(dies_from=1), 1800)


@pytest.mark.parametrize("known", [True, False])
def test_search(known):
    """Finds the largest in few runs, with peaks or without, beside a fixed cost."""
    draw = random.Random(0)
    for _ in range(300):
        row, fixed = draw.uniform(1, 50), draw.uniform(0, 10)
        free, most = draw.randint(70, 5000), draw.randint(1, 200)
        trials = searched(row, fixed, free, most, known)
        assert memory.largest(trials) == min((free - fixed) // row, most)
        assert len(trials) <= (4 if known else 15)


def searched(row, fixed, free, most, known):
    """The trials of a search where rows take `row` bytes, and all of them `fixed`."""
    trials = []
    while batch := memory.next_batch(100, trials, 100 + free, most):
        size = {"prefill": 100 + fixed + row * batch} if known else {}
        why = "" if fixed + row * batch <= free else "too much"
        trials.append(memory.Trial(batch, size, why))
    return trials


# ------------------------------------------------------------------------------ records


def test_record(fake):
    record = measure(fake(), 1400, min_timed_batches=3, keep_tokens=True)
    assert record["tokens"] == [[i] * NEW for i in range(PROMPTS)]
    del record["tokens"]
    assert record == json.loads(json.dumps(record))
    told = {
        "experiment": "throughput",
        "method": "kvpress KeyDiff (4)",
        "engine": "kvpress",
        "policy": "key_diff",
        "budget": 4,
        "schedule": "after_prefill",
        "batch_size": 4,
        "limited_by": "prefill",
        "prompts": PROMPTS,
        "prompt_tokens": LENGTH,
        "new_tokens": NEW,
        "prefill_seconds": 2,
        "decode_seconds": 4,
        "prefill_seconds_all": [1, 2, 3],
        "decode_seconds_all": [2, 4, 6],
        # three batches of four, the last filled up with the first prompts
        "prefill_tokens_per_s": 4 * LENGTH / 2,
        "decode_tokens_per_s": 4 * NEW / 4,
        "output_tokens_per_s": 4 * NEW / 6,
        "measured_bytes": 1400,
        "memory_bytes": 1400,
        "model": "model",
        "attention": "sdpa",
        "device": "cpu",
        "provenance": {"versions": {"torch": "2", "kvpress": "1"}},
        "score": None,
        "kl": None,
    }
    assert {key: record[key] for key in told} == told


def test_record_stands_beside_ours(fake, tmp_path):
    """Our report takes it as it is."""
    ours = {
        "experiment": "throughput",
        "method": "ours",
        "policy": "key_diff",
        "output_tokens_per_s": 12.0,
        "batch_size": 8,
    }
    theirs = measure(fake(), 1400, Method())
    assert theirs["method"] == "transformers full cache"
    assert (theirs["engine"], theirs["schedule"]) == ("transformers", "none")
    assert theirs["budget"] is theirs["policy"] is None
    path = tmp_path / "records.jsonl"
    for record in (ours, theirs):
        append_record(path, record)
    page = report.write_report(read_records(path), tmp_path).read_text()
    assert "transformers full cache" in page and "12.0" in page
    assert "was tried" not in page  # of batches, which is no search for |kv|


@pytest.mark.parametrize(("seconds", "better"), [(0.1, None), (9, 4)])
def test_prompt_in_chunks(fake, monkeypatch, seconds, better):
    """Where it lets more rows in; the faster way is the record."""
    monkeypatch.setattr(throughput, "CHUNK", 4)
    python = fake(row=200, row_in_chunks=100, seconds=seconds)
    record = measure(python, 1600, Method())
    (other,) = record["alternatives"]
    assert record["prefill_chunk"] == better
    assert {record["prefill_chunk"], other["prefill_chunk"]} == {None, 4}
    assert {record["batch_size"], other["batch_size"]} == {3, 6}
    assert record["output_tokens_per_s"] > other["output_tokens_per_s"]
    assert measure(python, 1600)["alternatives"] == []  # a press reads all at once


# ------------------------------------------------------------------------------- errors


def test_press_that_keeps_too_many(fake):
    with pytest.raises(baselines.BaselineError, match=r"kept \[7\] pairs, not \[4\]"):
        measure(fake(kept=7), 1400)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, "methods"),
        ({"methods": [Method(), Method()]}, "each once"),
        ({"methods": [Method("h2o", 4)]}, "'h2o' has no press"),
        ({"methods": [Method("tova")]}, "budget None of tova"),
        ({"prompts": [[1, 2], [1]]}, r"prompts of \[1, 2\] tokens"),
        ({"prompts": [[]]}, "one length"),
        ({"new_tokens": 0}, "new_tokens 0"),
        ({"min_timed_batches": 0}, "min_timed_batches 0"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    given = {
        "methods": [Method()],
        "prompts": PROMPT_LIST,
        "new_tokens": 3,
        "memory_bytes": 10**9,
        "min_timed_batches": 1,
    }
    with pytest.raises(UserError, match=message):
        throughput.measure("no such python", "model.gguf", **(given | change))


def test_interpreter_is_missing(tmp_path):
    with pytest.raises(
        baselines.BaselineError, match=r"^--baseline_python: .*No such file"
    ):
        measure(str(tmp_path / "none"), 1400)


def script(tmp_path, source):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def test_package_is_missing(tmp_path):
    path = script(
        tmp_path, "import baselines; baselines.serve(['no_such_package'], None)"
    )
    with pytest.raises(
        baselines.BaselineError, match="No module named 'no_such_package'"
    ):
        baselines.Baseline(sys.executable, path)


def test_worker_says_something_else(tmp_path):
    with pytest.raises(baselines.BaselineError, match="no worker: 'Python"):
        baselines.Baseline(sys.executable, script(tmp_path, "print('Python 3')"))


def test_worker_dies(tmp_path):
    with pytest.raises(baselines.BaselineDied, match=r"died \(3\)"):
        baselines.Baseline(sys.executable, script(tmp_path, "raise SystemExit(3)"))


def test_worker_goes_when_nobody_asks_any_more(tmp_path):
    """Also in the middle of an answer."""
    slow = """
        import json, time
        from baselines import protocol
        asked = protocol.requests()
        print("{}", flush=True)
        print(json.dumps(next(asked)), flush=True)
        time.sleep(600)
    """
    with baselines.Baseline(sys.executable, script(tmp_path, slow)) as baseline:
        assert baseline.ask({"say": "x"}) == {"say": "x"}
    assert baseline.process.returncode == 0


ECHO = """
    import json
    from baselines import protocol
    asked = protocol.requests()
    print("{}", flush=True)
    for request in asked:
        print(json.dumps({"got": request}), flush=True)
"""


def test_what_a_worker_is_to_load(tmp_path, monkeypatch):
    """A file, or a shape: the other side has no kvjax to ask for it."""
    with baselines.Baseline(sys.executable, script(tmp_path, ECHO)) as baseline:
        asked = []
        monkeypatch.setattr(baseline, "ask", asked.append)
        for model in ("folder/model.gguf", "random:llama-3.1-8b"):
            source, name = throughput.source_of(model)
            baseline.load(source, device="best")
            assert name == ("random:llama-3.1-8b" if "random" in model else "model")
    assert asked[0] == {"device": "best"} | {"folder": "folder", "file": "model.gguf"}
    assert asked[1] == {"device": "best"} | {"config": presets.CONFIGS["llama-3.1-8b"]}
    with pytest.raises(UserError, match=r"'llama-9'.*llama-3\.1-8b"):
        throughput.source_of("random:llama-9")


def test_baselines_by_name(fake, tmp_path):
    """Budgets tell methods apart; what nothing tells apart is refused."""
    asked = [{"policy": "tova", "budget": 4}, {"policy": "tova", "budget": 8}]
    path = str(tmp_path / "model.gguf")
    found = throughput.joined(fake(), path, "float32", asked)
    assert list(found) == ["kvpress TOVA (4)", "kvpress TOVA (8)"]
    told = []
    say = lambda *step: told.append(step)
    record = found["kvpress TOVA (4)"](PROMPT_LIST, NEW, 1400, 1, say)
    assert (record["budget"], record["batch_size"], len(record["tokens"])) == (
        4,
        4,
        PROMPTS,
    )
    assert ("timing a batch of 4", 0) in told
    assert not any(units for _, units in told)
    for dtype, methods, message in (
        ("float32", asked + asked[:1], "each policy and budget once"),
        ("float32", [{"buget": 4}], "unknown field 'buget': fields are policy, budget"),
        ("bfloat16", asked, "baselines run in float32 on a CPU, kvjax in bfloat16"),
    ):
        with pytest.raises(UserError, match=message):
            throughput.joined(fake(), path, dtype, methods)
    with pytest.raises(UserError, match=r"--baseline_python: .*No such file"):
        throughput.joined(str(tmp_path / "none"), path, "float32", asked)


# ------------------------------------------------------------------------------- counts


def test_ratio_keeps_the_budget():
    """By kvpress' formula for what is kept (0.5.5, `compute_n_kept`)."""
    for tokens in (1, 2, 7, 120, 1000, 4096, 131_072):
        for budget in {1, 2, 3, tokens // 3, tokens // 2, tokens - 1} - {0, -1}:
            ratio = presses.ratio(budget, tokens)
            assert 0 <= ratio < 1
            assert max(1, int(tokens * (1 - ratio))) == min(budget, tokens)
        assert presses.ratio(tokens, tokens) == presses.ratio(2 * tokens, tokens) == 0


# ----------------------------------------------------------------- the real other side


def test_real_baselines_of_a_shape(monkeypatch):
    """Random weights on both sides: nothing to compare but sizes and speed."""
    python = os.environ.get("KVJAX_BASELINE_PYTHON")
    if not python:
        pytest.skip("KVJAX_BASELINE_PYTHON names no interpreter with torch and kvpress")
    shape = presets.CONFIGS["llama-3.1-8b"] | {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    monkeypatch.setitem(presets.CONFIGS, "toy", shape)
    prompts = [[random.Random(row).randrange(512) for _ in range(80)] for row in (0, 1)]
    methods = [Method(), Method("key_diff", 40)]
    given = python, "random:toy", methods, prompts, 4, 10**9, 1
    full, pressed = throughput.measure(*given, keep_tokens=True)
    for record in (full, pressed):
        assert record["model"] == "random:toy" and record["batch_size"] == 2
        assert [len(tokens) for tokens in record["tokens"]] == [4, 4]
        assert record["output_tokens_per_s"] > 0


@pytest.mark.model
def test_real_baselines(smollm2):
    """Same tokens as ours, and the right number of pairs kept."""
    python = os.environ.get("KVJAX_BASELINE_PYTHON")
    if not python:
        pytest.skip("KVJAX_BASELINE_PYTHON names no interpreter with torch and kvpress")
    words = smollm2.tokenizer(text.haystack(), verbose=False)["input_ids"]
    prompts = [words[:1000], words[1000:2000]]
    methods = [Method(), Method("key_diff", 100)]
    path = hub.fetch("smollm2-135m-instruct")
    found = throughput.measure(
        python, path, methods, prompts, 8, 10**9, 1, keep_tokens=True
    )
    schedules = kvjax.Schedule("none"), kvjax.Schedule("after_prefill")
    rules = None, kvjax.policies.key_diff()
    for record, policy, schedule in zip(found, rules, schedules, strict=True):
        ours = kvjax.generate(
            smollm2,
            prompts,
            policy=policy,
            budget=100,
            schedule=schedule,
            max_new_tokens=8,
            ignore_eos=True,
        )
        assert record["tokens"] == [each.tokens for each in ours]
        assert record["batch_size"] == 2
        assert record["measured_bytes"] > 538_060_032  # the weights
