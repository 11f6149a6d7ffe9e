"""Fits the size of every head to the loss that eviction causes: `fit_heads`.

A calibration (`kvjax.calibrate`) measures where heads attend. The cost of giving a head
fewer pairs under a policy is another matter: some heads attend everywhere and are not
missed, and some attend to little and predict badly with less. So `fit_heads` moves the
sizes along the gradient of a loss::

    excerpt      a text, then some of its passages repeated
      |   read      with eviction, every head at its size, and with the full cache
      v
    loss         KL between both predictions, of the text and of the passages
      |   gradient  with respect to every head's size: the worth of one more pair
      v
    sizes        times (worth / price) ^ rate, where the price keeps the total

until one more pair is worth the same in every head whose size is not at a bound.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import messages, policies
from kvjax.cache import calibrations, head_groups
from kvjax.cache.calibrations import NEWEST, SINKS, Calibration
from kvjax.cache.calibrations.apportion import proportional
from kvjax.engine import compiled, tokenization
from kvjax.models import decoder, fingerprints
from kvjax.training import excerpts, streaming
from kvjax.training.excerpts import AT_ONCE, PASSAGE, PASSAGES, Excerpt
from kvjax.training.streaming import Reader
from kvjax.types import Model, ModelSpec, PyTree, UserError, real_number, whole_number

ABOVE, FROM, TO = 1.2, 1.4, 1.1  # see `_bounds`
RATE, STEP = 0.35, 1.7  # first exponent; largest factor of a size in one round


class Round(NamedTuple):
    """The result of one round of `fit_heads`.

    Attributes:
      ratio: pairs kept of all pairs.
      number: 0 for the initial sizes.
      text, passages: KL from the full cache's predictions in nats per token, mean over
        the texts.
      loss: the weighted sum of both, which is minimised.
      sizes: pairs per head in this round.
      worth: decrease of the loss per additional pair of each head.
    """

    ratio: float
    number: int
    text: float
    passages: float
    loss: float
    sizes: Float[np.ndarray, "L K"]
    worth: Float[np.ndarray, "L K"]


def fit_heads(
    model: Model,
    texts: Sequence[tokenization.Prompt],
    calibration: Calibration,
    ratios: Sequence[float] | None = None,
    *,
    rounds: int = 3,
    even: float = 0.35,
    chunk: int = 32,
    floor: int | None = None,
    passages: float = 0.02,
    seed: int = 0,
    known: Sequence[Round] = (),
    on_round: Callable[[Round], None] | None = None,
    show_progress: bool | None = None,
    told: Callable[[Round], None] | None = None,
) -> Calibration:
    """Moves pairs to the heads where they lower the loss most, at the same total.

    The policy is `policies.retrieval_heads`, with sinks and newest pairs pinned, and it
    evicts during prefill. The calibration's sizes decide which heads retrieve. This
    does not change: retrieval heads stay large, the others small.

    Every round runs every text with eviction, forward and backward. A round that raises
    the loss is undone, and the next one starts from the best sizes at half the rate.

    Args:
      model: from `kvjax.load`.
      texts: texts or token ids, each of at least `calibration.tokens` tokens.
      calibration: the initial sizes.
      ratios: pairs kept of all pairs, descending, between 1 and 0; None for the
        calibration's.
      rounds: number of times that sizes are moved.
      even: interpolates the initial sizes from the calibrated ones, 0, to uniform
        ones, 1.
      chunk: tokens read, and pairs evicted, at a time.
      floor: pairs that every head keeps; None is `chunk` + 24.
      passages: weight of the passages' KL in the loss; the text's is 1.
      seed: of the random choice of passages and compared positions.
      known: rounds of an earlier call with the same arguments, which are not run again.
      on_round: called with every round that is run.
      show_progress: see `kvjax.messages.progress`.
      told: deprecated name of `on_round`.

    Returns:
      A calibration whose target is `loss`, with the sizes of the round of least loss
      for every ratio.

    Raises:
      UserError: another model's calibration; a text that is too short, or too long for
        the model's context together with the passages; an option out of range; a ratio
        whose mean size is below the floor; a model without a tokenizer.
    """
    if told is not None:
        messages.warn("fit_heads: write on_round for told", DeprecationWarning)
        on_round = on_round or told
    spec = fingerprints.marked(model)
    calibration.check(spec)
    ratios = calibrations.checked_ratios(
        calibration.ratios if ratios is None else ratios
    )
    chunk = whole_number("chunk", chunk, 1)
    floor = chunk + 24 if floor is None else floor
    passages = real_number("passages", passages, 0)
    means = [_mean(calibration, ratio, chunk, floor) for ratio in ratios]
    whole_number("rounds", rounds, 1)
    length, shares = calibration.tokens, []
    firsts = [
        calibration.sizes(spec, mean, length=length, floor=floor, even=even).astype(
            np.float64
        )
        for mean in means
    ]
    read = excerpts.make(model, texts, length, seed, chunk)
    compiled.keep_compiled()
    units = (rounds + 1) * len(ratios) * len(read)
    with messages.progress(units, show_progress) as say:
        say("fitting heads: reading with the full cache", 0)
        whole = [
            full_cache_hidden(model.params, each.tokens, each.at, spec=model.spec)
            for each in read
        ]
        for ratio, mean, first in zip(ratios, means, firsts, strict=True):
            reader = reader_of(first, mean, chunk)
            fit = _Fit(model, read, whole, reader, passages, say)
            sizes = _least_loss(
                fit,
                ratio,
                first,
                bounds=_bounds(first, mean, floor, length),
                mean=mean,
                rounds=rounds,
                known=[each for each in known if each.ratio == ratio],
                on_round=on_round,
            )
            shares.append(
                calibrations.whole_shares(sizes / length, ratio, floor, length)
            )
    return dataclasses.replace(
        calibration,
        target=calibrations.LOSS,
        num_texts=len(read),
        ratios=ratios,
        shares=tuple(shares),
    )


class _Fit(NamedTuple):
    """The inputs that all rounds of one ratio share.

    Attributes:
      model: from `kvjax.load`.
      read: the excerpts.
      whole: `full_cache_hidden` of each excerpt.
      reader: the settings of eviction.
      passages: weight of the passages' KL in the loss.
      say: see `kvjax.messages.progress`.
    """

    model: Model
    read: Sequence[Excerpt]
    whole: Sequence[Float[Array, "N M"]]
    reader: Reader
    passages: float
    say: messages.Say


def _least_loss(
    fit: _Fit,
    ratio: float,
    first: Float[np.ndarray, "L K"],
    *,
    bounds: tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]],
    mean: int,
    rounds: int,
    known: Sequence[Round],
    on_round: Callable[[Round], None] | None,
) -> Float[np.ndarray, "L K"]:
    """Runs the rounds of one ratio and returns the sizes of the one of least loss."""
    sizes, best, rate = _projected(first, mean, bounds), None, RATE
    for number in range(rounds + 1):
        fit.say(f"fitting heads: {ratio:.4g}, round {number} of {rounds}", 0)
        if number < len(known):
            found = known[number]
            fit.say("fitting heads", len(fit.read))
        else:
            (text, passages), worth = _round(fit, sizes)
            loss = text + fit.passages * passages
            found = Round(ratio, number, text, passages, loss, sizes, worth)
            if on_round is not None:
                on_round(found)
        if best is None or found.loss < best.loss:
            best = found
        else:  # the step was too long: from the best sizes again, at half the rate
            rate /= 2
        sizes = moved(best.sizes, best.worth, mean, bounds, rate)
    return best.sizes


def reader_of(sizes: Float[np.ndarray, "L K"], mean: int, chunk: int) -> Reader:
    """Returns the settings of `retrieval_heads` under these sizes, both ends pinned."""
    policy = policies.protect(policies.retrieval_heads(ABOVE), SINKS, NEWEST)
    # The policy only compares a budget with ABOVE * mean, so two budgets will do.
    large = np.where(sizes > ABOVE * mean, 2 * mean, mean)
    kinds = tuple(head_groups.simplify(map(int, row)) for row in large)
    return Reader(policy, kinds, mean, chunk)


def _round(
    fit: _Fit, sizes: Float[np.ndarray, "L K"]
) -> tuple[list[float], Float[np.ndarray, "L K"]]:
    """Returns the KL of texts and passages, and every head's worth of a pair.

    All are means over the excerpts.
    """
    losses, worth, model = [], [], fit.model
    sizes = jnp.asarray(sizes, jnp.float32)
    for excerpt, hidden in zip(fit.read, fit.whole, strict=True):
        found, slope = divergence(
            model.params,
            sizes,
            *excerpt,
            hidden,
            fit.passages,
            spec=model.spec,
            reader=fit.reader,
        )
        losses.append(np.asarray(found))
        worth.append(-np.asarray(slope, np.float64))
        fit.say("fitting heads", 1)
    return np.mean(losses, axis=0).tolist(), np.mean(worth, axis=0)


@functools.partial(jax.jit, static_argnames="spec")
def full_cache_hidden(
    params: PyTree, tokens: Int[Array, "1 T"], at: Int[Array, "N"], *, spec: ModelSpec
) -> Float[Array, "N M"]:
    """Returns the hidden states [N, M] at `at` of a text read with the full cache."""
    return streaming.read_whole(params, spec, tokens)[0, at]


@functools.partial(jax.jit, static_argnames=("spec", "reader"))
def divergence(
    params: PyTree,
    sizes: Float[Array, "L K"],
    tokens: Int[Array, "1 T"],
    at: Int[Array, "N"],
    weights: Float[Array, "N 2"],
    whole: Float[Array, "N M"],
    passages: float,
    *,
    spec: ModelSpec,
    reader: Reader,
) -> tuple[Float[Array, "2"], Float[Array, "L K"]]:
    """Returns KL(full cache || these sizes) and the gradient of the loss by the sizes.

    Args:
      params: weights.
      sizes: pairs per head.
      tokens, at, weights: see `Excerpt`.
      whole: `full_cache_hidden` of the excerpt.
      passages: weight of the passages' KL in the loss.
      spec: the model's shape.
      reader: the settings of eviction.

    Returns:
      The KL of the text and of the passages [2], and the gradient [L, K].
    """

    def loss(sizes):
        some = streaming.read(params, spec, tokens, sizes, reader)[0, at]
        found = _compared(params, spec, whole, some, weights)
        return found[0] + passages * found[1], found

    (_, found), slope = jax.value_and_grad(loss, has_aux=True)(sizes)
    return found, slope


def _compared(params, spec, whole, some, weights) -> Float[Array, "2"]:
    """Returns the weighted KL between predictions from hidden states [N, M]."""

    @jax.checkpoint  # else the logits of every piece are kept for the gradient
    def a_piece(piece):
        *hidden, weights = piece
        p, q = (jax.nn.log_softmax(decoder.logits(params, x, spec)) for x in hidden)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1) @ weights

    cut = lambda x: x.reshape(-1, AT_ONCE, x.shape[-1])
    return jnp.sum(jax.lax.map(a_piece, tuple(map(cut, (whole, some, weights)))), 0)


def moved(
    sizes: Float[np.ndarray, "L K"],
    worth: Float[np.ndarray, "L K"],
    mean: int,
    bounds: tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]],
    rate: float = RATE,
) -> Float[np.ndarray, "L K"]:
    """Returns the sizes after a round, with the same mean.

    The price is the mean worth of a pair over the heads that are not at a bound,
    weighted by size.
    """
    low, high = bounds
    free = (sizes > low + 0.5) & (sizes < high - 0.5)
    price = np.sum(np.where(free, worth * sizes, 0)) / max(np.sum(sizes[free]), 1)
    if price <= 0:
        return sizes
    change = np.clip(worth / price, 1e-3, 1e3) ** rate
    return _projected(sizes * np.clip(change, 1 / STEP, STEP), mean, bounds)


def _projected(sizes, mean: int, bounds) -> Float[np.ndarray, "L K"]:
    """Scales sizes so that they lie within the bounds and have this mean."""
    low, high = (np.ravel(bound) for bound in bounds)
    found = proportional(sizes.ravel(), mean * sizes.size, low, high)
    return found.reshape(sizes.shape)


def _bounds(sizes, mean: int, floor: int, length: int):
    """Returns the lower and the upper bound of every head's size, [L, K] each.

    The policy treats heads above `ABOVE` times the mean as retrieval heads. These keep
    at least `FROM` times the mean and the others at most `TO` times it, so that sizes
    rounded to multiples stay on their side of `ABOVE`.
    """
    retrieves = sizes > ABOVE * mean
    low = np.where(retrieves, min(FROM * mean, length), floor)
    high = np.where(retrieves, length, max(TO * mean, floor))
    return low, high


def _mean(calibration: Calibration, ratio: float, chunk: int, floor: int) -> int:
    """Returns the mean number of pairs per head.

    Raises:
      UserError: texts too short for passages, a floor out of range.
    """
    if calibration.tokens < (PASSAGES + 1) * PASSAGE:
        raise UserError(
            f"a calibration of texts of {calibration.tokens} tokens: passages need "
            f"{(PASSAGES + 1) * PASSAGE}, calibrate on longer texts"
        )
    floor = whole_number("floor", floor, SINKS + NEWEST + chunk + 1)
    mean = round(ratio * calibration.tokens)
    if mean < floor:
        raise UserError(
            f"ratio {ratio} of {calibration.tokens} tokens is {mean} pairs, less than "
            f"the {floor} that every head keeps: raise the ratio, or lower floor "
            "or chunk"
        )
    return mean
