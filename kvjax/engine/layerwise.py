"""Many methods, few prompts: one layer's programs for all layers, one reading for all.

A whole model takes half a minute to compile for every method, and minutes where its
heads differ. Here what comes before and after attention is compiled once for all
layers and methods, and attention with its cache for every size that some heads keep: a
second or two each. Running layer by layer costs some dispatches per layer instead of
one per batch, so this is for sweeps over methods, not for throughput; whole models give
the same tokens and keep the same pairs. Rules that only work once the prompt is in
watch it together: it is read once for all of them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import parts
from kvjax.cache.spec import CacheSpec
from kvjax.engine import runner, sharing, steps
from kvjax.engine.compiled import Job, tree_bytes
from kvjax.engine.runner import Prefilled, Prompts
from kvjax.engine.sampling import sample
from kvjax.models import decoder
from kvjax.policies import watching
from kvjax.types import Model, ModelSpec, PyTree, Stats, UserError


class Readings:
    """Prompts read under any method; those of `after_prefill` methods only once.

    Holds the full caches of what it has read once, and the statistics of every rule.

    Args:
      model: whose weights are put where they stay.
      methods: all that may be asked for.
      held_bytes: most that what is held may take; prompts beyond are read again for
        every method.

    Raises:
      UserError: a budget rule that measures all layers before it says their sizes, or
        a model whose layers rotate in two ways.
    """

    def __init__(
        self,
        model: Model,
        methods: Iterable[CacheSpec],
        held_bytes: float = math.inf,
    ):
        methods = list(methods)
        if model.spec.local_rope_theta is not None:
            raise UserError(
                f"layers of {model.spec.name} rotate in two ways, and layer by layer "
                "all share one: run whole models"
            )
        for config in methods:
            if config.measures:
                raise UserError(
                    f"budget rule {config.budget_rule.name!r} measures all layers "
                    "before it says their sizes, and layer by layer there is one at a "
                    "time: use another rule, or run whole models"
                )
        self.model = model._replace(params=_placed(model.params))
        late = (config for config in methods if sharing.watches_late(config))
        self._watching = tuple(dict.fromkeys(config.policy for config in late))
        self._known: dict[tuple, Prefilled] = {}
        self._left = held_bytes

    def runner(self, job: Job) -> "LayerByLayer":
        """A runner whose prompts are read here."""
        return LayerByLayer(self, job)

    def after(self, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
        """The prompts read and compressed, with room for `new` tokens.

        Args:
          config: the method.
          prompts: token ids, one list per row.
          new: tokens that may follow.
        """
        if not sharing.watches_late(config) and not sharing.stored_later(config):
            alone = read(self.model, config.reading, prompts, new)
            return _shrunk(self.model, config, alone, prompts, new)
        shared = self._read_once(config, prompts, new)
        if config.policy:
            index = self._watching.index(config.policy)
            states = tuple(_only(part, index) for part in shared.state)
            shared = Prefilled(states, shared.logits)
        return _shrunk(self.model, config, shared, prompts, new)

    def _read_once(self, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
        """As all methods that look at prompts later need it."""
        alike = sharing.reading(config)
        key = (alike, new, *map(tuple, prompts))
        if key in self._known:
            return self._known[key]
        everyone = watching.together(self._watching) if config.policy else None
        all_of_them = dataclasses.replace(alike, policy=everyone)
        found = read(self.model, all_of_them, prompts, new)
        size = tree_bytes(found)
        if size <= self._left:
            self._left -= size
            self._known[key] = found
        return found


class Part(flax.struct.PyTreeNode):
    """Heads of a layer that keep alike, as a model of one layer that has no others.

    Attributes:
      state: of these heads.
      layer: its number in the model.
      heads: their numbers in the layer; None for all.
    """

    state: cache.KVState
    layer: int = flax.struct.field(pytree_node=False)
    heads: parts.Heads = flax.struct.field(pytree_node=False)

    @property
    def numbers(self) -> Int[np.ndarray, "K"] | None:
        """The heads as an array, so that programs do not depend on which they are."""
        return self.heads and np.asarray(self.heads, np.int32)


class LayerByLayer:
    """The runner; its states are a tuple of every layer's `Part`s."""

    compile_seconds = 0.0

    def __init__(self, readings: Readings, job: Job):
        self.job = job
        self._readings, self._model = readings, readings.model
        self._writing = sharing.without_watching(job.config)

    def prefill(self, prompts: Prompts) -> Prefilled:
        found = self._readings.after(self.job.config, prompts, self.job.max_new_tokens)
        if self._writing is self.job.config:
            return found
        forgotten = (
            part.replace(state=part.state.replace(stats=(Stats(),)))
            for part in found.state
        )
        return Prefilled(tuple(forgotten), found.logits)

    def begin(
        self, read: Prefilled, prompt_ids: Sequence[int], seed: int
    ) -> steps.DecodeState:
        every = runner.row_keys(self.job, prompt_ids, seed)
        keys, active = (x[: len(prompt_ids)] for x in every)  # no rows are left over
        token = self._drawn(read, keys)
        done = ~active | np.isin(token, self.job.eos)
        return steps.DecodeState(
            read.state, token, done, active.astype(jnp.int32), keys
        )

    def insert(self, pool, part: steps.DecodeState, row: int) -> steps.DecodeState:
        return part

    def decode(
        self, state: steps.DecodeState, limit: int
    ) -> tuple[steps.DecodeState, np.ndarray]:
        read, token, done = Prefilled(state.cache, None), state.token, state.done
        step, drawn = state.step, []
        for _ in range(limit):
            if done.all():
                break
            n = 1 - np.asarray(done, np.int32)
            read = _step(self._model, self._writing, read, token[:, None], n)
            token = self._drawn(read, state.keys)
            drawn.append(np.where(done, -1, token))
            done, step = done | np.isin(token, self.job.eos), step + n
        tokens = np.stack(drawn, axis=1) if drawn else np.zeros((len(token), 0), int)
        return steps.DecodeState(read.state, token, done, step, state.keys), tokens

    def score(
        self, read: Prefilled, tokens: np.ndarray, lengths: np.ndarray
    ) -> steps.Scores:
        """All logits are kept: texts are few here."""
        logits = [np.asarray(read.logits)]
        for i in range(tokens.shape[1] - 1):
            n = (lengths > i + 1).astype(np.int32)
            given = tokens[:, i : i + 1]
            read = _step(self._model, self._writing, read, given, n)
            logits.append(np.asarray(read.logits))
        _raise_errors(read.state)
        every = np.stack(logits)
        chosen = np.take_along_axis(every, tokens.T[..., None], axis=-1)[..., 0]
        top = every.max(axis=-1, keepdims=True)
        total = np.log(np.exp(every - top).sum(axis=-1)) + top[..., 0]
        beyond = np.arange(tokens.shape[1])[None] >= lengths[:, None]
        greedy = (tokens == every.argmax(axis=-1).T) | beyond
        return steps.Scores(np.where(beyond, 0.0, (chosen - total).T), greedy, every)

    def finished(self, state: steps.DecodeState) -> cache.KVState:
        _raise_errors(state.cache)
        return joined(state.cache)

    def _drawn(self, read: Prefilled, keys: Array) -> np.ndarray:
        position = read.state[0].state.next_pos
        return np.asarray(_sample(read.logits, keys, position, self.job.sampling))


