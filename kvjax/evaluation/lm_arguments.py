"""Translates the lm-evaluation-harness's arguments into kvjax's."""

from typing import Any

from kvjax.cache.config import CacheConfig
from kvjax.engine.sampling import TokenSampler
from kvjax.types import UserError, whole_number


def cache_config(fields: dict[str, Any], options: dict[str, Any]) -> CacheConfig:
    """Returns the cache configuration that the model's arguments describe.

    Args:
      fields: of `CacheConfig` and `Schedule`, by name; None is the default. The policy
        "full" or "none" is the full cache.
      options: of the policy (`policy.NAME`), the budget rule, the codec and the
        offload.

    Raises:
      UserError: an option of something else; see `CacheConfig.check`.
    """
    each = _options(options)
    if fields["policy"] in (None, "full", "none"):
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


def _options(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the options of the policy, the budget rule, the codec and the offload."""
    found = {"policy": {}, "budget_rule": {}, "codec": {}, "offload": {}}
    for name, value in sorted(given.items()):
        where, _, option = name.partition(".")
        if where not in found or not option:
            raise UserError(
                f"model_args: {name!r} is unknown; an option of the policy is written "
                f"policy.{name.rpartition('.')[2]}=..., the rule's "
                "budget_rule.NAME=..., the codec's codec.NAME=..., the offload's "
                "offload.NAME=..."
            )
        found[where][option] = value
    return found


def check_length(config: CacheConfig, prompt_tokens: int | None) -> None:
    """Raises UserError where it is needed, as the harness tells no lengths before."""
    rule = config.made_rule()
    if prompt_tokens is not None:
        whole_number("prompt_tokens", prompt_tokens, 1)
    elif config.policy and (
        isinstance(config.budget, str) or (rule and rule.of_length)
    ):
        name = config.budget_rule and str(config.budget_rule)
        raise UserError(
            f"budget {config.budget!r} (rule {name!r}) depends on the length of "
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
