"""Measures on texts how many KV pairs each head needs: `kvjax.calibrate`.

The model reads a text with the full cache, and every pair is scored by the attention
that it receives, see `TARGETS`. Some heads attend everywhere, most to a few pairs. One
threshold over the scores of all layers and heads keeps a chosen ratio of all pairs; a
head needs the share of its own pairs that lies above the threshold.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax import messages
from kvjax.attention import AttentionSpec, Pairs, Queries, reference
from kvjax.cache import calibrations
from kvjax.cache.budgets import squeeze_attention
from kvjax.cache.calibrations import FLOOR, NEWEST, SINKS, Calibration, Measured
from kvjax.engine import compiled, tokenization
from kvjax.models import decoder, placement
from kvjax.models.fingerprints import fingerprint
from kvjax.parallel import axes, meshes
from kvjax.types import Model, ModelSpec, PyTree, Scoring, UserError, whole_number

NUM_TEXTS = 16  # windows of Python's documentation, the default texts
INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"
_PIECE = 128  # queries per step, which bounds the attention weights in memory
_WEIGHTS = frozenset({"attn_weights"})


class Target(NamedTuple):
    """A way to score pairs by attention weights; see `TARGETS`.

    Attributes:
      repeats: whether the text is repeated after `INSTRUCTION`; then only queries of
        the repetition score.
      reduce: attention weights f32[B, K, G, T, C], zero for queries that do not score,
        -> scores f32[B, K, C].
      merge: combines the scores of two sets of queries.
    """

    repeats: bool
    reduce: Callable[[Array], Array]
    merge: Callable[[Array, Array], Array]


# KVzip (Kim et al. 2025, arXiv 2505.23416): the largest weight that any query of the
# repetition, and any of its G heads, puts on a pair.
_repetition = Target(True, lambda weights: jnp.max(weights, axis=(2, 3)), jnp.maximum)
# The attention that a pair receives while the text is read: summed over queries, mean
# of G.
_attention = Target(
    False, lambda weights: jnp.sum(jnp.mean(weights, axis=2), axis=2), jnp.add
)
TARGETS = {"repetition": _repetition, "attention": _attention}


def calibrate(
    model: Model,
    texts: Sequence[tokenization.Prompt] | None = None,
    ratios: Sequence[float] = (0.5, 0.25, 0.125),
    *,
    target: str = "repetition",
    tokens: int = 960,
    floor: int = FLOOR,
    show_progress: bool | None = None,
) -> Calibration:
    """Measures the share of a text's pairs that each head needs, and saves it.

    From then on, a budget such as `budget="25%"` is divided between heads by these
    shares wherever the same weights are loaded; a fingerprint identifies them. The file
    is in `calibrations` of the cache folder ($KVJAX_CACHE). A later calibration of the
    same weights by the same target replaces it.

    For every text and ratio, one threshold over all layers and heads keeps exactly the
    ratio of all pairs; a head's share is the kept part of its own pairs. The
    first 4 and the last 16 pairs are always kept. Shares are averaged over the texts,
    raised to at least `floor` pairs, and scaled so that their mean is the ratio.

    Args:
      model: from `kvjax.load`.
      texts: texts or token ids, of at least `tokens` tokens each; eight texts like the
        future prompts are enough. None is 16 windows of Python's own documentation.
      ratios: pairs kept of all pairs, descending, between 1 and 0.
      target: the score of a pair: the attention that it receives when the model
        repeats the text (`repetition`), or while it reads the text (`attention`).
      tokens: number of tokens read of each text.
      floor: pairs of a text that every head keeps at every ratio.
      show_progress: see `kvjax.messages.progress`.

    Returns:
      The calibration. It can be given as a `budget_rule`, and `save` writes it to a
      file.

    Raises:
      UserError: a text that is too short, tokens that exceed the model's context, a
        ratio too small for `floor`, an unknown target, a target that repeats the text
        for a model without tokenizer. All are raised before anything is compiled.
    """
    if texts is None:
        texts = windows(python_documentation(), NUM_TEXTS)
    measured = measure(model, texts, ratios, target, tokens, floor, show_progress)
    found = calibrations.average(measured)
    try:
        calibrations.keep(found)
    except UserError as error:
        messages.warn(f"the calibration is returned but not saved: {error}")
    return found


def python_documentation() -> list[str]:
    """Returns the topics of Python's own reference, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def windows(documents: Sequence[str], count: int) -> list[str]:
    """Cuts documents into texts of about equal length that begin with a word."""
    text = " " + "\n\n".join(documents)
    cuts = [len(text) * i // count for i in range(count + 1)]
    return [
        text[start:end].partition(" ")[2] for start, end in itertools.pairwise(cuts)
    ]


def measure(
    model: Model,
    texts: Sequence[tokenization.Prompt],
    ratios: Sequence[float],
    target: str,
    tokens: int,
    floor: int,
    show_progress: bool | None = None,
) -> Measured:
    """Returns the shares of each text, which `calibrate` averages; saves nothing.

    Args, raises: see `calibrate`.
    """
    floor = whole_number("floor", floor, SINKS + NEWEST)
    ratios = calibrations.checked_ratios(ratios)
    read = readings(model, texts, target, tokens)
    if ratios[-1] * tokens < floor:
        raise UserError(
            f"ratio {ratios[-1]} of {tokens} tokens is less than the {floor} pairs "
            "that every head keeps: raise the ratio or tokens, or lower floor"
        )
    shares, every = [], []
    with messages.progress(len(read), show_progress) as say:
        for number, reading in enumerate(read, start=1):
            say(f"calibrating: text {number} of {len(read)}", 0)
            found = scored(model, reading)
            shares.append([calibrations.kept_shares(found.scores, r) for r in ratios])
            every.append(found)
            say("calibrating", 1)
    return Measured(
        model=model.spec.name,
        fingerprint=fingerprint(model),
        target=target,
        tokens=tokens,
        ratios=ratios,
        floor=floor,
        shares=np.asarray(shares),
        similarity=np.asarray([found.similarity for found in every]),
        accuracy=np.asarray([found.accuracy for found in every]),
        float16=fingerprint(model, rounded_to=jnp.dtype(jnp.float16)),
    )


class Reading(NamedTuple):
    """The tokens that score the pairs of one text.

    Attributes:
      ids: all tokens read, the text first.
      length: tokens of the text, whose pairs are scored.
      asking: range of the positions whose queries score: the first, and one past the
        last.
      target: one of `TARGETS`.
    """

    ids: tuple[int, ...]
    length: int
    asking: tuple[int, int]
    target: str


def readings(
    model: Model, texts: Sequence[tokenization.Prompt], target: str, tokens: int
) -> list[Reading]:
    """Returns the tokens to read for every text; repetitions leave out the BOS token.

    Raises:
      UserError: see `calibrate`.
    """
    if not isinstance(model, Model):
        raise UserError(f"model is {model!r:.80}: give what kvjax.load returns")
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown: give {' or '.join(TARGETS)}")
    whole_number("tokens", tokens, 2)
    found = [ids[:tokens] for ids in tokenization.tokenize(model, texts)]
    short = [index for index, ids in enumerate(found) if len(ids) < tokens]
    if short:
        raise UserError(
            f"text {short[0]} has {len(found[short[0]])} tokens: give texts of "
            f"{tokens} or more, or lower tokens"
        )
    between = _instruction(model) if TARGETS[target].repeats else None
    read = [_reading(model, ids, between, target) for ids in found]
    longest = max(len(reading.ids) for reading in read)
    if longest > model.spec.context_length:
        raise UserError(
            f"{tokens} tokens take {longest} to score, and the context of "
            f"{model.spec.name} has {model.spec.context_length}: lower tokens"
        )
    return read


def _instruction(model: Model) -> list[int]:
    if model.tokenizer is None:
        raise UserError(
            f"{model.spec.name} has no tokenizer to ask for a repetition with: give "
            "another target than 'repetition'"
        )
    return list(model.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])


