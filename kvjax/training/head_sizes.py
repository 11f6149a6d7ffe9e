"""Sizes by head from what evicting costs: `kvjax.training.fit_heads`.

A calibration (`kvjax.calibrate`) says what heads look at. What it costs that a head
holds fewer pairs, under the rule that chooses them, is another thing: some that look
everywhere are not missed, and some that look at little predict badly with less. So
sizes are moved along the gradient of the loss::

    excerpt      a text, then some of its passages again
      |   read      as eviction has it, every head at its size, and with all pairs
      v
    loss         KL between both predictions: of the text, of the passages
      |   gradient  by every head's size: what one more pair is worth to it
      v
    sizes        times (worth / price) ^ rate, where the price keeps the total

so that one more pair comes to be worth the same in every head that is not at a bound.
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
from kvjax.engine import api, compiled
from kvjax.models import decoder, fingerprints
from kvjax.training import streaming
from kvjax.training.streaming import Reader
from kvjax.types import Model, ModelSpec, PyTree, UserError, real_number, whole_number

PASSAGES, PASSAGE = 5, 48  # how many are repeated, and of how many tokens
PROMPTING = 12  # a passage's first tokens, from which the rest has to follow
INSTRUCTION = "\n\nRepeat parts of the previous context exactly.\n\n"
ABOVE, FROM, TO = 1.2, 1.4, 1.1  # see `_bounds`
RATE, STEP = 0.35, 1.7  # of a round: the first exponent, the most a size changes by
_AT_ONCE = 84  # predictions compared at a time: their logits are all that is held


class Excerpt(NamedTuple):
    """A text to be read, and where its predictions are compared.

    Attributes:
      tokens: the text, an instruction and some of its passages; padding.
      at: positions whose predictions count.
      weights: what each counts for: of the text, of the passages.
    """

    tokens: Int[np.ndarray, "1 T"]
    at: Int[np.ndarray, "N"]
    weights: Float[np.ndarray, "N 2"]


class Round(NamedTuple):
    """What a round of `fit_heads` came to.

    Attributes:
      ratio: pairs kept of all pairs.
      number: 0 is of the sizes that it began with.
      text, passages: KL to the full cache's predictions, nats per token, mean over the
        texts.
      loss: what is made small, of both.
      sizes: pairs per head that gave them.
      worth: by how much one more pair of each head would lower the loss.
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
    texts: Sequence[api.Prompt],
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
    told: Callable[[Round], None] | None = None,
    show_progress: bool | None = None,
) -> Calibration:
    """Moves pairs to the heads that miss them most, at the same total.

    The rule is `policies.retrieval_heads`, with sinks and newest pairs pinned, and
    eviction while reading. Which heads retrieve is what the calibration's sizes say,
    and stays: their sizes stay large, the others' small.

    Every round reads every text evicting, there and back. One that raises the loss is
    taken back, and the next goes half as far.

    Args:
      model: from `kvjax.load`.
      texts: texts or token ids, of as many tokens as the calibration's or more.
      calibration: the sizes to begin with.
      ratios: pairs kept of all pairs, falling, between 1 and 0; None for the
        calibration's.
      rounds: how many times sizes are moved.
      even: how far the first sizes lie between the calibration, 0, and all alike, 1.
      chunk: tokens read, and pairs dropped, at a time.
      floor: pairs that every head keeps; None for 24 beside a chunk.
      passages: what their KL counts for, where the text's counts for 1.
      seed: chooses passages and places.
      known: rounds of an earlier call with the same arguments, which are not run again.
      told: called with every other round; None for nobody.
      show_progress: see `kvjax.messages.progress`.

    Returns:
      A calibration whose target is `loss`: for every ratio the sizes of the round with
      the least.

    Raises:
      UserError: another model's calibration, a text that is too short, or too long for
        the model's context with the passages, an option out of range, a ratio or a
        floor that leaves nothing to move; a model without a tokenizer.
    """
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
    how = {"length": length, "floor": floor, "even": even}
    sizes = (calibration.sizes(spec, mean, **how) for mean in means)
    firsts = [found.astype(np.float64) for found in sizes]
    read = excerpts(model, texts, length, seed, chunk)
    compiled.keep_compiled()
    units = (rounds + 1) * len(ratios) * len(read)
    with messages.progress(units, show_progress) as say:
        say("fitting heads: reading with all pairs", 0)
        whole = [predicting(model.params, *each[:2], spec=model.spec) for each in read]
        for ratio, mean, first in zip(ratios, means, firsts, strict=True):
            reader = reader_of(first, mean, chunk)
            runs = _Fit(model, read, whole, reader, passages, say)
            earlier = [each for each in known if each.ratio == ratio]
            bounds = _bounds(first, mean, floor, length)
            sizes = _least(runs, ratio, first, bounds, mean, rounds, earlier, told)
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
    """What the rounds of one ratio have in common.

    Attributes:
      model, read: who reads, and what.
      whole: what `predicting` says of each.
      reader: who evicts.
      passages: what their KL counts for.
      say: see `kvjax.messages.progress`.
    """

    model: Model
    read: Sequence[Excerpt]
    whole: Sequence[Float[Array, "N M"]]
    reader: Reader
    passages: float
    say: messages.Say


