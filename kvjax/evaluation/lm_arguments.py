"""Translates the lm-evaluation-harness's arguments into kvjax's."""

from typing import Any

from kvjax.cache.config import CacheConfig
from kvjax.engine.sampling import Sampling
from kvjax.types import UserError, whole_number


def cache_config(fields: dict[str, Any], options: dict[str, Any]) -> CacheConfig:
    """Builds a cache configuration from the harness's model arguments.

    Args:
      fields: of `CacheConfig` and `Schedule`, by name; None is the default. The policy
        "full" or "none" is the full cache.
      options: of the policy (`policy.NAME`), the budget rule, the codec and the
        offload.

    Raises:
      UserError: an option has no such prefix; a budget for the full cache; see also
        `CacheConfig.check`.
    """
    each = _options(options)
    if fields["policy"] in (None, "full", "none"):
        if fields["budget"] is not None:
            raise UserError(
                f"budget {fields['budget']!r:.80} without a policy: the full cache has "
                "no budget; give a policy, or leave the budget out"
            )
        fields = fields | {"policy": None, "budget": None, "schedule": None}
    sizes = {name: fields.pop(name) for name in ("prefill_chunk", "evict_size")}
    phases = "none" if fields["policy"] is None else fields["schedule"]
    fields["schedule"] = {"phases": phases, **sizes}
    for name in ("policy", "budget_rule", "codec"):
        if each[name]:
            fields[name] = {"name": fields[name], **each[name]}
    if each["offload"]:
        top_n = {} if fields["offload"] is None else {"top_n": fields["offload"]}
        fields["offload"] = each["offload"] | top_n
    config = CacheConfig(**fields)
    config.check()
    return config


def _options(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups options by the policy, budget rule, codec and offload they belong to."""
    found = {"policy": {}, "budget_rule": {}, "codec": {}, "offload": {}}
    for name, value in sorted(options.items()):
        where, _, option = name.partition(".")
        if where not in found or not option:
            raise UserError(
                f"model_args: {name!r} is unknown; an option of the policy is written "
                f"policy.{name.rpartition('.')[2]}=..., one of the budget rule "
                "budget_rule.NAME=..., of the codec codec.NAME=..., of the offload "
                "offload.NAME=..."
            )
        found[where][option] = value
    return found


def check_length(config: CacheConfig, prompt_tokens: int | None) -> None:
    """Raises UserError if the budget needs `prompt_tokens` and it is missing.

    The harness does not announce the lengths of its prompts.
    """
    rule = config.made_rule()
    if prompt_tokens is not None:
        whole_number("prompt_tokens", prompt_tokens, 1)
    elif config.policy and (
        isinstance(config.budget, str) or (rule and rule.of_length)
    ):
        name = config.budget_rule and str(config.budget_rule)
        raise UserError(
            f"budget {config.budget!r} (rule {name!r}) depends on the length of "
            "prompts: give prompt_tokens, the length of the longest prompt"
        )


def most(batch_size: int | str | None, max_batch_size: int | None) -> int | None:
    """Returns the largest batch; None (as many rows as fit) for `auto` and 1.

    1 is the harness's default, so it cannot be told from no choice.
    """
    if max_batch_size:
        return int(max_batch_size)
    if batch_size is None or str(batch_size).startswith("auto"):
        return None
    return int(batch_size) if int(batch_size) > 1 else None


def sampling(gen_kwargs: dict[str, Any], new: int, seed: int) -> Sampling:
    """Returns a request's sampling: greedy without a temperature or `do_sample`.

    Args:
      gen_kwargs: the harness's.
      new: the most new tokens.
      seed: of the run.
    """
    temperature = float(gen_kwargs.get("temperature") or 0.0)
    if gen_kwargs.get("do_sample") is False or temperature == 0:
        return Sampling(max_new_tokens=new, seed=seed)
    top_k, top_p = gen_kwargs.get("top_k"), gen_kwargs.get("top_p")
    return Sampling(
        max_new_tokens=new,
        temperature=temperature,
        top_k=int(top_k or 0),
        top_p=1.0 if top_p is None else float(top_p),
        seed=seed,
    )
