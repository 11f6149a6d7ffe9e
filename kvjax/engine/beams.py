"""Beam search: the most likely continuations of prompts under a compressed cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache
from kvjax.cache.spec import CacheSpec
from kvjax.engine import beam_steps, compiled, footprint, jobs, memory, runner, steps
from kvjax.engine.beam_steps import SearchOptions
from kvjax.engine.forward import with_policy
from kvjax.engine.jobs import Job
from kvjax.engine.planner import out_of_memory
from kvjax.engine.tokenization import check_ids
from kvjax.models import placement
from kvjax.parallel import axes, host
from kvjax.types import Model, PyTree, UserError, real_number, whole_number


class Beam(NamedTuple):
    """A sequence that beam search found.

    Attributes:
      tokens: the new tokens, with the end token if there was one.
      score: the sum of their log-probabilities, divided by their number to the power of
        the length penalty.
    """

    tokens: list[int]
    score: float


def beam_search(
    model: Model,
    config: CacheSpec,
    prompts: Sequence[Sequence[int]],
    *,
    num_beams: int,
    num_samples: int = 1,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    eos: Sequence[int] = (),
    memory_bytes: int | None = None,
) -> list[list[Beam]]:
    """Returns the most likely continuations of prompts under a compressed KV cache.

    The result is that of transformers' `generate(num_beams=..., do_sample=False)`, with
    `early_stopping=False`. One beam is greedy decoding. Every beam has a KV cache with
    the budget of a prompt. Prompts run in batches that fill the memory.

    Args:
      model: the model, on one device.
      config: configuration of its KV cache.
      prompts: token ids, one or more each.
      num_beams: W, beams per prompt.
      num_samples: sequences to return per prompt, at most W.
      max_new_tokens: the most tokens of a sequence.
      length_penalty: above 0 prefers long sequences, below 0 short ones.
      eos: tokens that end a sequence.
      memory_bytes: see `kvjax.engine.memory.device_memory`; None is its default.

    Returns:
      Per prompt, the `num_samples` best sequences, the best first.

    Raises:
      UserError: a value or a token out of range; a model on a mesh; a budget rule that
        measures prompts; a prompt too long for the context; too little memory for the
        beams of one prompt.
    """
    _check(model, config, prompts, num_beams, num_samples, eos)
    whole_number("max_new_tokens", max_new_tokens, 1)
    real_number("length_penalty", length_penalty, -10, 10)
    size = jobs.bucket(model.spec, config, max(map(len, prompts)), max_new_tokens)
    ends = tuple(eos) or steps.NO_EOS
    job = jobs.job_of(model, config, size, max_new_tokens, eos=ends)
    limit = memory.device_memory() if memory_bytes is None else memory_bytes
    job, programs = _planned(job, num_beams, limit, len(prompts))
    params, options = with_policy(model.params, config), _options(job, length_penalty)
    found: dict[int, list[Beam]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for indices in runner.batches(order, job.batch):
        batch = [prompts[index] for index in indices]
        rows = _searched(params, job, programs, batch, options)
        found |= zip(indices, rows, strict=True)
        memory.trim()  # of the batch's state
    return [found[index][:num_samples] for index in range(len(prompts))]


def beam_bytes(job: Job, num_beams: int) -> int:
    """Returns the bytes of a search at its peak, estimated from shapes.

    Counts the weights, KV states and logits. Temporaries of the model are not known
    before its programs are compiled.

    Args:
      job: of B prompts.
      num_beams: W; the search holds B W rows, and B more while it copies prompts.
    """
    read, kept = footprint.state_bytes(job).values()
    beams = footprint.state_bytes(_beams_of(job, num_beams))["decode"]
    logits = 4 * job.batch * job.spec.vocab_size
    searching = beams + 2 * num_beams * logits
    phases = read, beams + kept + logits, searching
    return footprint.weights_bytes(job) + max(phases)


def _beams_of(job: Job, num_beams: int) -> Job:
    """Returns the job of all beams of the job's prompts."""
    return dataclasses.replace(job, batch=job.batch * num_beams)


class _Programs(NamedTuple):
    """Compiled executables of a job, and the bytes at the peak of the largest."""

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    compact: jax.stages.Compiled | None
    expand: jax.stages.Compiled
    search: jax.stages.Compiled
    peak_bytes: int


