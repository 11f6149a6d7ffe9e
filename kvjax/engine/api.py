"""`kvjax.generate` completes prompts; `kvjax.plan` returns the batch that would fit."""

from collections.abc import Sequence
from typing import Any

from kvjax import messages
from kvjax.cache.config import CacheConfig
from kvjax.cache.spec import CacheSpec, checked
from kvjax.engine import arguments, jobs
from kvjax.engine.completions import Completion
from kvjax.engine.engine import Engine
from kvjax.engine.jobs import Job
from kvjax.engine.memory import device_memory
from kvjax.engine.planner import Plan, plan_job
from kvjax.engine.sampling import Sampling, spec_of
from kvjax.engine.tokenization import Prompt, end_tokens
from kvjax.models import fingerprints, placement, weights
from kvjax.parallel import axes, meshes
from kvjax.policies import Policy
from kvjax.types import Model, ModelSpec, UserError, whole_number


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    cache: CacheConfig | None = None,
    policy: Policy | str | None = None,
    budget: int | str | Sequence[int | Sequence[int]] = 512,
    max_new_tokens: int = 64,
    truncate: str = "error",
    memory_gb: float | None = None,
    show_progress: bool | None = None,
    **fields: Any,
) -> list[Completion]:
    """Completes prompts under a compressed KV cache.

    Prompts of any number and length run in batches of the size that the memory allows.
    A completion depends on the other prompts only where the budget is a share of the
    longest prompt, or where the budget rule uses that prompt's length ("calibrated",
    "ada") or measures prompts that are read together ("squeeze").

    What a budget of |kv| pairs per head means depends on the schedule:

    - Under `prefill_and_decode`, the default, a head never holds more than |kv| pairs.
      The first |kv| tokens all stay. From then on every eviction leaves |kv| - p pairs,
      so that the next p tokens fit (p = 64, or less where |kv| is small).
    - Under `prefill_only`, the same holds while the prompt is read. Decoded tokens are
      added on top.
    - Under `after_prefill`, the whole prompt is held while it is read, then |kv| of its
      pairs are kept, and decoded tokens are added on top.
    - Under `decode_only`, likewise, but decoding never holds more than |kv| pairs.

    Args:
      model: from `kvjax.load`.
      prompts: texts, sequences of token ids, or conversations. A conversation is a list
        of messages `{"role": ..., "content": ...}`, which the model's chat template
        turns into text. Texts are taken as they are. A text that begins with the BOS
        token gets no second one.
      sampling: what is generated, and how tokens are chosen.
      cache: what the KV cache keeps, and how.
      policy, budget, max_new_tokens: short for the fields of `CacheConfig` and
        `Sampling` of these names, in place of `cache` and `sampling`.
      truncate: what happens to a prompt that, with `max_new_tokens`, exceeds the
        context: `error` refuses it; `left` drops its first tokens but for BOS, and
        `middle` those in its middle. Positions count what stays.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      show_progress: see `kvjax.messages.progress`.
      **fields: other fields of `CacheConfig` and `Sampling`, such as
        `codec="int8"` or `temperature=0.7`.

    Returns:
      One completion per prompt, in order.

    Raises:
      UserError: no prompt, an empty prompt, one too long for the context, a token id
        outside the vocabulary, a budget that does not fit policy and schedule, a value
        of another type or out of range, too little memory for one row. All before
        anything is compiled.
    """
    fields |= {"policy": policy, "budget": budget, "max_new_tokens": max_new_tokens}
    sampling, config = arguments.asked(sampling, cache, fields)
    engine = Engine(model, config, memory_gb=memory_gb, show_progress=show_progress)
    return engine.generate(prompts, sampling, truncate=truncate)


def plan(
    model: Model | ModelSpec,
    *,
    cache: CacheConfig | None = None,
    policy: Policy | str | None = None,
    budget: int | str | Sequence[int | Sequence[int]] = 512,
    prompt_tokens: int | None = None,
    max_new_tokens: int = 64,
    memory_gb: float | None = None,
    max_batch: int | None = None,
    dtype: str = "float32",
    mesh: str | None = None,
    show_progress: bool | None = None,
    **fields: Any,
) -> Plan:
    """Returns the largest batch that `generate` would run in a given memory.

    Compiles what would run, for the device that is there.

    Args:
      model: from `kvjax.load`; or a shape, for which no weights are needed.
      cache, policy, budget: see `generate`.
      prompt_tokens: the longest prompt; None is all that the context has room for.
      max_new_tokens: tokens to generate.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      max_batch: how many prompts there are; no larger batch is planned.
      dtype, mesh: as in `kvjax.load`, for a shape; a model has its own.
      show_progress: see `kvjax.messages.progress`.
      **fields: other fields of `CacheConfig`.

    Raises:
      UserError: not even one row fits; or what `generate` refuses.
    """
    if not isinstance(model, Model | ModelSpec):
        raise UserError(f"model is {model!r:.80}: give a Model or its ModelSpec")
    spec = model if isinstance(model, ModelSpec) else model.spec
    new = whole_number("max_new_tokens", max_new_tokens, 1)
    longest = spec.context_length - new if prompt_tokens is None else prompt_tokens
    longest = whole_number("prompt_tokens", longest, 1)
    fields |= {"policy": policy, "budget": budget, "max_new_tokens": new}
    sampling, config = arguments.asked(None, cache, fields)
    made = _spec(model, config, longest)
    if isinstance(model, Model):
        job = _job(model, sampling, made, longest)
    else:
        prompt = jobs.bucket(spec, made, longest, new)
        over = meshes.mesh(mesh, spec.num_kv_heads) if mesh else None
        rows, kind = over.shape[axes.DATA] if over else 1, weights.checked_dtype(dtype)
        fitted = placement.fitted(spec, over)
        job = Job(fitted, made, rows, prompt, new, str(kind), mesh=over)
    most = None if max_batch is None else whole_number("max_batch", max_batch, 1)
    with messages.progress(0, show_progress) as say:
        return plan_job(job, device_memory(memory_gb), most, say)


def _spec(model: Model | ModelSpec, config: CacheConfig, longest: int) -> CacheSpec:
    """Returns what programs are compiled for.

    A model's weights may have been replaced since it was loaded, so their fingerprint
    is taken now.
    """
    spec = fingerprints.marked(model) if isinstance(model, Model) else model
    return checked(spec, config, longest)


def _job(model: Model, sampling: Sampling, config: CacheSpec, longest: int) -> Job:
    """Returns the job of prompts of up to `longest` tokens, for one row."""
    new = sampling.max_new_tokens
    prompt = jobs.bucket(model.spec, config, longest, new)
    ends = end_tokens(model)
    return jobs.job_of(model, config, prompt, new, spec_of([sampling]), ends)
