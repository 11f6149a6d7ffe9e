"""Prompts in, completions out: `kvjax.generate`, and `kvjax.plan`, what would fit."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import cache, messages
from kvjax.cache.budgets import BudgetRule
from kvjax.cache.calibrations import Calibration
from kvjax.cache.codecs import Codec
from kvjax.cache.offload import Offload
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, make_spec
from kvjax.engine import jobs, stop_texts
from kvjax.engine.jobs import Job
from kvjax.engine.memory import device_memory
from kvjax.engine.planner import Plan, plan_job
from kvjax.engine.runner import generate_batches
from kvjax.engine.sampling import TokenSampler
from kvjax.engine.steps import NO_EOS
from kvjax.models import fingerprints, placement, weights
from kvjax.parallel import axes, meshes
from kvjax.policies import Policy
from kvjax.types import Model, ModelSpec, UserError, whole_number

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_SEEDS = 2**31 - 1
_TRUNCATE = ("error", "left", "middle")


@dataclasses.dataclass(frozen=True, repr=False)
class Completion:
    """What the model made of one prompt.

    Attributes:
      text: what the new tokens add to the prompt's text, a first space included, and
        without special tokens; None without a tokenizer.
      tokens: the new token ids, the end token included if there was one.
      kept_positions: positions of the pairs in the cache at the end, in rising order,
        as `kept_positions[layer][head]`; prompt and new tokens count from 0. The last
        new token has not been read, so it is not among them. Under the full cache,
        layers with a window hold no more than that.
    """

    text: str | None
    tokens: list[int]
    kept_positions: list[list[np.ndarray]]

    def __repr__(self) -> str:
        sizes = [len(head) for layer in self.kept_positions for head in layer]
        least, most = min(sizes, default=0), max(sizes, default=0)
        pairs = f"{least}" if least == most else f"{least} to {most}"
        said = "no text" if self.text is None else f"{self.text!r:.200}"
        return (
            f"Completion({said}, {len(self.tokens)} tokens; {pairs} pairs kept in each "
            f"of {len(sizes)} heads)"
        )


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    policy: Policy | str | None = None,
    budget: int | str | tuple[int | tuple[int, ...], ...] = 512,
    schedule: Schedule | str | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    truncate: str = "error",
    memory_gb: float | None = None,
    codec: Codec | str = "identity",
    budget_rule: BudgetRule | Calibration | str | None = None,
    implementation: str | None = None,
    eviction: str = "in_place",
    offload: Offload | int | None = None,
    show_progress: bool | None = None,
) -> list[Completion]:
    """Completes prompts under a compressed KV cache.

    Prompts of any number and length run in batches of the size that the memory allows.
    A prompt's completion depends on the others only if the budget is a share of the
    longest prompt, or a budget rule follows that prompt's length ("calibrated", "ada")
    or measures the prompts that are read together ("squeeze").

    What a budget of |kv| pairs per head means depends on the schedule. Of
    `prefill_and_decode`, the default, a head never holds more than |kv| pairs: the
    first |kv| tokens all stay, and then every eviction leaves |kv| - p of them, so that
    the p tokens that come next fill it again (p = 64, or less where |kv| is small). Of
    `prefill_only` that holds while the prompt is read, and what is decoded comes on
    top. Of `after_prefill` the whole prompt is held while it is read, |kv| of its pairs
    are left of it, and what is decoded comes on top. Of `decode_only` likewise, but
    decoding never holds more than |kv|.

    Args:
      model: from `kvjax.load`.
      prompts: texts, sequences of token ids, or conversations, each a list of messages
        `{"role": ..., "content": ...}` that the model's chat template puts into words.
        Texts are taken as they are. A text that begins with the BOS token gets no
        second one.
      policy: which pairs stay: of `kvjax.policies`, or its name; None is the full
        cache.
      budget: |kv|, pairs per head: an int for all, or for every layer an int or one per
        head; or a share of the longest prompt, as "25%", of which heads keep what they
        need where that is known for the model's weights (`kvjax.calibrate` finds it
        out), first and newest pairs among it. Layers with a sliding window never take
        more than it and one block of tokens; of a share, or with a budget rule, the
        rest goes to the other layers. The full cache pays no heed to it.
      schedule: when pairs go, or the name of its phases; None is Batch-Max's
        Algorithm 1.
      max_new_tokens: most tokens per completion.
      temperature, top_k, top_p: see `kvjax.engine.sampling.TokenSampler`; 0 is greedy.
      seed: of the sampling, 0 to 2**31 - 1; prompt i draws the same tokens in any
        batch.
      ignore_eos: generate all `max_new_tokens`, for throughput runs.
      truncate: what becomes of a prompt that, with `max_new_tokens`, exceeds the
        context: `error`; or as many of its tokens are dropped as are too many, from the
        `left`, but for the BOS token, or from the `middle`. Positions count what stays.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      codec: how pairs are stored, of `kvjax.cache.codecs`, or its name.
      budget_rule: shares out `budget`, then the mean, between layers and heads, of
        `kvjax.cache.budgets`, or its name ("squeeze", "pyramid"), or what
        `kvjax.calibrate` returned; None is the same for all, or as above for a share.
      implementation: which attention runs, see `kvjax.attention.backends`; None is the
        best there is.
      eviction: how a layer makes room, see `kvjax.cache.CacheSpec`: new pairs move
        into the slots of those that go (`in_place`), or a gather moves what is kept to
        the front (`compact`). The same pairs stay, and the same tokens come out.
      offload: which values lie in host memory, see `kvjax.Offload`, or how many of
        them a query gets; None for none.
      show_progress: see `kvjax.messages.progress`.

    Returns:
      One completion per prompt, in order.

    Raises:
      UserError: no prompt, an empty prompt, one too long for the context, a token id
        outside the vocabulary, a budget that does not fit policy and schedule, a value
        of another type or out of range, too little memory for one row. All before
        anything is compiled.
    """
    if not isinstance(model, Model):
        raise UserError(f"model is {model!r:.80}: give what kvjax.load returns")
    how = {
        "codec": codec,
        "budget_rule": budget_rule,
        "implementation": implementation,
        "eviction": eviction,
        "offload": offload,
    }
    sampling = TokenSampler(temperature, top_k, top_p)
    new = whole_number("max_new_tokens", max_new_tokens, 1)
    seed = whole_number("seed", seed, 0, _SEEDS)
    tokens = _fitted(model, tokenize(model, prompts), new, truncate)
    longest = max(map(len, tokens))
    config = _config(model, policy, budget, schedule, how | {"length": longest})
    prompt = jobs.bucket(model.spec, config, longest, new)
    eos = NO_EOS if ignore_eos else end_tokens(model)
    job = jobs.job_of(model, config, prompt, new, sampling, eos)
    memory, done = device_memory(memory_gb), {}
    with messages.progress(len(tokens), show_progress) as say:
        batches = generate_batches(model.params, job, tokens, memory, seed, say=say)
        for rows, result in batches:
            kept = cache.kept_positions(result.state)
            for row, index in enumerate(rows):
                drawn = result.tokens[row]
                text = _text(model, tokens[index], drawn)
                done[index] = Completion(text, drawn, kept[row])
            del result  # the next batch needs its state's room
    return [done[i] for i in range(len(tokens))]


def plan(
    model: Model | ModelSpec,
    *,
    policy: Policy | str | None = None,
    budget: int | str | tuple[int | tuple[int, ...], ...] = 512,
    schedule: Schedule | str | None = None,
    prompt_tokens: int | None = None,
    max_new_tokens: int = 64,
    memory_gb: float | None = None,
    max_batch: int | None = None,
    dtype: str = "float32",
    mesh: str | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> Plan:
    """The largest batch that `generate` would run in so much memory.

    Compiles what would run, for the device that is there.

    Args:
      model: from `kvjax.load`; or a shape, for which no weights are needed.
      policy, budget, schedule: see `generate`.
      prompt_tokens: the longest prompt; None is all that the context has room for.
      max_new_tokens: tokens to generate.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      max_batch: prompts there are; no larger batch is planned.
      dtype, mesh: of `kvjax.load`, for a shape; a model has its own.
      show_progress: see `kvjax.messages.progress`.
      **options: of `kvjax.cache.make_spec`: codec, budget_rule, offload and others.

    Raises:
      UserError: not even one row fits; or what `generate` refuses.
    """
    if not isinstance(model, Model | ModelSpec):
        raise UserError(f"model is {model!r:.80}: give a Model or its ModelSpec")
    spec = model if isinstance(model, ModelSpec) else model.spec
    new = whole_number("max_new_tokens", max_new_tokens, 1)
    longest = spec.context_length - new if prompt_tokens is None else prompt_tokens
    longest = whole_number("prompt_tokens", longest, 1)
    options = {"length": longest} | options
    config = _config(model, policy, budget, schedule, options)
    prompt = jobs.bucket(spec, config, longest, new)
    if isinstance(model, Model):
        job = jobs.job_of(model, config, prompt, new)
    else:
        over = meshes.mesh(mesh, spec.num_kv_heads) if mesh else None
        rows, kind = over.shape[axes.DATA] if over else 1, weights.checked_dtype(dtype)
        fitted = placement.fitted(spec, over)
        job = Job(fitted, config, rows, prompt, new, str(kind), mesh=over)
    most = None if max_batch is None else whole_number("max_batch", max_batch, 1)
    with messages.progress(0, show_progress) as say:
        return plan_job(job, device_memory(memory_gb), most, say)


def _config(model: Model | ModelSpec, policy, budget, schedule, options) -> CacheSpec:
    """What is kept; the full cache pays no heed to a budget, nor to its rule.

    A model's weights may be others than it was loaded with: their fingerprint counts.
    """
    spec = fingerprints.marked(model) if isinstance(model, Model) else model
    if policy is None:
        budget, options = None, options | {"budget_rule": None}
    return make_spec(spec, policy, budget, schedule, **options)


def tokenize(model: Model, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of texts, conversations or ids, checked.

    Raises:
      UserError: no prompt, an empty one, one of another type, or ids outside the
        vocabulary.
    """
    several = isinstance(prompts, Sequence | np.ndarray) and not isinstance(
        prompts, str | bytes
    )
    if not several or not len(prompts):
        raise UserError(f"prompts is {prompts!r:.80}: give a list of one or more")
    every = [_ids(model, index, prompt) for index, prompt in enumerate(prompts)]
    for index, ids in enumerate(every):
        check_ids(model, f"prompt {index}", ids)
    return every


