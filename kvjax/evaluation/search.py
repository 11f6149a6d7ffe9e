"""How few pairs do: |kv| lowered as far as the score stays near the full cache's.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1, raise the batch and lower |kv|
until accuracy falls. How far that may be is `tolerance` of `throughput.Throughput`, in
which steps `budget_steps`. Going down and stopping at the first |kv| that misses is
what saves time; that a smaller one could do again, by luck, is not looked at.
"""

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.cache.spec import checked
from kvjax.evaluation.config import Method
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.samples import Mixed, summaries
from kvjax.types import ModelSpec, UserError, real_number

_ROUNDING = 1e-9  # of means of scores


def fewest(
    least: int, most: int, steps: Sequence[int], keeps: Callable[[int], bool]
) -> int | None:
    """The smallest |kv| that keeps the score; each is tried once.

    Of every step its multiples are tried from the top down, below the last that kept
    the score and above the last that did not, as far as they keep it.

    Args:
      least, most: the smallest and the largest that may be tried.
      steps: falling, such as (128, 64).
      keeps: whether a |kv| keeps the score; takes long.

    Returns:
      None if the first one tried does not keep it, and no other is above it.
    """
    found, missed = None, least - 1
    for step in steps:
        top = most if found is None else found - 1
        for size in range(top // step * step, missed, -step):
            if not keeps(size):
                missed = size
                break
            found = size
    return found


def check(methods: Sequence[Method], tolerance: float, steps: tuple[int, ...]) -> None:
    """Raises UserError for what can be told wrong before a model is loaded."""
    real_number("tolerance", tolerance, 0, 1)
    whole = isinstance(steps, tuple) and all(
        isinstance(step, int) and step >= 1 for step in steps
    )
    if not (steps and whole and sorted(set(steps), reverse=True) == list(steps)):
        raise UserError(
            f"budget_steps {steps}: give whole numbers that fall, as in (128, 64)"
        )
    sought = [method for method in methods if method.batch_rule == "search"]
    for method in sought:
        if method.policy is None or method.budget is not None:
            raise UserError(
                f"method {method.name!r}, policy {method.policy!r}, budget "
                f"{method.budget}: batch_rule 'search' takes a policy, and no budget"
            )
    if sought and "full" not in [method.batch_rule for method in methods]:
        raise UserError(
            f"method {sought[0].name!r}: batch_rule 'search' needs the full cache's "
            "score: add the method 'FKV'"
        )


def at(method: Method, size: int) -> Method:
    """The method with |kv| = `size`."""
    cache = dataclasses.replace(method.cache, budget=size)
    return dataclasses.replace(method, cache=cache)


def bounds(
    method: Method, spec: ModelSpec, longest: int, steps: Sequence[int]
) -> tuple[int, int]:
    """The least and the most of `fewest`: below the prompts, above what it refuses.

    Args:
      method: whose |kv| is sought.
      spec: of the model.
      longest: tokens of the longest prompt.
      steps: of the search.

    Raises:
      UserError: the method works with no |kv| below the prompts.
    """
    told = f"no multiple of {steps[-1]} lies below the {longest} tokens of the prompts"
    for size in range(steps[-1], longest, steps[-1]):
        try:
            checked(spec, at(method, size).cache, longest)
        except UserError as error:
            told = str(error)
        else:
            return size, longest - 1
    raise UserError(f"method {method.name!r}: there is no |kv| to search: {told}")


def lowest_score(full: Record, tolerance: float) -> float:
    """What a method has to score beside the full cache's record."""
    return full["score"] - tolerance - _ROUNDING


def best_score(samples: Mixed, lines: Sequence[Record]) -> float:
    """The mean over tasks if every example that did not run yet were fully right."""
    ran, total = summaries(samples, lines), 0.0
    for part in samples.parts:
        told, count = ran.get(part.name), len(part.prompts)
        lost = told["num_examples"] * (1 - told["score"]) if told else 0.0
        total += 1 - lost / count
    return total / len(samples.parts)
