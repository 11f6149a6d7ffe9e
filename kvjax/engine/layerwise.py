"""Many methods, few prompts: one layer's program for all layers, one reading for all.

A whole model takes half a minute to compile for every method, one layer a second or
two; layers that differ in what they keep have a program each. Running layer by layer
costs a dispatch per layer instead of one per batch, so this is for sweeps over methods,
not for throughput; whole models give the same tokens and keep the same pairs. Rules
that only work once the prompt is in watch it together: it is read once for all of them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax import cache
from kvjax.cache.config import CacheConfig
from kvjax.cache.schedule import Schedule
from kvjax.engine import runner, steps
from kvjax.engine.compiled import Job
from kvjax.engine.runner import Prefilled, Prompts
from kvjax.engine.sampling import sample
from kvjax.models import decoder
from kvjax.policies import Policy
from kvjax.types import Model, ModelSpec, PyTree, Stats, UserError

_NO_BUDGET = dict.fromkeys(("policy", "budget", "budget_rule", "mean_budget"))


class Readings:
    """Prompts read under any method; those of `after_prefill` methods only once.

    Holds the full caches of what it has read once, and the statistics of every rule.

    Raises:
      UserError: a method whose budgets differ between layers, or may: all run one
        program.
    """

    def __init__(self, model: Model, methods: Iterable[CacheConfig]):
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
        self.model = model
        late = (config for config in methods if _is_late(config))
        self._watching = tuple(dict.fromkeys(config.policy for config in late))
        self._known: dict[tuple, Prefilled] = {}

    def runner(self, job: Job) -> "LayerByLayer":
        """A runner whose prompts are read here."""
        return LayerByLayer(self, job)

    def after(self, config: CacheConfig, prompts: Prompts, new: int) -> Prefilled:
        """The prompts read and compressed, with room for `new` tokens.

        Args:
          config: the method.
          prompts: token ids, one list per row.
          new: tokens that may follow.
        """
        if not _is_late(config) and not _is_stored_later(config):
            alone = read(self.model, config.reading, prompts, new)
            return _shrunk(self.model, config, alone, prompts, new)
        alike = dataclasses.replace(config.reading, **_NO_BUDGET)
        key = (alike, new, *map(tuple, prompts))
        if key not in self._known:
            watching = _together(self._watching) if config.policy else None
            all_of_them = dataclasses.replace(alike, policy=watching)
            self._known[key] = read(self.model, all_of_them, prompts, new)
        shared = self._known[key]
        if config.policy:
            index = self._watching.index(config.policy)
            states = tuple(_part(state, index) for state in shared.state)
            shared = Prefilled(states, shared.logits)
        return _shrunk(self.model, config, shared, prompts, new)


class LayerByLayer:
    """The runner; its states hold a `KVState` of one layer for every layer."""

    def __init__(self, readings: Readings, job: Job):
        self.job = job
        self._readings, self._model = readings, readings.model
        self._writing = _without_watching(job.config)

    def prefill(self, prompts: Prompts) -> Prefilled:
        found = self._readings.after(self.job.config, prompts, self.job.max_new_tokens)
        if self._writing is self.job.config:
            return found
        return Prefilled(
            tuple(
                state.replace(stats=(Stats(),) * len(state.stats))
                for state in found.state
            ),
            found.logits,
        )

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
            read = _step(self._model, self._writing, read, token[:, None], n, False)
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
            read = _step(self._model, self._writing, read, given, n, False)
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
        position = read.state[0].next_pos
        return np.asarray(_sample(read.logits, keys, position, self.job.sampling))


def read(model: Model, config: CacheConfig, prompts: Prompts, new: int) -> Prefilled:
    """The prompts block by block, with evictions if the schedule has them."""
    spec, block = model.spec, config.schedule.prefill_chunk
    lengths = np.asarray([len(prompt) for prompt in prompts])
    room = _room(config, prompts)
    tokens = np.zeros((len(prompts), room + block), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    dtype, one = model.params["embed"].dtype, _one_layer(spec)
    states = tuple(
        cache.init(*(one, layer, len(prompts)), capacity, dtype)
        for layer in _layers(config, spec)
        for capacity in [layer.prefill_capacity(one, room, new)]
    )
    logits = jnp.zeros((len(prompts), spec.vocab_size), jnp.float32)
    found = Prefilled(states, logits)
    for start in (0, *range(config.first_chunk, lengths.max(), block)):
        most = block if start else config.first_chunk
        n = np.clip(lengths - start, 0, most)
        part = tokens[:, start : start + max(most, block)]
        found = _step(model, config, found, part, n, is_prefill=True)
    return found


def _room(config: CacheConfig, prompts: Prompts) -> int:
    """Tokens of the longest prompt, in whole blocks."""
    block = config.schedule.prefill_chunk
    return -(-max(map(len, prompts)) // block) * block


def joined(states: Sequence[cache.KVState]) -> cache.KVState:
    """The states of all layers as one."""
    return states[0].replace(
        layers=tuple(layer for state in states for layer in state.layers),
        stats=tuple(stats for state in states for stats in state.stats),
        heads=tuple(state.heads[0] for state in states),
    )


def _step(model, config, read: Prefilled, tokens, n, is_prefill: bool) -> Prefilled:
    """T tokens through all layers, of which each row's first n are real."""
    tokens, n = jnp.asarray(tokens, jnp.int32), jnp.asarray(n, jnp.int32)
    ends = {key: model.params[key] for key in model.params if key != "layers"}
    x, states = _embed(ends, tokens, read.state[0].next_pos, spec=model.spec), []
    learned = _learned(config, model.spec.num_layers)
    configs = _layers(config, model.spec)
    layers = zip(model.params["layers"], read.state, learned, configs, strict=True)
    for index, (weights, state, rule, alone) in enumerate(layers):
        windows = [model.spec.sliding_window(i) for i in range(index + 1)]
        x, state = _layer(
            *(weights, x, state, n, tokens, rule, jnp.int32(index)),
            spec=model.spec,
            config=alone,
            is_prefill=is_prefill,
            like=windows.index(windows[-1]),
        )
        states.append(state)
    before = read.logits
    if before is None:
        before = jnp.zeros((len(n), model.spec.vocab_size), jnp.float32)
    return Prefilled(tuple(states), _logits(ends, x, n, before, spec=model.spec))


