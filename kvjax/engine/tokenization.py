"""Turns prompts into token ids that fit the model's context."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.engine.steps import NO_EOS
from kvjax.types import Model, UserError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_TRUNCATE = ("error", "left", "middle")


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


def fitted(
    model: Model,
    prompts: list[list[int]],
    new: Sequence[int],
    truncate: str,
    used: int = 0,
) -> list[list[int]]:
    """Returns prompts that fit the context, each with its `new` tokens.

    Args:
      model: the model.
      prompts: token ids.
      new: the most new tokens of each prompt.
      truncate: see `kvjax.generate`.
      used: tokens that every prompt goes on after.

    Raises:
      UserError: a prompt that is too long, or new tokens that leave no room for one.
    """
    name, context = model.spec.name, model.spec.context_length - used
    after = f" after the {used} that have been read" if used else ""
    if truncate not in _TRUNCATE:
        raise UserError(f"truncate is {truncate!r}: give {', '.join(_TRUNCATE)}")
    if max(new) >= context:
        raise UserError(
            f"max_new_tokens {max(new)} leaves no room for a prompt in the context of "
            f"{name}, {context} tokens{after}: give fewer"
        )
    rooms = [context - count for count in new]
    long = [i for i, ids in enumerate(prompts) if len(ids) > rooms[i]]
    if long and truncate == "error":
        first, more = long[0], f" (and {len(long) - 1} others do)"
        raise UserError(
            f"prompt {first} has {len(prompts[first])} tokens, and with {new[first]} "
            f"new ones exceeds the context of {name}, {context} tokens{after}"
            f"{more if len(long) > 1 else ''}: shorten it to {rooms[first]}, or give "
            "truncate='left' or 'middle'"
        )
    bos = getattr(model.tokenizer, "bos_token_id", None)
    found = list(prompts)
    for index in long:
        ids, room = prompts[index], rooms[index]
        first = (room + 1) // 2 if truncate == "middle" else int(ids[0] == bos)
        found[index] = ids[:first] + ids[len(ids) - (room - first) :]
    return found


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
