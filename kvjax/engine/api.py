"""`kvjax.generate` completes prompts; `kvjax.plan` returns the batch that would fit."""

import dataclasses
import difflib
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import messages
from kvjax.cache.config import CacheConfig
from kvjax.cache.spec import CacheSpec, checked
from kvjax.cache.state import kept_positions
from kvjax.engine import jobs, stop_texts
from kvjax.engine.jobs import Job
from kvjax.engine.memory import device_memory
from kvjax.engine.planner import Plan, plan_job
from kvjax.engine.runner import generate_batches
from kvjax.engine.sampling import Sampling, SamplingSpec
from kvjax.engine.steps import NO_EOS
from kvjax.models import fingerprints, placement, weights
from kvjax.parallel import axes, meshes
from kvjax.policies import Policy
from kvjax.types import Model, ModelSpec, UserError, whole_number

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_OBJECTS = (Sampling, CacheConfig)
_LOOK = 32  # tokens generated between two looks for a stop text
_TRUNCATE = ("error", "left", "middle")


@dataclasses.dataclass(frozen=True, repr=False)
class Completion:
    """The completion of one prompt.

    Attributes:
      text: the text that the new tokens add to the prompt, with its leading space, and
        without special tokens or a stop text; None without a tokenizer.
      tokens: the new token ids, with the end token or the stop text's, if there was
        one.
      kept_positions: the positions of the pairs in the cache at the end, in ascending
        order, as `kept_positions[layer][head]`. Prompt and new tokens count from 0. The
        last new token has not been read, so it is not among them; after a stop text,
        tokens that were generated before it was noticed are. A layer with a sliding
        window holds no more than its window.
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
    if not isinstance(model, Model):
        raise UserError(f"model is {model!r:.80}: give what kvjax.load returns")
    fields |= {"policy": policy, "budget": budget, "max_new_tokens": max_new_tokens}
    sampling, config = _asked(sampling, cache, fields)
    tokens = _fitted(model, tokenize(model, prompts), sampling.max_new_tokens, truncate)
    longest = max(map(len, tokens))
    job = _job(model, sampling, _spec(model, config, longest), longest)
    ends, memory, done = _Ends(model, sampling.stop), device_memory(memory_gb), {}
    with messages.progress(len(tokens), show_progress) as say:
        batches = generate_batches(
            model.params,
            job,
            tokens,
            memory,
            sampling.seed,
            stop=ends.stops if sampling.stop else None,
            sampling=sampling,
            say=say,
        )
        for rows, result in batches:
            kept = kept_positions(result.state)
            for row, index in enumerate(rows):
                text, drawn = ends.completed(tokens[index], result.tokens[row])
                done[index] = Completion(text, drawn, kept[row])
            del result  # frees its state before the next batch runs
    return [done[i] for i in range(len(tokens))]


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
    sampling, config = _asked(None, cache, fields)
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


def _asked(
    sampling: Sampling | None, cache: CacheConfig | None, fields: dict[str, Any]
) -> tuple[Sampling, CacheConfig]:
    """Returns both, made from single fields where they are not given themselves.

    Raises:
      UserError: an unknown field, or one beside the object that it belongs to.
    """
    names = {cls: [f.name for f in dataclasses.fields(cls)] for cls in _OBJECTS}
    every = list(itertools.chain(*names.values()))
    if unknown := sorted(set(fields) - set(every)):
        close = difflib.get_close_matches(unknown[0], every, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"{unknown[0]!r} is unknown: {hint}give fields of kvjax.CacheConfig or "
            "kvjax.Sampling"
        )
    own = {
        cls: {name: fields[name] for name in names[cls] if name in fields}
        for cls in _OBJECTS
    }
    return (
        _one_of(Sampling, "sampling", sampling, own[Sampling]),
        _one_of(CacheConfig, "cache", cache, own[CacheConfig]),
    )


def _one_of(cls: type, what: str, whole: Any, fields: dict[str, Any]) -> Any:
    """Returns the object that was given whole, or one made from single fields."""
    if whole is None:
        return cls(**fields)
    if not isinstance(whole, cls):
        raise UserError(f"{what} is {whole!r:.80}: give a kvjax.{cls.__name__}")
    default = cls()
    for name, value in fields.items():
        usual = getattr(default, name)
        if value is not usual and (type(value) is not type(usual) or value != usual):
            raise UserError(
                f"{name}={value!r:.40} beside {what}=: give {name} as a field of the "
                f"kvjax.{cls.__name__}"
            )
    return whole


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
    eos = NO_EOS if sampling.ignore_eos else end_tokens(model)
    job = jobs.job_of(model, config, prompt, new, SamplingSpec(sampling.samples), eos)
    return dataclasses.replace(job, decode_chunk=_LOOK) if sampling.stop else job


def tokenize(model: Model, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the checked token ids of texts, conversations or ids.

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
    """Returns prompts that fit the context with `new` tokens, see `generate`."""
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
    """Returns the token ids of one prompt."""
    if isinstance(prompt, Mapping):
        raise UserError(
            f"prompt {index} is a message: a prompt is a list of messages, so give a "
            "list of such lists"
        )
    try:
        if not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
            prompt = _chat_text(model, index, prompt)
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


def _chat_text(model: Model, index: int, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation as the chat template writes it, up to the model's turn."""
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
    """Returns the end tokens of the checkpoint and of the tokenizer."""
    eos = getattr(model.tokenizer, "eos_token_id", None)
    ends = {*model.end_tokens} if eos is None else {*model.end_tokens, eos}
    return tuple(sorted(ends)) or NO_EOS


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Finds where completions end: at stop texts, of which there may be none."""

    model: Model
    stop: tuple[str, ...]

    def __post_init__(self):
        if self.stop and self.model.tokenizer is None:
            raise UserError(
                f"stop is {self.stop!r:.80}, but {self.model.spec.name} has no "
                "tokenizer to find texts with: leave it out"
            )

    def stops(self, prompt: list[int], tokens: list[int]) -> bool:
        """Returns whether new tokens hold a stop text."""
        return stop_texts.stops(self.model.tokenizer, self.stop, prompt, tokens)

    def completed(
        self, prompt: list[int], tokens: list[int]
    ) -> tuple[str | None, list[int]]:
        """Returns the text of new tokens, and the tokens up to a stop text's last."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return None, tokens
        return stop_texts.completed(tokenizer, self.stop, prompt, tokens)
