"""Measures on texts how many pairs each head needs: `kvjax.calibrate`.

A text is read with the full cache, and every pair gets a score by what queries make of
it, see `TARGETS`. Heads differ: some look everywhere, most at a few pairs. One
threshold over the scores of all layers and heads keeps a ratio of all pairs, and says
which share of them is whose.
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
from kvjax.attention import reference
from kvjax.cache import calibrations, squeeze
from kvjax.cache.calibrations import FLOOR, NEWEST, SINKS, Calibration, Measured
from kvjax.engine import api, compiled
from kvjax.models import decoder, placement
from kvjax.models.fingerprints import fingerprint
from kvjax.parallel import axes, meshes
from kvjax.types import Model, ModelSpec, PyTree, Scoring, UserError, whole_number

NUM_TEXTS = 16  # windows of Python's documentation, where nobody gives texts
INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"
_PIECE = 128  # queries at a time: their weights are all that is ever held
_WEIGHTS = frozenset({"attn_weights"})


class Target(NamedTuple):
    """What a pair's score is; one of another kind is an entry of `TARGETS`.

    Attributes:
      repeats: whether the text is read again after `INSTRUCTION`, and its second
        reading asks; or the one and only.
      reduce: attention weights f32[B, K, G, T, C] of T queries that ask, zero where
        others do -> scores f32[B, K, C].
      merge: the score by two sets of queries, from theirs.
    """

    repeats: bool
    reduce: Callable[[Array], Array]
    merge: Callable[[Array, Array], Array]


# KVzip (Kim et al. 2025, arXiv 2505.23416): the largest weight that any query of the
# repetition, and any of its G heads, puts on a pair.
_repetition = Target(True, lambda weights: jnp.max(weights, axis=(2, 3)), jnp.maximum)
# The attention that a pair gets while the text is read: summed over queries, mean of G.
_attention = Target(
    False, lambda weights: jnp.sum(jnp.mean(weights, axis=2), axis=2), jnp.add
)
TARGETS = {"repetition": _repetition, "attention": _attention}


def calibrate(
    model: Model,
    texts: Sequence[api.Prompt] | None = None,
    ratios: Sequence[float] = (0.5, 0.25, 0.125),
    *,
    target: str = "repetition",
    tokens: int = 960,
    floor: int = FLOOR,
    show_progress: bool | None = None,
) -> Calibration:
    """Measures which share of a text's pairs each head needs, and keeps it.

    From then on a share such as `budget="25%"` is shared out by it, wherever these
    weights are loaded: they are known by their fingerprint. It is kept as a file in
    `calibrations` of the cache folder ($KVJAX_CACHE), where another calibration of the
    same weights by the same target takes its place.

    For every text and ratio one threshold over all layers and heads keeps exactly the
    ratio of all pairs: a head's share is what is kept of its own. The first 4 and the
    last 16 pairs always are. Shares are averaged over the texts, raised to `floor`
    pairs where they are below it, and scaled so that their mean is the ratio.

    Args:
      model: from `kvjax.load`.
      texts: texts or token ids, of `tokens` tokens or more each; eight that are like
        those to come do. None is 16 windows of the documentation that comes with
        Python.
      ratios: pairs kept of all pairs, falling, between 1 and 0.
      target: what makes a pair worth keeping: `repetition`, being looked at when the
        text is repeated; `attention`, being looked at while it is read.
      tokens: how many of each text are read.
      floor: pairs of a text that every head keeps at every ratio.
      show_progress: see `kvjax.messages.progress`.

    Returns:
      What was measured: also a `budget_rule`, and `save` writes it elsewhere.

    Raises:
      UserError: a text that is too short, tokens that exceed the model's context, a
        ratio too small for `floor`, an unknown target, a model without tokenizer whose
        text is to be repeated. All before anything is compiled.
    """
    if texts is None:
        texts = windows(python_documentation(), NUM_TEXTS)
    given = model, texts, ratios, target, tokens, floor, show_progress
    found = calibrations.average(measure(*given))
    try:
        calibrations.keep(found)
    except UserError as error:
        messages.warn(f"the calibration is only returned, not kept: {error}")
    return found


def python_documentation() -> list[str]:
    """The topics of Python's own reference, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def windows(documents: Sequence[str], count: int) -> list[str]:
    """Texts of about equal length from all over documents; each begins with a word."""
    text = " " + "\n\n".join(documents)
    cuts = [len(text) * i // count for i in range(count + 1)]
    return [
        text[start:end].partition(" ")[2] for start, end in itertools.pairwise(cuts)
    ]


def measure(
    model: Model,
    texts: Sequence[api.Prompt],
    ratios: Sequence[float],
    target: str,
    tokens: int,
    floor: int,
    show_progress: bool | None = None,
) -> Measured:
    """What `calibrate` averages: the shares of each text by itself. Keeps nothing.

    Args, raises: see `calibrate`, whose defaults are nobody else's.
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
    """A text as a model reads it to score its pairs.

    Attributes:
      ids: all that is read, the text first.
      length: tokens of the text, whose pairs are scored.
      asking: first and, excluded, last position of the queries that score.
      target: of `TARGETS`.
    """

    ids: tuple[int, ...]
    length: int
    asking: tuple[int, int]
    target: str


def readings(
    model: Model, texts: Sequence[api.Prompt], target: str, tokens: int
) -> list[Reading]:
    """How every text is read for a target.

    A second reading leaves out a BOS token.

    Raises:
      UserError: see `calibrate`.
    """
    if not isinstance(model, Model):
        raise UserError(f"model is {model!r:.80}: give what kvjax.load returns")
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown: give {' or '.join(TARGETS)}")
    whole_number("tokens", tokens, 2)
    found = [ids[:tokens] for ids in api.tokenize(model, texts)]
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
    """What a reading came to.

    Attributes:
      scores: of every pair of the text, float32.
      similarity: of every layer, the cosine of the residual stream before and after its
        attention, mean over the text's tokens.
      accuracy: see `Calibration.accuracy`, of this text.
    """

    scores: Float[np.ndarray, "L K N"]
    similarity: Float[np.ndarray, "L"]
    accuracy: float


def scored(model: Model, reading: Reading) -> Scored:
    """Reads a text as told."""
    compiled.keep_compiled()
    pieces = math.ceil(len(reading.ids) / _PIECE)
    short = -len(reading.ids) % pieces  # padding comes last: nothing real sees it
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
    """The program: scores of N positions, cosines of layers, the share told right."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, q, k, v, ops, found):
        q, k = ops.apply_rope(q), ops.apply_rope(k)
        out, scores = _attend(q, k, v, ops.scoring, reading, pieces)
        return out, ((*found[0], scores), found[1])

    def measure(index, before, after, found):
        cosine = jnp.mean(squeeze.cosine(before, after)[0, : reading.length])
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
    """Causal attention, and the scores of one layer; some queries after the others."""
    target, (first, last) = TARGETS[reading.target], reading.asking
    positions = jnp.arange(q.shape[3], dtype=jnp.int32)
    slots = jnp.broadcast_to(positions[None, None], k.shape[:3])

    def a_piece(scores, given):
        q, now = given
        every = jnp.full((1,), now.size, jnp.int32)
        partial, seen = reference.attend(
            q, k, v, slots, now[None], every, _WEIGHTS, scoring
        )
        asks = ((first <= now) & (now < last))[None, None, None, :, None]
        weights = jnp.where(asks, seen.attn_weights[..., : reading.length], 0.0)
        out = reference.normalize(partial).astype(q.dtype)
        return target.merge(scores, target.reduce(weights)), out

    scores = jnp.zeros((1, q.shape[1], reading.length), jnp.float32)
    cut = rearrange(q, "b k g (n t) d -> n b k g t d", n=pieces)
    scores, out = lax.scan(a_piece, scores, (cut, positions.reshape(pieces, -1)))
    return rearrange(out, "n b k g t d -> b k g (n t) d"), scores


def _accuracy(
    params: PyTree,
    spec: ModelSpec,
    hidden: Float[Array, "1 T M"],
    tokens: Int[Array, "1 T"],
    reading: Reading,
) -> Float[Array, ""]:
    """The share of the asking queries whose next token, another one, was the likeliest.

    Some queries after the others: all their logits would be T times the vocabulary.
    """
    first, last = reading.asking
    count = last - first - 1
    padding = ((0, -count % _PIECE), (0, 0))
    asking = jnp.pad(hidden[0, first : last - 1], padding)
    cut = rearrange(asking, "(n t) m -> n t m", t=_PIECE)
    likeliest = lambda some: jnp.argmax(decoder.logits(params, some, spec), axis=-1)
    found = lax.map(likeliest, cut).reshape(-1)[:count]
    return jnp.mean(found == tokens[0, first + 1 : last])
