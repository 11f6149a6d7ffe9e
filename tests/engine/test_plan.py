"""The plan's arithmetic against the compiled programs and against plain sums."""

import dataclasses

import pytest
from conftest import often, tiny_spec

from kvjax import Schedule, UserError, plan, policies
from kvjax.attention import reference
from kvjax.cache.spec import make_spec
from kvjax.engine import jobs, memory, planner
from kvjax.engine.footprint import phase_bytes, state_bytes, weights_bytes
from kvjax.engine.jobs import Job, bucket
from kvjax.engine.planner import plan_by_shapes, plan_job
from kvjax.parallel import limits, meshes

SPEC = tiny_spec(num_layers=3, head_dim=16, context_length=4096)
BATCH_MAX = Schedule(prefill_chunk=8, evict_size=8)
ED = Schedule("decode_only", prefill_chunk=8, evict_size=1)
FULL = Schedule("none", prefill_chunk=8)


def planned(budget, schedule, policy, memory_bytes, **changes):
    given = {"policy": policy, "budget": budget, "schedule": schedule}
    sizes = {"prompt_tokens": 1024, "max_new_tokens": 64}
    return plan(SPEC, memory_gb=memory_bytes / 1e9, **(given | sizes | changes))


def test_state_bytes_are_the_formula():
    """2 L K D S B bytes, and 4 bytes of position per slot and head."""
    config = make_spec(SPEC, None, None, FULL)
    job = Job(SPEC, config, 5, bucket(SPEC, config, 1000, 24), 24)
    slots = 1024 + 24
    pairs = 2 * 3 * 2 * 16 * slots * 5 * 4
    positions = 3 * 2 * slots * 5 * 4
    rows, errors = 5 * 4, 5 * 2 * 4
    assert state_bytes(job)["prefill"] == pairs + positions + rows + errors


METHODS = [
    (256, BATCH_MAX, policies.average_attention()),
    (None, FULL, None),
    (2, ED, policies.recency()),
]


@pytest.mark.parametrize(
    ("budget", "schedule", "policy"),
    often(METHODS, METHODS[:1], others="e2e", several=True),
)
def test_largest_batch_that_fits(monkeypatch, budget, schedule, policy):
    """What is planned fits by the compiler's own count, and one row more does not.

    With scores of one row at a time, as large models have them: temporaries that stop
    growing between the probes and the answer make for a smaller one.
    """
    monkeypatch.setattr(reference, "PIECE", 0)
    found = planned(budget, schedule, policy, 40_000_000)
    assert found.batch >= 1 and found.limited_by in ("prefill", "compact", "decode")
    assert found.peak_bytes == max(phase_bytes(found.job).values()) <= 40_000_000
    larger = dataclasses.replace(found.job, batch=found.batch + 2)
    assert max(phase_bytes(larger).values()) > 40_000_000


@pytest.mark.e2e
def test_full_prefill_limits_all_but_batch_max():
    """The paper's point: ED is no better off than the full cache, Batch-Max is."""
    memory = 40_000_000
    full = planned(None, FULL, None, memory)
    ed = planned(2, ED, policies.recency(), memory)
    batch_max = planned(256, BATCH_MAX, policies.average_attention(), memory)
    assert batch_max.batch > 1.8 * full.batch
    assert ed.batch < 1.2 * full.batch
    assert ed.limited_by in ("prefill", "compact")
    longer = planned(
        256, BATCH_MAX, policies.average_attention(), memory, prompt_tokens=4000
    )
    assert longer.batch == batch_max.batch


def test_a_model_and_its_shape_get_the_same_plan(tiny, capsys):
    """With names for policy and schedule, its own dtype, and the whole context."""
    how = {"policy": "h2o", "budget": 64, "memory_gb": 0.01, "max_batch": 8}
    found = plan(tiny, schedule="after_prefill", show_progress=True, **how)
    of_shape = plan(
        tiny.spec, schedule=Schedule("after_prefill"), prompt_tokens=192, **how
    )
    assert found == of_shape and found.programs is of_shape.programs
    assert found.job.max_prompt_len == 256 and found.job.dtype == "float32"
    assert "compiling for a batch of" in capsys.readouterr().err
    text = repr(found)
    assert len(text) < 300 and f"batch of {found.batch} for tiny" in text


@pytest.mark.parametrize("schedule", ["prefill_and_decode", "after_prefill"])
def test_generate_takes_the_longest_prompt_of_a_plan(tiny, schedule):
    """And it runs in the batch that was planned."""
    how = {"policy": "h2o", "budget": 64, "schedule": schedule, "max_batch": 2}
    found = plan(tiny, max_new_tokens=16, prompt_tokens=240, **how)
    room = tiny.spec.context_length - 16
    assert found.longest_prompt == room
    assert f"prompts of up to {room} tokens and 16 new" in repr(found)
    shared = jobs.bucket(tiny.spec, found.job.config, found.longest_prompt, 16)
    assert shared == found.job.max_prompt_len
    with pytest.raises(UserError, match=f"a prompt of {room + 1} tokens and 16 new"):
        jobs.bucket(tiny.spec, found.job.config, room + 1, 16)


