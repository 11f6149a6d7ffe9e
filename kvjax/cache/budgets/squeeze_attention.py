"""SqueezeAttention (Wang and Gan 2024), arXiv 2404.04793, Algorithm 1.

::

    cosine(before, after)       of every token's residual stream, around attention
      -> mean over the prompt   one number per layer; high: attention changes little
      -> three groups           one-dimensional k-means
      -> sizes                  layers of the third group keep less, the others more
"""

import functools
import itertools
import os

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import calibrations
from kvjax.cache.budgets.base import BudgetRule, check_least
from kvjax.types import ModelSpec, UserError, real_number, whole_number

GROUPS = 3
SOURCES = "prompts", "calibration"


def squeeze(
    p: float = 0.35,
    least: int = 1,
    source: str = "prompts",
    path: calibrations.Given = None,
    capped: bool = False,
    length: int | None = None,
) -> BudgetRule:
    """Gives layers whose attention changes the residual stream least p of the mean.

        size = round(mean p)                                in G3, the highest cosines
        size = (L mean - |G3| round(mean p)) / (|G1| + |G2|)    in the other layers

    If the division leaves a remainder of r pairs, the first r of the other layers keep
    one more. If all layers have the same cosine, they keep the mean.

    By default the cosines are means over the prompts of a batch, so all of these get
    the same sizes. Prefill then stores whole prompts, and needs the schedule
    `after_prefill` or `decode_only`. With `source="calibration"` the cosines come from
    a calibration's texts: sizes are known before prefill, any schedule works, and one
    set of programs serves a whole run.

    The paper's sizes ignore the length of the prompt: if G3 has nearly all layers, the
    others get more slots than the prompt has tokens. `capped` gives the surplus to G3.
    Look at a model's cosines
    (`experiments/gallery/layer_similarity.py`) before choosing p.

    Args:
      p: the share of the mean that G3 keeps, above 0, at most 1 (uniform); 0.3 in the
        example of the paper's appendix.
      least: the smallest size of G3, in pairs per head: more than the policy pins.
      source: of the cosines: the `prompts` themselves, or a `calibration`.
      path: of the calibration, or the calibration itself, see
        `kvjax.cache.budgets.calibrated`; None finds the one of the model's weights.
      capped: limits every layer to `length` pairs, and gives the surplus to G3; not in
        the paper.
      length: tokens of the longest prompt, for `capped` only. None is the `length` of
        `make_spec`.

    Source: Wang and Gan 2024, arXiv 2404.04793, Algorithm 1.

    Raises:
      UserError: an option out of range; from `allocate`, a calibration that does not
        fit, or that has no cosines.
    """
    share = real_number("squeeze(p)", p)
    if not 0 < share <= 1:
        raise UserError(
            f"squeeze(p={p!r}): give the share of the mean budget that layers which "
            "change least keep, above 0 and 1 at most"
        )
    if source not in SOURCES:
        raise UserError(f"squeeze(source={source!r:.80}): use one of {SOURCES}")
    if not isinstance(path, calibrations.Calibration | str | os.PathLike | None):
        raise UserError(f"squeeze(path) is {path!r}: give a calibration's file")
    if path is not None and source != "calibration":
        raise UserError(f"squeeze(path={path!r}) goes with source='calibration'")
    if not isinstance(capped, bool):
        raise UserError(f"squeeze(capped={capped!r}): give True or False")
    if length is not None:
        length = whole_number("squeeze(length)", length, 1)
        if not capped:
            raise UserError(f"squeeze(length={length}) goes with capped=True")
    least = whole_number("squeeze(least)", least, 1)
    return _squeeze(share, least, source, path, capped, length)


@functools.cache
def _squeeze(
    p: float, least: int, source: str, path, capped: bool, length: int | None
) -> BudgetRule:
    """Returns one object per set of options: another would compile again."""
    of_length = None
    if capped and length is None:
        of_length = functools.partial(_squeeze, p, least, source, path, capped)

    def smallest(mean):
        check_least("squeeze", least, mean)
        return max(round(mean * p), least)

    def reallocate(measured, mean):
        return sizes(group(measured), mean, smallest(mean), length)

    if source == "calibration":
        return BudgetRule(
            "squeeze",
            lambda spec, mean: reallocate(_calibrated(spec, path), mean),
            of_length=of_length,
        )
    return BudgetRule(
        "squeeze",
        lambda spec, mean: (mean,) * spec.num_layers,
        cosine,
        reallocate,
        smallest,
        of_length,
    )


def _calibrated(spec: ModelSpec, path: calibrations.Given) -> np.ndarray:
    """Returns a calibration's cosines, float64[L]."""
    found = calibrations.of_model(spec, path)
    if not found.similarity:
        raise UserError(
            f"the calibration of {found.model!r} has no similarity of layers, which "
            "squeeze needs: make it anew with kvjax.calibrate"
        )
    return np.asarray(found.similarity, np.float64)


def cosine(
    before: Float[Array, "B T M"], after: Float[Array, "B T M"]
) -> Float[Array, "B T"]:
    """Returns each token's cosine similarity before and after attention, float32."""
    before, after = before.astype(jnp.float32), after.astype(jnp.float32)
    lengths = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
    return jnp.sum(before * after, axis=-1) / jnp.maximum(lengths, 1e-30)


def group(measured: np.ndarray) -> np.ndarray:
    """Returns the group, int[L], of every layer by its cosine; 0 has the lowest.

    Exact one-dimensional k-means: of all ways to cut the sorted values into `GROUPS`
    groups (or as many as there are distinct values), the first with the least sum of
    squared distances to the groups' means. Equal values share a group.
    """
    ordered = np.sort(measured)
    starts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist()]
    spread = functools.cache(
        lambda start, end: np.var(ordered[start:end]) * (end - start)
    )

    def total(cuts):
        return sum(itertools.starmap(spread, itertools.pairwise((*cuts, len(ordered)))))

    inner = itertools.combinations(starts[1:], min(GROUPS, len(starts)) - 1)
    best = min(((0, *cuts) for cuts in inner), key=total)
    return np.searchsorted(ordered[list(best)], measured, side="right") - 1


def sizes(
    groups: np.ndarray, mean: int, small: int, most: int | None = None
) -> tuple[int, ...]:
    """Returns `small` for layers of the last group; the others share the remainder.

    If that is more than `most` each, they get `most`, and the last group shares the
    surplus. Sizes depend on the last group only, since every set of sizes compiles a
    program.
    """
    last, total = groups == groups.max(), len(groups) * mean
    if last.all():
        return (mean,) * len(groups)
    if most is not None and (~last).sum() * most < total - last.sum() * small:
        most = max(most, mean)
        return _shared(last, total - (~last).sum() * most, most)
    return _shared(~last, total - last.sum() * small, small)


def _shared(layers: np.ndarray, total: int, other: int) -> tuple[int, ...]:
    """Shares `total` among the masked layers exactly; the rest get `other`."""
    each, rest = divmod(int(total), int(layers.sum()))
    return tuple(np.where(layers, each + (np.cumsum(layers) <= rest), other).tolist())
