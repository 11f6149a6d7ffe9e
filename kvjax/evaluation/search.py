"""Searches the smallest |kv| (KV pairs per head) that keeps the full cache's score.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1, who raise the batch and lower
|kv| until accuracy falls. `Throughput.tolerance` sets how far the score may fall,
`Throughput.budget_steps` the steps. To save time the search goes down and stops at the
first |kv| that misses; a smaller one that would keep the score by chance is not tried.
"""

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.cache.spec import checked
from kvjax.evaluation.config import Method
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.samples import Mixed, summaries
from kvjax.types import ModelSpec, UserError, real_number

_ROUNDING = 1e-9  # rounding error of mean scores


def fewest(
    least: int, most: int, steps: Sequence[int], keeps: Callable[[int], bool]
) -> int | None:
    """Returns the smallest |kv| from least to most that keeps the score, or None.

    For each step, in descending order as in (128, 64), tries its multiples in
    descending order, below the smallest that kept the score and above the largest that
    missed, and stops at the first miss. Each |kv| is tried once at most: `keeps` takes
    long.
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
    """Raises UserError for errors that can be found before a model is loaded."""
    real_number("tolerance", tolerance, 0, 1)
    whole = isinstance(steps, tuple) and all(
        isinstance(step, int) and step >= 1 for step in steps
    )
    if not (steps and whole and sorted(set(steps), reverse=True) == list(steps)):
        raise UserError(
            f"budget_steps {steps}: give whole numbers in descending order, as in "
            "(128, 64)"
        )
    searched = [method for method in methods if method.batch_rule == "search"]
    for method in searched:
        if method.policy is None or method.budget is not None:
            raise UserError(
                f"method {method.name!r}, policy {method.policy!r}, budget "
                f"{method.budget}: batch_rule 'search' takes a policy, and no budget"
            )
    if searched and "full" not in [method.batch_rule for method in methods]:
        raise UserError(
            f"method {searched[0].name!r}: batch_rule 'search' needs the full cache's "
            "score: add the method 'FKV'"
        )


def at(method: Method, size: int) -> Method:
    """Returns the method with |kv| = `size`."""
    cache = dataclasses.replace(method.cache, budget=size)
    return dataclasses.replace(method, cache=cache)


def bounds(
    method: Method, spec: ModelSpec, longest: int, steps: Sequence[int]
) -> tuple[int, int]:
    """Returns the smallest and the largest |kv| to try, for `fewest`.

    The largest stays below `longest`, the tokens of the longest prompt; |kv| that the
    method does not accept are left out.

    Raises:
      UserError: the method accepts no |kv| below the length of the prompts.
    """
    reason = f"no multiple of {steps[-1]} is below the {longest} tokens of the prompts"
    for size in range(steps[-1], longest, steps[-1]):
        try:
            checked(spec, at(method, size).cache, longest)
        except UserError as error:
            reason = str(error)
        else:
            return size, longest - 1
    raise UserError(f"method {method.name!r}: there is no |kv| to search: {reason}")


def lowest_score(full: Record, tolerance: float) -> float:
    """Returns the lowest score that counts as keeping the full cache's."""
    return full["score"] - tolerance - _ROUNDING


def best_score(samples: Mixed, lines: Sequence[Record]) -> float:
    """Returns the mean score over tasks if all examples that remain score 1."""
    ran, total = summaries(samples, lines), 0.0
    for part in samples.parts:
        known, count = ran.get(part.name), len(part.prompts)
        lost = known["num_examples"] * (1 - known["score"]) if known else 0.0
        total += 1 - lost / count
    return total / len(samples.parts)