def test_progress_warns_that_heads_of_many_sizes_compile_long(tiny):
    """Parts, and shapes, by hand: three parts of three; four, two of them alike."""
    price = lambda budget: planner._price(
        make_spec(tiny.spec, "key_diff", budget, "after_prefill")
    )
    assert price(64) == price((64, 64)) == ""
    assert price(((64, 96), 128)).startswith(": heads of 3 sizes, about 10 s of CPU")
    assert price(((64, 96), (96, 64))).startswith(": heads of 2 sizes, about 9 s of")


def test_prompts_limit_the_batch():
    found = planned(256, BATCH_MAX, policies.recency(), 10**9, max_batch=3)
    assert (found.batch, found.limited_by) == (3, "prompts")


def test_layer_by_layer_counts_the_hidden_states_of_prompts():
    """Of 64 pairs they take more than the cache does."""
    policy = policies.average_attention()
    config = make_spec(SPEC, policy, 64, BATCH_MAX)
    job = Job(SPEC, config, 1, bucket(SPEC, config, 4000, 24), 24)
    found = plan_by_shapes(job, 20_000_000, 100)
    hidden = 4000 * SPEC.model_dim * 4
    row = state_bytes(job)["prefill"] + hidden
    assert hidden > state_bytes(job)["prefill"]
    assert weights_bytes(job) + found.batch * row <= 20_000_000
    assert 1 < found.batch < 100


MANY = str(2**63 - 4096)
NEW = ("memory.max", "memory.current", "memory.stat")
OLD = [f"memory/memory.{x}" for x in ("limit_in_bytes", "usage_in_bytes", "stat")]


@pytest.mark.parametrize(
    ("files", "texts", "free"),
    [
        (NEW, ("6000000", "4000000", "inactive_file 1000000\nanon 5"), 3_000_000),
        (OLD, ("6000000", "4000000", "total_inactive_file 1000000"), 3_000_000),
        (NEW, ("6000000", "6500000", "anon 5"), 0),
        (NEW, ("max", "4000000", ""), 8_192_000),
        (OLD, (MANY, "4000000", ""), 8_192_000),
        ((), (), 8_192_000),
    ],
)
def test_free_memory_is_the_container_s(tmp_path, monkeypatch, files, texts, free):
    (tmp_path / "memory").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    for file, text in zip(files, texts, strict=True):
        (tmp_path / file).write_text(text + "\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    assert memory.host_memory() == free // 2
    assert memory.device_memory() == free // 2 // 8  # virtual devices share it


def test_too_little_memory_names_what_is_needed():
    with pytest.raises(UserError, match=r"1e-05 GB is too small for one row of tiny"):
        planned(256, BATCH_MAX, policies.recency(), 10_000)
    config = make_spec(SPEC, policies.recency(), 256, BATCH_MAX)
    job = Job(SPEC, config, 1, bucket(SPEC, config, 1024, 64), 64)
    one = max(phase_bytes(job).values())
    with pytest.raises(UserError, match="too small for one row"):
        plan_job(job, int(one * 0.9))
    assert plan_job(job, int(one * 1.3)).batch >= 1


def test_layers_of_different_capacity():
    config = make_spec(SPEC, policies.recency(), (64, 128, 192), BATCH_MAX)
    job = Job(SPEC, config, 2, bucket(SPEC, config, 1024, 64), 64)
    uniform = make_spec(SPEC, policies.recency(), 128, BATCH_MAX)
    same = dataclasses.replace(job, config=uniform)
    assert state_bytes(job) == state_bytes(same)


def test_groups_of_prompts_stay_a_multiple_of_the_devices(monkeypatch):
    """Also where the memory makes a plan shrink them."""
    spec = tiny_spec()
    config = make_spec(spec, policies.recency(), 16, Schedule("prefill_and_decode"))
    over = meshes.mesh("data:4,model:2", spec.num_kv_heads)
    job = Job(spec, config, 4, 256, 16, mesh=over, continuous=True)
    tried = []

    def peaks(sized):
        tried.append((sized.batch, sized.prefill_batch))
        return {"mixed": 2 if len(tried) < 4 else 1, "decode": 1}

    monkeypatch.setattr(planner, "_peaks_if_compiled", peaks)
    monkeypatch.setattr(planner, "_planned", lambda job, *_: job)
    planner._search(job, 1, 16, 12, "decode", lambda *_: None)
    assert tried == [(16, 12), (16, 4), (8, 4), (4, 4)]
