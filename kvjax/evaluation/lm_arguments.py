"""What the lm-evaluation-harness gives a model, in kvjax's words."""

from typing import Any

from kvjax.engine.sampling import TokenSampler
from kvjax.evaluation.config import Method
from kvjax.types import UserError, whole_number


def budget(given: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(map(budget, given)) if isinstance(given, list | tuple) else given


def options(given: dict[str, Any]) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """The policy's options, the budget rule's, the codec's and the offload's."""
    found = {"policy": [], "budget_rule": [], "codec": [], "offload": []}
    for name, value in sorted(given.items()):
        where, _, option = name.partition(".")
        if where not in found or not option:
            raise UserError(
                f"model_args: {name!r} is unknown; an option of the policy is written "
                f"policy.{name.rpartition('.')[2]}=..., the rule's "
                "budget_rule.NAME=..., the codec's codec.NAME=..., the offload's "
                "offload.NAME=..."
            )
        found[where].append((option, value))
    return tuple(map(tuple, found.values()))


def offload(top_n: int | None, fields: tuple[tuple[str, Any], ...]) -> Any:
    """What `Method.offload` takes, from N and the fields that go with it."""
    if not fields:
        return top_n
    return fields if top_n is None else (*fields, ("top_n", top_n))


def check_length(method: Method, prompt_tokens: int | None) -> None:
    """Raises UserError where it is needed, as the harness tells no lengths before."""
    rule = method.made_rule()
    if prompt_tokens is not None:
        whole_number("prompt_tokens", prompt_tokens, 1)
    elif isinstance(method.budget, str) or (rule and rule.of_length):
        raise UserError(
            f"budget {method.budget!r} (rule {method.rule!r}) depends on the length of "
            "prompts: give prompt_tokens, the longest's"
        )


def most(batch_size: int | str | None, max_batch_size: int | None) -> int | None:
    """Rows at a time; None for as many as fit, which `auto` and 1, the default, are."""
    if max_batch_size:
        return int(max_batch_size)
    if batch_size is None or str(batch_size).startswith("auto"):
        return None
    return int(batch_size) if int(batch_size) > 1 else None


def sampling(given: dict[str, Any]) -> TokenSampler:
    """Greedy unless a temperature is there and `do_sample` does not forbid it."""
    temperature = float(given.get("temperature") or 0.0)
    if given.get("do_sample") is False or temperature == 0:
        return TokenSampler()
    top_k, top_p = given.get("top_k"), given.get("top_p")
    return TokenSampler(
        temperature, int(top_k or 0), 1.0 if top_p is None else float(top_p)
    )