def _layers(config: CacheConfig, spec: ModelSpec) -> list[CacheConfig]:
    """What each layer keeps; those that keep the same share programs."""
    return [config.of_layer(index) for index in range(spec.num_layers)]


def _one_layer(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, num_layers=1)


def _learned(config: CacheConfig, count: int) -> Sequence[PyTree]:
    """Every layer's weights of a learned rule; None for a rule without."""
    params = config.policy.params if config.policy else None
    return params.layers if params is not None else (None,) * count


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "is_prefill", "like"),
    donate_argnames=("state",),
)
def _layer(
    weights: PyTree,
    x: Float[Array, "B T M"],
    state: cache.KVState,
    n: Array,
    tokens: Array,
    rule: PyTree,
    number: Array,
    *,
    spec: ModelSpec,
    config: CacheConfig,
    is_prefill: bool,
    like: int,
) -> tuple[Float[Array, "B T M"], cache.KVState]:
    """A layer that is shaped as number `like`; the state holds nothing but its own."""
    positions = cache.next_positions(state, x.shape[1])

    def attend(index, *given):
        del index
        return cache.step_layer(
            *(0, *given),
            config=config,
            n=n,
            tokens=tokens,
            is_prefill=is_prefill,
            policy_params=rule,
            layer_number=number,
        )

    apply_rope = decoder.rotations(spec, positions)[like]
    x, state = decoder.layer(weights, spec, like, x, apply_rope, state, attend)
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


@functools.partial(jax.jit, static_argnames=("sampling",))
def _sample(logits: Array, keys: Array, position: Array, sampling) -> Array:
    return sample(logits, sampling, keys, position)


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity"))
def _compact(state, rule, number, *, spec, config, capacity) -> cache.KVState:
    ropes, params = decoder.rotations(spec)[:1], None if rule is None else (rule,)
    return cache.compact(state, config, capacity, ropes, params, number)


def _shrunk(
    model: Model, config, found: Prefilled, prompts: Prompts, new: int
) -> Prefilled:
    """The compaction between prompt and decoding, where the schedule has one."""
    if not config.compacts:
        return found
    spec, learned = model.spec, _learned(config, model.spec.num_layers)
    room = _room(config, prompts)
    layers = zip(found.state, learned, _layers(config, spec), strict=True)
    states = [
        _compact(
            *(state, rule, jnp.int32(index)),
            spec=spec,
            config=alone,
            capacity=alone.decode_capacity(_one_layer(spec), room, new),
        )
        for index, (state, rule, alone) in enumerate(layers)
    ]
    return found._replace(state=tuple(states))


def _without_watching(config: CacheConfig) -> CacheConfig:
    """Without the policy, where nothing will be evicted any more.

    All such methods then run the same program.
    """
    if config.schedule.evicts_in_decode or config.policy is None:
        return config
    schedule = Schedule("none", config.schedule.prefill_chunk)
    return dataclasses.replace(config, schedule=schedule, **_NO_BUDGET)


def _is_late(config: CacheConfig) -> bool:
    """Whether others can watch the same reading.

    The prompt is read as if the cache were full and all heads alike, keys stay in
    place, and what the rule does is known by its name: two with other weights look the
    same.
    """
    late = config.schedule.phases == "after_prefill"
    alone = config.policy is None or config.policy.params is not None
    alone = alone or not all(isinstance(sizes, int) for sizes in config.budget)
    return late and not alone and config.rope_positions == "original"


def _is_stored_later(config: CacheConfig) -> bool:
    """Whether it is the full cache while the prompt is read, whatever it is then."""
    return config.policy is None and config.codec.after_prompt


def _together(members: Sequence[Policy]) -> Policy:
    """Watches as all of them do, keeps nothing; `_part` gives each its statistics."""

    return Policy(
        init=lambda *shape: _joined(member.init(*shape) for member in members),
        observe=lambda stats, view, seen: _joined(
            member.observe(Stats(*part), view, seen)
            for member, part in zip(members, zip(*stats, strict=True), strict=True)
        ),
        score=lambda stats, view: jnp.zeros(view.positions.shape),
        required_stats=frozenset().union(*(m.required_stats for m in members)),
        name="together",
    )


def _joined(parts: Iterable[Stats]) -> Stats:
    return Stats(*zip(*parts, strict=True))


def _part(state: cache.KVState, index: int) -> cache.KVState:
    (stats,) = state.stats
    return state.replace(stats=(Stats(stats.per_slot[index], stats.per_row[index]),))


def _raise_errors(states: Sequence[cache.KVState]) -> None:
    for state in states:
        cache.raise_errors(state)