def _least(
    runs: _Fit,
    ratio: float,
    first: Float[np.ndarray, "L K"],
    bounds: tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]],
    mean: int,
    rounds: int,
    known: Sequence[Round],
    told: Callable[[Round], None] | None,
) -> Float[np.ndarray, "L K"]:
    """The sizes of the round with the least loss."""
    sizes, best, rate = _projected(first, mean, bounds), None, RATE
    for number in range(rounds + 1):
        runs.say(f"fitting heads: {ratio:.4g}, round {number} of {rounds}", 0)
        if number < len(known):
            found = known[number]
            runs.say("fitting heads", len(runs.read))
        else:
            (text, passages), worth = _round(runs, sizes)
            loss = text + runs.passages * passages
            found = Round(ratio, number, text, passages, loss, sizes, worth)
            if told is not None:
                told(found)
        if best is None or found.loss < best.loss:
            best = found
        else:  # too far: from the best sizes, half the way
            rate /= 2
        sizes = moved(best.sizes, best.worth, mean, bounds, rate)
    return best.sizes


def reader_of(sizes: Float[np.ndarray, "L K"], mean: int, chunk: int) -> Reader:
    """Retrieval heads by these sizes, sinks and newest pinned."""
    policy = policies.protect(policies.retrieval_heads(ABOVE), SINKS, NEWEST)
    large = np.where(sizes > ABOVE * mean, 2 * mean, mean)  # all that the rule asks
    kinds = tuple(head_groups.simplify(map(int, row)) for row in large)
    return Reader(policy, kinds, mean, chunk)


def excerpts(
    model: Model, texts: Sequence[api.Prompt], length: int, seed: int, chunk: int
) -> list[Excerpt]:
    """The first `length` tokens of every text, and passages of it, as they are read.

    Padding makes whole chunks of them.

    Raises:
      UserError: a model without tokenizer, a text that is too short, excerpts that
        exceed the model's context.
    """
    if model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer to ask for passages with")
    encode = functools.partial(model.tokenizer, add_special_tokens=False)
    asking, ending = (encode(words)["input_ids"] for words in (INSTRUCTION, "\n\n"))
    rng, found = np.random.default_rng(seed), []
    longest = length + len(asking) + PASSAGES * (PASSAGE + len(ending))
    if longest > model.spec.context_length:
        raise UserError(
            f"texts of {length} tokens and passages of them take {longest}, and the "
            f"context of {model.spec.name} has {model.spec.context_length}: calibrate "
            "on shorter texts"
        )
    for index, ids in enumerate(api.tokenize(model, texts)):
        if len(ids) < length:
            raise UserError(
                f"text {index} has {len(ids)} tokens: give texts of {length} or more"
            )
        found.append(_excerpt(ids[:length], asking, ending, rng, chunk))
    return found