def _fitted(
    model: Model, prompts: list[list[int]], new: int, truncate: str
) -> list[list[int]]:
    """Prompts that leave the context room for so many new tokens, see `generate`."""
    name, context = model.spec.name, model.spec.context_length
    if truncate not in _TRUNCATE:
        raise UserError(f"truncate is {truncate!r}: give {', '.join(_TRUNCATE)}")
    room = context - new
    if room < 1:
        raise UserError(
            f"max_new_tokens {new} leaves no room for a prompt in the context of "
            f"{name}, {context} tokens: give fewer"
        )
    long = [index for index, ids in enumerate(prompts) if len(ids) > room]
    if long and truncate == "error":
        more = f" (and {len(long) - 1} others do)" if len(long) > 1 else ""
        raise UserError(
            f"prompt {long[0]} has {len(prompts[long[0]])} tokens, and with {new} new "
            f"ones exceeds the context of {name}, {context} tokens{more}: shorten it "
            f"to {room}, or give truncate='left' or 'middle'"
        )
    bos = getattr(model.tokenizer, "bos_token_id", None)
    fitted = list(prompts)
    for index in long:
        ids = prompts[index]
        first = (room + 1) // 2 if truncate == "middle" else int(ids[0] == bos)
        fitted[index] = ids[:first] + ids[len(ids) - (room - first) :]
    return fitted