def read(model: Model, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
    """The prompts layer after layer, block by block, with evictions if there are any.

    A layer reads all blocks before the next one begins, so that what it holds stays in
    a processor's cache.
    """
    spec, heads = model.spec, config.heads(model.spec)
    room, ends = _room(config, prompts), _ends(model)
    learned = _learned(config, spec.num_layers)
    blocks = _blocks(config, prompts)
    x = [_embed(ends, b.tokens, b.start, spec=spec) for b in blocks]
    states = []
    for index, layer in enumerate(heads):
        held = [
            _placed(_empty(model, config, index, some, len(prompts), room, new))
            for some in layer
        ]
        for i, (tokens, n, _) in enumerate(blocks):
            given = x[i], held, tokens, n, learned[index]
            x[i], held = _layer(model, config, *given, is_prefill=True)
        states.extend(held)
    last = jnp.zeros_like(x[0][:, 0])
    for hidden, (_, n, _) in zip(x, blocks, strict=True):
        last = _last(hidden, n, last)
    return Prefilled(tuple(states), _logits(ends, last, spec=spec))


class _Block(NamedTuple):
    """Tokens [B, T] of some prompts, each row's first n of them real, from `start`."""

    tokens: Int[Array, "B T"]
    n: Int[Array, "B"]
    start: Int[Array, "B"]


def _blocks(config: CacheSpec, prompts: Prompts) -> list[_Block]:
    """The prompts as the schedule cuts them."""
    first, block = config.first_chunk, config.schedule.prefill_chunk
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), _room(config, prompts) + block), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    found = []
    for start in (0, *range(first, lengths.max(), block)):
        most = block if start else first
        part = tokens[:, start : start + max(most, block)]
        n = np.clip(lengths - start, 0, most)
        begun = np.minimum(lengths, start)
        found.append(_Block(*map(jnp.asarray, (part, n, begun))))
    return found


