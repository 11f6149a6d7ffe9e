"""Many methods, few prompts: one layer's program for all layers, one reading for all.

A whole model takes half a minute to compile for every method, one layer a second or
two. Running layer by layer costs a dispatch per layer instead of one per batch, so this
is for sweeps over methods, not for throughput; `kvjax.generate` gives the same tokens
and keeps the same pairs. Rules that only work once the prompt is in watch it together:
it is read once for all of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax import cache
from kvjax.cache.config import CacheConfig
from kvjax.cache.schedule import Schedule
from kvjax.engine.steps import compact
from kvjax.models import decoder
from kvjax.policies import Policy
from kvjax.types import Model, ModelSpec, PyTree, Stats, UserError

Prompts = Sequence[Sequence[int]]
_LOOK = 16  # tokens between two questions whether a row may stop


class Reading(NamedTuple):
    """What is remembered of a batch.

    Attributes:
      states: a `KVState` of one layer for every layer.
      logits: those after each row's last token.
    """

    states: tuple[cache.KVState, ...]
    logits: Float[Array, "B V"]


class Readings:
    """Prompts read under any method; those of `after_prefill` methods only once.

    Holds the full caches of what it has read once, and the statistics of every rule.

    Raises:
      UserError: a method whose budgets differ between layers: all run one program.
    """

    def __init__(self, model: Model, methods: Iterable[CacheConfig]):
        methods = list(methods)
        if model.spec.local_rope_theta is not None:
            raise UserError(
                f"layers of {model.spec.name} rotate in two ways, and layer by layer "
                "all share one: run whole models"
            )
        for budget in (config.budget for config in methods if config.budget):
            if len(set(budget)) > 1:
                raise UserError(
                    f"layer by layer, all layers share one program: give one budget, "
                    f"not {budget}, or run whole models"
                )
        self._model = model
        late = (config for config in methods if _is_late(config))
        self._watching = tuple(dict.fromkeys(config.policy for config in late))
        self._known: dict[tuple, Reading] = {}

    def after(self, config: CacheConfig, prompts: Prompts, new: int) -> Reading:
        """The prompts read and compressed, with room for `new` tokens.

        Args:
          config: the method; the same budget in all layers.
          prompts: token ids, one list per row.
          new: tokens that may follow.
        """
        if not _is_late(config):
            alone = read(self._model, config, prompts, new)
            return _shrunk(self._model, config, alone, new)
        alike = dataclasses.replace(config, policy=None, budget=None)
        key = (alike, *map(tuple, prompts))
        if key not in self._known:
            all_of_them = dataclasses.replace(config, policy=_together(self._watching))
            self._known[key] = read(self._model, all_of_them, prompts, new)
        shared, index = self._known[key], self._watching.index(config.policy)
        states = tuple(_part(state, index) for state in shared.states)
        return _shrunk(self._model, config, Reading(states, shared.logits), new)


def read(model: Model, config: CacheConfig, prompts: Prompts, new: int) -> Reading:
    """The prompts block by block, with select_evictions if the schedule has them."""
    spec, block = model.spec, config.schedule.prefill_chunk
    lengths = np.asarray([len(prompt) for prompt in prompts])
    room = -(-lengths.max() // block) * block
    tokens = np.zeros((len(prompts), room), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    dtype = model.params["embed"].dtype
    reading = Reading(
        tuple(
            cache.init(spec, config, len(prompts), (capacity,), dtype)
            for capacity in config.prefill_capacity(spec, int(room), new)
        ),
        jnp.zeros((len(prompts), spec.vocab_size), jnp.float32),
    )
    for start in range(0, room, block):
        n = np.clip(lengths - start, 0, block)
        part = tokens[:, start : start + block]
        reading = _step(model, config, reading, part, n, prompt=True)
    return reading


def write(
    model: Model,
    config: CacheConfig,
    reading: Reading,
    steps: int,
    eos: tuple,
    stop: Callable[[list[int]], bool] = lambda tokens: False,
) -> tuple[Reading, list[list[int]]]:
    """Greedy tokens after the prompts, at most `steps`, an end token included.

    `stop` is asked now and then whether a row's tokens are all that is wanted of it.
    """
    config, reading = _without_watching(config, reading)
    new = [[] for _ in range(reading.logits.shape[0])]
    active = np.ones(len(new), bool)
    for i in range(steps):
        drawn = np.asarray(jnp.argmax(reading.logits, axis=-1))
        for row in np.flatnonzero(active):
            new[row].append(int(drawn[row]))
        active &= ~np.isin(drawn, eos)
        if i % _LOOK == _LOOK - 1:
            active &= ~np.array([stop(tokens) for tokens in new])
        if not active.any() or i + 1 == steps:
            break
        n = active.astype(np.int32)
        reading = _step(model, config, reading, drawn[:, None], n, prompt=False)
    _raise_errors(reading)
    return reading, new


def score_tokens(
    model: Model, config: CacheConfig, reading: Reading, given: np.ndarray
) -> np.ndarray:
    """Teacher forcing: logits [B, N + 1, V] before and after each of N given tokens."""
    config, reading = _without_watching(config, reading)
    logits, ones = [np.asarray(reading.logits)], np.ones(len(given), np.int32)
    for token in given.T:
        reading = _step(model, config, reading, token[:, None], ones, prompt=False)
        logits.append(np.asarray(reading.logits))
    _raise_errors(reading)
    return np.stack(logits, axis=1)


def joined(reading: Reading) -> cache.KVState:
    """The states of all layers as one."""
    first = reading.states[0]
    return first.replace(
        layers=tuple(state.layers[0] for state in reading.states),
        stats=tuple(state.stats[0] for state in reading.states),
    )


def _step(model, config, reading: Reading, tokens, n, prompt: bool) -> Reading:
    """T tokens through all layers, of which each row's first n are real."""
    tokens, n = jnp.asarray(tokens, jnp.int32), jnp.asarray(n, jnp.int32)
    ends = {key: model.params[key] for key in model.params if key != "layers"}
    start = reading.states[0].next_pos
    x, states = _embed(ends, tokens, start, spec=model.spec), []
    layers = zip(model.params["layers"], reading.states, strict=True)
    for index, (weights, state) in enumerate(layers):
        windows = [model.spec.sliding_window(i) for i in range(index + 1)]
        x, state = _layer(
            *(weights, x, state, n, tokens),
            spec=model.spec,
            config=config,
            prompt=prompt,
            like=windows.index(windows[-1]),
        )
        states.append(state)
    logits = _logits(ends, x, n, reading.logits, spec=model.spec)
    return Reading(tuple(states), logits)


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "prompt", "like"),
    donate_argnames=("state",),
)
def _layer(
    weights: PyTree,
    x: Float[Array, "B T M"],
    state: cache.KVState,
    n: Array,
    tokens: Array,
    *,
    spec: ModelSpec,
    config: CacheConfig,
    prompt: bool,
    like: int,
) -> tuple[Float[Array, "B T M"], cache.KVState]:
    """A layer that is shaped as number `like`; the state holds nothing but its own."""
    positions = cache.next_positions(state, x.shape[1])

    def attend(index, *given):
        del index
        return cache.step_layer(
            0, *given, config=config, n=n, tokens=tokens, prompt=prompt
        )

    rotate = decoder.rotations(spec, positions)[like]
    x, state = decoder.layer(weights, spec, like, x, rotate, state, attend)
    return x, cache.advance(state, n)