def _excerpt(ids, asking, ending, rng, chunk) -> Excerpt:
    """One text's; of its last two thirds twice the places of its passages count."""
    tokens, repeated = [*ids, *asking], []
    starts = rng.choice(len(ids) // PASSAGE - 1, PASSAGES, replace=False) * PASSAGE
    for start in starts + rng.integers(0, PASSAGE, PASSAGES):
        here = len(tokens)
        tokens += [*ids[start : start + PASSAGE], *ending]
        repeated += range(here + PROMPTING - 1, here + PASSAGE - 1)
    places = np.arange(len(ids) // 3, len(ids) - 1)
    told = rng.choice(places, min(2 * len(repeated), len(places)), replace=False)
    short = -(len(told) + len(repeated)) % _AT_ONCE  # padding counts for nothing
    at = np.concatenate([told, repeated, np.zeros(short)]).astype(np.int32)
    weights = np.zeros((len(at), 2), np.float32)
    weights[: len(told), 0] = 1 / len(told)
    weights[len(told) : len(told) + len(repeated), 1] = 1 / len(repeated)
    tokens += [0] * (-len(tokens) % chunk)  # nothing real sees it
    return Excerpt(np.asarray([tokens], np.int32), at, weights)


def _round(
    runs: _Fit, sizes: Float[np.ndarray, "L K"]
) -> tuple[list[float], Float[np.ndarray, "L K"]]:
    """KL of text and of passages, and a pair's worth; means over the excerpts."""
    losses, worth, model = [], [], runs.model
    given = model.params, jnp.asarray(sizes, jnp.float32)
    how = {"spec": model.spec, "reader": runs.reader}
    for excerpt, hidden in zip(runs.read, runs.whole, strict=True):
        found, slope = divergence(*given, *excerpt, hidden, runs.passages, **how)
        losses.append(np.asarray(found))
        worth.append(-np.asarray(slope, np.float64))
        runs.say("fitting heads", 1)
    return np.mean(losses, axis=0).tolist(), np.mean(worth, axis=0)


@functools.partial(jax.jit, static_argnames="spec")
def predicting(
    params: PyTree, tokens: Int[Array, "1 T"], at: Int[Array, "N"], *, spec: ModelSpec
) -> Float[Array, "N M"]:
    """The hidden states at some positions of a text of which all pairs stay."""
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
    """KL(all pairs || sizes) of text and passages, and the gradient of the loss.

    Args:
      whole: what `predicting` says.
      passages: what their KL counts for.
    """

    def loss(sizes):
        some = streaming.read(params, spec, tokens, sizes, reader)[0, at]
        found = _compared(params, spec, whole, some, weights)
        return found[0] + passages * found[1], found

    (_, found), slope = jax.value_and_grad(loss, has_aux=True)(sizes)
    return found, slope


def _compared(params, spec, whole, some, weights) -> Float[Array, "2"]:
    """KL of predictions from hidden states [N, M], weighted; some after the others."""

    @jax.checkpoint
    def a_piece(given):
        p, q = (jax.nn.log_softmax(decoder.logits(params, x, spec)) for x in given[:2])
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1) @ given[2]

    cut = lambda x: x.reshape(-1, _AT_ONCE, x.shape[-1])
    return jnp.sum(jax.lax.map(a_piece, tuple(map(cut, (whole, some, weights)))), 0)


def moved(
    sizes: Float[np.ndarray, "L K"],
    worth: Float[np.ndarray, "L K"],
    mean: int,
    bounds: tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]],
    rate: float = RATE,
) -> Float[np.ndarray, "L K"]:
    """Sizes after a round, their mean the same.

    Of heads between their bounds the price is the mean of what a pair is worth,
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
    """Sizes within bounds that add up."""
    low, high = (np.ravel(bound) for bound in bounds)
    found = proportional(sizes.ravel(), mean * sizes.size, low, high)
    return found.reshape(sizes.shape)


def _bounds(sizes, mean: int, floor: int, length: int):
    """The least and the most of every head [L, K] twice.

    Heads above `ABOVE` times the mean are those that the rule takes for retrieval
    heads: they keep `FROM` times the mean at least, the others `TO` times it at most,
    so that sizes rounded to multiples are still told apart.
    """
    retrieves = sizes > ABOVE * mean
    low = np.where(retrieves, min(FROM * mean, length), floor)
    high = np.where(retrieves, length, max(TO * mean, floor))
    return low, high


def _mean(calibration: Calibration, ratio: float, chunk: int, floor: int) -> int:
    """Pairs per head on average.

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