def _placed(tree: PyTree) -> PyTree:
    """The same arrays, for good where they are.

    What a program makes of placed arrays is placed, and for those that are not it is
    compiled again.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


def _room(config: CacheSpec, prompts: Prompts) -> int:
    """Tokens of the longest prompt, in whole blocks."""
    block = config.schedule.prefill_chunk
    return -(-max(map(len, prompts)) // block) * block


def joined(held: Sequence[Part]) -> cache.KVState:
    """The states of all layers as one."""
    layers = [list(layer) for _, layer in groupby(held, lambda part: part.layer)]
    errors = [
        parts.joined([part.state.error for part in layer], [p.heads for p in layer])
        for layer in layers
    ]
    return held[0].state.replace(
        layers=tuple(part.state.layers[0] for part in held),
        stats=tuple(part.state.stats[0] for part in held),
        error=functools.reduce(jnp.bitwise_or, errors),
        heads=tuple(tuple(part.heads for part in layer) for layer in layers),
    )


def _empty(model: Model, config: CacheSpec, index, heads, batch, room, new) -> Part:
    """A part with nothing in it, and slots for what it keeps of a prompt."""
    one, alone = _one_part(model.spec, heads), config.of_part(index, heads)
    capacity = alone.prefill_capacity(one, room, new)
    dtype = model.params["embed"].dtype
    return Part(cache.init(one, alone, batch, capacity, dtype), index, heads)


def _one_part(spec: ModelSpec, heads: parts.Heads) -> ModelSpec:
    return dataclasses.replace(parts.spec_of(spec, heads), num_layers=1)


def _step(model, config, read: Prefilled, tokens, n) -> Prefilled:
    """T tokens through all layers, of which each row's first n are real."""
    spec, start = model.spec, read.state[0].state.next_pos
    tokens, n = jnp.asarray(tokens, jnp.int32), jnp.asarray(n, jnp.int32)
    learned, ends = _learned(config, spec.num_layers), _ends(model)
    x, states = _embed(ends, tokens, start, spec=spec), []
    for index, layer in groupby(read.state, lambda part: part.layer):
        given = x, list(layer), tokens, n, learned[index]
        x, held = _layer(model, config, *given, is_prefill=False)
        states.extend(held)
    return Prefilled(tuple(states), _logits(ends, _last(x, n), spec=spec))


def _layer(
    model: Model, config, x: Array, held: list[Part], tokens, n, rule, is_prefill
) -> tuple[Array, list[Part]]:
    """Tokens through the layer whose parts are given, and what these hold then."""
    spec, index = model.spec, held[0].layer
    weights, like = model.params["layers"][index], _like(spec, index)
    given, mixed, after = _before(weights, x, spec=spec, like=like), [], []
    for part in held:
        out, state = _attend(
            *(weights["out"], given, part.state, n, tokens),
            *(rule, jnp.int32(index), part.numbers),
            spec=spec,
            config=config.of_part(index, part.heads),
            is_prefill=is_prefill,
            like=like,
        )
        mixed.append(out)
        after.append(part.replace(state=state))
    order = _order([part.heads for part in held])
    return _after(weights, x, tuple(mixed), order, spec=spec, like=like), after


def _ends(model: Model) -> PyTree:
    """The weights that belong to no layer."""
    return {key: model.params[key] for key in model.params if key != "layers"}


def _like(spec: ModelSpec, index: int) -> int:
    """The first layer that is shaped as this one, whose programs it shares."""
    windows = [spec.sliding_window(i) for i in range(index + 1)]
    return windows.index(windows[-1])


def _order(heads: Sequence[parts.Heads]) -> Int[np.ndarray, "K"] | None:
    """Where the layer's heads stand among those of its parts."""
    return None if heads[0] is None else np.argsort(np.concatenate(heads))


def _learned(config: CacheSpec, count: int) -> Sequence[PyTree]:
    """Every layer's weights of a learned rule; None for a rule without."""
    params = config.policy.params if config.policy else None
    return params.layers if params is not None else (None,) * count


@functools.partial(jax.jit, static_argnames=("spec", "like"))
def _before(weights: PyTree, x: Float[Array, "B T M"], *, spec, like: int) -> tuple:
    """Queries, keys, values and what they are made of, as layer `like` makes them."""

    def attend(index, q, k, v, ops, cache):
        del index, cache
        return jnp.zeros_like(q), (q, k, v, ops.hidden)

    return decoder.layer(weights, spec, like, x, _unturned, None, attend)[1]