def _reading(model: Model, ids: list[int], between, target: str) -> Reading:
    if between is None:
        return Reading(tuple(ids), len(ids), (0, len(ids)), target)
    bos = getattr(model.tokenizer, "bos_token_id", None)
    start = len(ids) + len(between)
    every = (*ids, *between, *(ids[1:] if ids[0] == bos else ids))
    return Reading(every, len(ids), (start, len(every)), target)


class Scored(NamedTuple):
    """The scores of one text.

    Attributes:
      scores: score of every pair of the text, float32.
      similarity: for every layer, the cosine between the residual stream before and
        after its attention, averaged over the text's tokens.
      accuracy: see `Calibration.accuracy`.
    """

    scores: Float[np.ndarray, "L K N"]
    similarity: Float[np.ndarray, "L"]
    accuracy: float


def scored(model: Model, reading: Reading) -> Scored:
    """Runs the model over a text and returns its scores."""
    compiled.keep_compiled()
    pieces = math.ceil(len(reading.ids) / _PIECE)
    short = -len(reading.ids) % pieces  # padding comes last, so no real query sees it
    tokens = jnp.asarray([(*reading.ids, *(0,) * short)], jnp.int32)
    shape = reading._replace(ids=())
    with meshes.use(placement.of(model.params)):
        found = _read(model.params, tokens, model.spec, shape, pieces)
    scores, similarity, right = axes.to_host(found)
    return Scored(scores, similarity, float(right))