@functools.partial(jax.jit, static_argnames=("spec",))
def _embed(ends: PyTree, tokens: Array, start: Array, *, spec) -> Array:
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return decoder.embedded(ends, spec, tokens, positions)


@functools.partial(jax.jit, static_argnames=("spec",))
def _logits(ends: PyTree, x: Array, n: Array, before: Array, *, spec) -> Array:
    """Logits after each row's last real token; rows without one keep theirs."""
    last = jnp.maximum(n - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(x, last, axis=1)[:, 0]
    hidden = decoder.ended(ends, spec, hidden)
    return jnp.where((n > 0)[:, None], decoder.logits(ends, hidden, spec), before)


def _shrunk(model: Model, config, reading: Reading, new: int) -> Reading:
    """The compaction between prompt and decoding, where the schedule has one."""
    if not config.schedule.compacts:
        return reading
    capacity = config.decode_capacity(model.spec, 0, new)[:1]
    shrink = functools.partial(
        compact, spec=model.spec, config=config, capacity=capacity
    )
    return reading._replace(states=tuple(map(shrink, reading.states)))


def _without_watching(config: CacheConfig, reading: Reading):
    """Drops policy and statistics where nothing will be evicted any more.

    All such methods then run the same program.
    """
    if config.schedule.evicts_in_decode:
        return config, reading
    plain = dataclasses.replace(
        config,
        policy=None,
        schedule=Schedule("none", config.schedule.prefill_chunk),
        budget=None,
    )
    bare = tuple(state.replace(stats=(Stats(),)) for state in reading.states)
    return plain, reading._replace(states=bare)


def _is_late(config: CacheConfig) -> bool:
    """Whether the prompt is read as if the cache were full, and keys stay in place."""
    return (
        config.schedule.phases == "after_prefill"
        and config.rope_positions == "original"
    )


def _together(members: Sequence[Policy]) -> Policy:
    """Watches as all of them do, keeps nothing; `_part` gives each its statistics."""
    return Policy(
        init=lambda *shape: _joined(member.init(*shape) for member in members),
        observe=lambda stats, view, seen: _joined(
            member.observe(Stats(*part), view, seen)
            for member, part in zip(members, zip(*stats, strict=True), strict=True)
        ),
        score=lambda stats, view: jnp.zeros(view.positions.shape),
        required_stats=frozenset().union(
            *(member.required_stats for member in members)
        ),
        name="together",
    )


def _joined(parts: Iterable[Stats]) -> Stats:
    return Stats(*zip(*parts, strict=True))


def _part(state: cache.KVState, index: int) -> cache.KVState:
    (stats,) = state.stats
    return state.replace(stats=(Stats(stats.per_slot[index], stats.per_row[index]),))


def _raise_errors(reading: Reading) -> None:
    for state in reading.states:
        cache.raise_errors(state)