@functools.lru_cache(maxsize=4)
def _programs(job: Job, num_beams: int) -> _Programs:
    """Compiles everything that a search of the job's prompts runs."""
    compiled.keep_compiled()
    shapes, model = compiled.arguments(job), {"spec": job.spec, "config": job.config}
    read, kept = shapes.prefill_state, shapes.decode_state.cache
    beams = compiled.arguments(_beams_of(job, num_beams)).decode_state.cache
    init = jax.jit(functools.partial(compiled.init_state, job, is_prefill=True))
    prefill = steps.prefill.lower(
        shapes.params, read, shapes.tokens, shapes.rows, **model
    ).compile()
    compact = None
    if job.config.compacts:
        learned, capacity = shapes.params.get("policy"), job.decode_capacity
        shrink = steps.compact.lower(read, learned, capacity=capacity, **model)
        compact = shrink.compile()
    expand = beam_steps.expand.lower(
        kept, num_beams=num_beams, dtype=job.dtype, **model
    ).compile()
    options = _options(job, 1.0)
    search = beam_steps.search.lower(
        shapes.params,
        beams,
        shapes.logits,
        jax.ShapeDtypeStruct((job.batch,), jnp.bool),
        options,
        length=job.max_new_tokens,
        **model,
    ).compile()
    beside = footprint.weights_bytes(job) + compiled.tree_bytes(shapes.logits)
    peaks = [
        _program_bytes(prefill, read),
        _program_bytes(compact, read, kept) + beside if compact else 0,
        _program_bytes(expand, kept, beams) + beside,
        _program_bytes(search, beams),
    ]
    return _Programs(
        init.lower().compile(), prefill, compact, expand, search, max(peaks)
    )


def _program_bytes(program: jax.stages.Compiled, *states: cache.KVState) -> int:
    return footprint.program_bytes(program, sum(map(host.nbytes, states)))


def _planned(
    job: Job, num_beams: int, memory_bytes: int, most: int
) -> tuple[Job, _Programs]:
    """Returns the job of the most prompts that fit, and its programs.

    Raises:
      UserError: the beams of one prompt do not fit.
    """
    weights, needed = footprint.weights_bytes(job), beam_bytes(job, num_beams)
    batch = min(most, (memory_bytes - weights) // (needed - weights))
    while batch > 0:
        job = dataclasses.replace(job, batch=batch)
        try:
            programs = _programs(job, num_beams)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            batch //= 2
            continue
        if programs.peak_bytes <= memory_bytes:
            return job, programs
        needed = programs.peak_bytes
        batch = min(batch - 1, batch * memory_bytes // needed)
    raise UserError(
        f"memory of {memory_bytes / 1e9:.3g} GB is too small for the {num_beams} beams "
        f"of one prompt of {job.spec.name}, which need at least {needed / 1e9:.3g} GB: "
        "give fewer beams, more memory, a smaller budget or a shorter prompt"
    )


def _options(job: Job, length_penalty: float) -> SearchOptions:
    """Returns the same options for every prompt of the job."""
    rows = (job.batch,)
    return SearchOptions(
        max_new_tokens=np.full(rows, job.max_new_tokens, np.int32),
        eos=np.tile(np.array(job.eos, np.int32), (job.batch, 1)),
        length_penalty=np.full(rows, length_penalty, np.float32),
    )


def _searched(
    params: PyTree,
    job: Job,
    programs: _Programs,
    prompts: Sequence[Sequence[int]],
    options: SearchOptions,
) -> list[list[Beam]]:
    """Returns the sequences of every prompt, the best first."""
    tokens, lengths = runner.pad_prompts(job, prompts)
    state, logits = programs.prefill(params, programs.init(), tokens, lengths)
    if programs.compact:
        state = programs.compact(state, params.get("policy"))
    state = programs.expand(state)
    state, found = programs.search(params, state, logits, lengths > 0, options)
    cache.raise_errors(state)
    tokens, scores = axes.to_host((found.tokens, found.scores))
    return [
        [
            Beam(new[new >= 0].tolist(), float(score))
            for new, score in zip(tokens[row], scores[row], strict=True)
        ]
        for row in range(len(prompts))
    ]


def _check(
    model: Model,
    config: CacheSpec,
    prompts: Sequence[Sequence[int]],
    num_beams: int,
    num_samples: int,
    eos: Sequence[int],
) -> None:
    for index, prompt in enumerate(prompts):
        check_ids(model, f"prompt {index}", prompt)
    whole_number("num_beams", num_beams, 1)
    if whole_number("num_samples", num_samples, 1) > num_beams:
        raise UserError(
            f"num_samples {num_samples} is more than num_beams {num_beams}: a search "
            "finds as many sequences as it has beams; give more beams"
        )
    if num_beams > (words := model.spec.vocab_size - len(eos)):
        raise UserError(
            f"num_beams {num_beams}: {model.spec.name} has {words} tokens to begin a "
            "beam with; give fewer beams"
        )
    if config.measures:
        raise UserError(
            f"budget rule {config.budget_rule.name!r} measures prompts, which beam "
            "search does not wait for: give another rule, or one beam"
        )
    if placement.of(model.params):
        raise UserError("beam search runs on one device: load the model without a mesh")