@functools.partial(jax.jit, static_argnames=("spec", "reading", "pieces"))
def _read(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    spec: ModelSpec,
    reading: Reading,
    pieces: int,
) -> tuple[Float[Array, "L K N"], Float[Array, "L"], Float[Array, ""]]:
    """Returns the scores of N positions, each layer's cosine, and the accuracy."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, found):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        out, scores = _attend(q, k, v, ops.scoring, reading, pieces)
        return out, ((*found[0], scores), found[1])

    def measure(index, before, after, found):
        cosine = jnp.mean(squeeze_attention.cosine(before, after)[0, : reading.length])
        return found[0], (*found[1], cosine)

    hidden, (scores, cosines) = decoder.forward(
        params, spec, tokens, positions, ((), ()), attend, measure
    )
    right = _accuracy(params, spec, hidden, tokens, reading)
    return jnp.concatenate(scores), jnp.stack(cosines), right


def _attend(
    q: Float[Array, "1 K G T D"],
    k: Float[Array, "1 K T D"],
    v: Float[Array, "1 K T D"],
    scoring: Scoring,
    reading: Reading,
    pieces: int,
) -> tuple[Float[Array, "1 K G T D"], Float[Array, "1 K N"]]:
    """Returns causal attention and one layer's scores, `_PIECE` queries at a time."""
    target, (first, last) = TARGETS[reading.target], reading.asking
    spec = AttentionSpec(_WEIGHTS, scoring=scoring)
    positions = jnp.arange(q.shape[3], dtype=jnp.int32)
    slots = jnp.broadcast_to(positions[None, None], k.shape[:3])

    def piece(scores, queries):
        q, now = queries
        every = jnp.full((1,), now.size, jnp.int32)
        partial, observed = reference.attend(
            Queries(q, now[None], every), Pairs(k, v, slots), spec
        )
        scoring_queries = ((first <= now) & (now < last))[None, None, None, :, None]
        weights = jnp.where(
            scoring_queries, observed.attn_weights[..., : reading.length], 0.0
        )
        out = reference.normalize(partial).astype(q.dtype)
        return target.merge(scores, target.reduce(weights)), out

    scores = jnp.zeros((1, q.shape[1], reading.length), jnp.float32)
    cut = rearrange(q, "b k g (n t) d -> n b k g t d", n=pieces)
    scores, out = lax.scan(piece, scores, (cut, positions.reshape(pieces, -1)))
    return rearrange(out, "n b k g t d -> b k g (n t) d"), scores


def _accuracy(
    params: PyTree,
    spec: ModelSpec,
    hidden: Float[Array, "1 T M"],
    tokens: Int[Array, "1 T"],
    reading: Reading,
) -> Float[Array, ""]:
    """Returns the share of scoring queries that predict their next token.

    Computes the logits of `_PIECE` queries at a time: all T would take T x V.
    """
    first, last = reading.asking
    count = last - first - 1
    padding = ((0, -count % _PIECE), (0, 0))
    asking = jnp.pad(hidden[0, first : last - 1], padding)
    cut = rearrange(asking, "(n t) m -> n t m", t=_PIECE)
    likeliest = lambda x: jnp.argmax(decoder.logits(params, x, spec), axis=-1)
    found = lax.map(likeliest, cut).reshape(-1)[:count]
    return jnp.mean(found == tokens[0, first + 1 : last])