def _ids(model: Model, index: int, prompt: Prompt) -> list[int]:
    """One prompt's token ids."""
    if isinstance(prompt, Mapping):
        raise UserError(
            f"prompt {index} is a message: a prompt is a list of messages, so give a "
            "list of such lists"
        )
    try:
        if not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
            prompt = _in_words(model, index, prompt)
        if isinstance(prompt, str):
            return _tokens(model, index, prompt)
        return [operator.index(token) for token in prompt]
    except (TypeError, IndexError, KeyError):
        if np.iterable(prompt) and not len(prompt):
            return []
        raise UserError(
            f"prompt {index} is {prompt!r:.80}: give a text, whole token ids, or a "
            "list of messages"
        ) from None


def _in_words(model: Model, index: int, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the chat template has it, up to where the model speaks."""
    if not getattr(model.tokenizer, "chat_template", None):
        raise UserError(
            f"prompt {index} is a conversation, but {model.spec.name} has no chat "
            "template: give a text"
        )
    try:
        return model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # whatever a template raises
        why = str(error).splitlines()[0]
        raise UserError(
            f"prompt {index}: the chat template refuses it: {why}"
        ) from None


def _tokens(model: Model, index: int, text: str) -> list[int]:
    if model.tokenizer is None:
        raise UserError(f"prompt {index} is text, but the model has no tokenizer")
    ids = list(model.tokenizer(text, verbose=False)["input_ids"])
    bos = getattr(model.tokenizer, "bos_token_id", None)
    twice = bos is not None and ids[:2] == [bos, bos]
    return ids[1:] if twice else ids  # chat templates write one themselves


def check_ids(model: Model, what: str, ids: Sequence[int]) -> None:
    """Raises UserError for no ids, or one outside the vocabulary; `what` names them."""
    if not len(ids):
        raise UserError(f"{what} is empty: it needs at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.spec.vocab_size:
        raise UserError(
            f"{what} holds token {low if low < 0 else high}: ids of "
            f"{model.spec.name} run from 0 to {model.spec.vocab_size - 1}"
        )


def end_tokens(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: the checkpoint's and the tokenizer's."""
    eos = getattr(model.tokenizer, "eos_token_id", None)
    ends = {*model.end_tokens} if eos is None else {*model.end_tokens, eos}
    return tuple(sorted(ends)) or NO_EOS


def _text(model: Model, prompt: list[int], tokens: list[int]) -> str | None:
    if model.tokenizer is None:
        return None
    how = {"skip_special_tokens": True}
    return stop_texts.text_after(model.tokenizer, prompt, tokens, **how)