@functools.partial(jax.jit, static_argnames=("spec", "like"))
def _after(
    weights: PyTree,
    x: Float[Array, "B T M"],
    mixed: tuple[Float[Array, "B H G T D"], ...],
    order: Int[Array, "K"] | None,
    *,
    spec: ModelSpec,
    like: int,
) -> Float[Array, "B T M"]:
    """The rest of the layer, from what attention of all its parts mixed."""
    whole = mixed[0] if order is None else jnp.concatenate(mixed, axis=1)[:, order]
    attend = lambda *_: (whole, None)
    return decoder.layer(weights, spec, like, x, _unturned, None, attend)[0]


def _unturned(x, positions=None):
    """Where nothing is turned: keys are handed over before they are."""
    raise AssertionError("a layer turns no keys itself")


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "is_prefill", "like"),
    donate_argnames=("state",),
)
def _attend(
    out: Float[Array, "M KGD"],
    given: tuple[Array, ...],
    state: cache.KVState,
    n: Array,
    tokens: Array,
    rule: PyTree,
    number: Array,
    heads: Array | None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    is_prefill: bool,
    like: int,
) -> tuple[Float[Array, "B H G T D"], cache.KVState]:
    """What heads of a layer mix, and what they keep then."""
    *qkv, hidden = given
    qkv = [parts.taken(x, heads) for x in qkv]
    positions = cache.next_positions(state, tokens.shape[1])
    apply_rope = decoder.rotations(spec, positions)[like]
    ops = decoder.layer_ops(out, spec, like, apply_rope, hidden)
    mixed, state = cache.step_layer(
        *(0, *qkv, parts.ops_of(ops, heads), state),
        config=config,
        n=n,
        tokens=tokens,
        is_prefill=is_prefill,
        policy_params=rule,
        layer_number=number,
        head_numbers=heads,
    )
    return mixed, cache.advance(state, n)


@functools.partial(jax.jit, static_argnames=("spec",))
def _embed(ends: PyTree, tokens: Array, start: Array, *, spec) -> Array:
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return decoder.embedded(ends, spec, tokens, positions)


@jax.jit
def _last(
    x: Float[Array, "B T M"], n: Array, before: Array | None = None
) -> Float[Array, "B M"]:
    """Each row's last real token, of x or else from before."""
    last = jnp.maximum(n - 1, 0)[:, None, None]
    found = jnp.take_along_axis(x, last, axis=1)[:, 0]
    return found if before is None else jnp.where((n > 0)[:, None], found, before)


@functools.partial(jax.jit, static_argnames=("spec",))
def _logits(ends: PyTree, last: Float[Array, "B M"], *, spec) -> Float[Array, "B V"]:
    return decoder.logits(ends, decoder.ended(ends, spec, last), spec)


@functools.partial(jax.jit, static_argnames=("sampling",))
def _sample(logits: Array, keys: Array, position: Array, sampling) -> Array:
    return sample(logits, sampling, keys, position)


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity", "like"))
def _compact(state, rule, number, heads, *, spec, config, capacity, like):
    ropes, params = [decoder.rotations(spec)[like]], None if rule is None else (rule,)
    given = state, config, capacity, ropes, params, number, heads
    return cache.compact(*given, scorings=[spec.scoring(like)])


def _shrunk(
    model: Model, config, found: Prefilled, prompts: Prompts, new: int
) -> Prefilled:
    """The compaction between prompt and decoding, where the schedule has one."""
    if not config.compacts:
        return found
    spec, states = model.spec, []
    learned, room = _learned(config, spec.num_layers), _room(config, prompts)
    for part in found.state:
        alone, one = config.of_part(part.layer, part.heads), _one_part(spec, part.heads)
        state = _compact(
            *(part.state, learned[part.layer], jnp.int32(part.layer), part.numbers),
            spec=spec,
            config=alone,
            capacity=alone.decode_capacity(one, room, new),
            like=_like(spec, part.layer),
        )
        states.append(part.replace(state=state))
    return found._replace(state=tuple(states))


def _only(part: Part, index: int) -> Part:
    """With the statistics of one of those that watched together."""
    (stats,) = part.state.stats
    return part.replace(state=part.state.replace(stats=(watching.only(stats, index),)))


def _raise_errors(held: Sequence[Part]) -> None:
    for part in held:
        cache.raise_errors(part.state)
