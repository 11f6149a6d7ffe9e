"""Runs a model layer by layer, for sweeps over many methods.

A whole model takes half a minute to compile for every method, and minutes where its
heads have different budgets. Here the parts of a layer before and after attention are
compiled once for all layers and methods, and attention with its cache once for every
head group's budget: a second or two each. The price is a few dispatches per layer
instead of one per batch, so this is not for throughput. Tokens and kept pairs are
those of `kvjax.engine.steps`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import head_groups
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec
from kvjax.engine import runner, scoring, steps
from kvjax.engine.jobs import Job
from kvjax.engine.requests import Request
from kvjax.engine.runner import Prefilled, Prompts
from kvjax.engine.sampling import Tokens
from kvjax.engine.steps import DecodeState
from kvjax.models import decoder
from kvjax.types import Model, ModelSpec, PyTree, Stats, UserError

# Fields of a method that keeps everything.
FULL_CACHE = dict.fromkeys(("policy", "budget", "budget_rule", "mean_budget"))


def check(config: CacheSpec) -> None:
    """Raises UserError for a budget rule that measures all layers before it sizes any.

    Layer by layer, the first layer's size has to be known before the last one runs.
    """
    if config.measures:
        raise UserError(
            f"budget rule {config.budget_rule.name!r} measures all layers before it "
            "says their sizes, and layer by layer there is one at a time: use another "
            "rule, or run whole models"
        )


class LayerByLayer:
    """The runner that compiles single layers; see `kvjax.engine.runner.Runner`.

    Args:
      model: its weights stay on their devices.
      job: no rows are left over, so its batch counts for nothing.
      prefill: `(config, prompts, new) -> Prefilled`, such as a
        `kvjax.engine.prefill_cache.PrefillCache`'s; None reads the prompts each time.

    Raises:
      UserError: see `check`.
    """

    compile_seconds = 0.0

    def __init__(self, model: Model, job: Job, prefill: Callable | None = None):
        check(job.config)
        self.job = job
        self._model = model._replace(params=committed(model.params))
        self._prefill = prefill or functools.partial(_prefilled, self._model)
        self._config = _decoding(job.config)

    def prefill(self, prompts: Prompts) -> Prefilled:
        found = self._prefill(self.job.config, prompts, self.job.max_new_tokens)
        if self._config is self.job.config:
            return found
        without = (Stats(),) * len(found.state.stats)
        return found._replace(state=found.state.replace(stats=without))

    def begin(
        self, read: Prefilled, requests: Sequence[Request]
    ) -> tuple[DecodeState, Tokens]:
        job = dataclasses.replace(
            self.job, batch=len(requests), prefill_batch=None, mesh=None
        )
        asked, keys = runner.row_requests(job, requests)
        none, seen = jnp.zeros_like(asked.left), runner.seen_tokens(job, requests)
        begun = DecodeState(None, none, none > 0, keys, asked, seen)
        return self._next(begun, read)

    def insert(
        self, pool, read: Prefilled, requests: Sequence[Request], rows: np.ndarray
    ) -> tuple[DecodeState, Tokens]:
        raise UserError("prefill is staggered only with whole models")

    def decode(
        self, state: DecodeState, limit: int, until: int | None = None
    ) -> tuple[DecodeState, Tokens]:
        start, drawn = np.asarray(state.done), []
        until = len(start) if until is None else until
        for _ in range(limit):
            done = np.asarray(state.done)
            if done.all() or np.sum(done & ~start) >= until:
                break
            read = self._step(state.cache, state.token, ~done)
            state, tokens = self._next(state, read)
            drawn.append(jax.device_get(tokens))
        if not drawn:
            return state, Tokens(np.zeros((len(start), 0), np.int32))
        return state, jax.tree.map(lambda *steps: np.stack(steps, axis=1), *drawn)

    def score(
        self, read: Prefilled, tokens: np.ndarray, lengths: np.ndarray
    ) -> scoring.Scores:
        every = [read.logits]
        for i in range(tokens.shape[1] - 1):
            read = self._step(read.state, tokens[:, i], lengths > i + 1)
            every.append(read.logits)
        cache.raise_errors(read.state)
        logits = np.stack([np.asarray(each) for each in every])
        logprob, greedy = _logprobs(logits, jnp.asarray(tokens.T, jnp.int32))
        found = scoring.masked_scores(logprob.T, greedy.T, None, jnp.asarray(lengths))
        return jax.device_get(found)._replace(logits=logits)

    def finished(self, state: DecodeState) -> cache.KVState:
        cache.raise_errors(state.cache)
        return state.cache

    def _step(self, state: cache.KVState, token: Array, active: Array) -> Prefilled:
        """Reads one token of every active row."""
        tokens, n = jnp.asarray(token, jnp.int32)[:, None], jnp.asarray(active, "int32")
        chunk = _Chunk(tokens, n, state.next_pos)
        return _forward(self._model, self._config, state, [chunk])

    def _next(self, state: DecodeState, read: Prefilled) -> tuple[DecodeState, Tokens]:
        state, drawn = _next_token(
            state.replace(cache=None),
            read.logits,
            read.state.next_pos,
            sampling=self.job.sampling,
            eos=self.job.eos,
        )
        return state.replace(cache=read.state), drawn


def _decoding(config: CacheSpec) -> CacheSpec:
    """Returns the configuration to decode with.

    A method that evicts nothing more needs no policy: all such methods then run the
    same programs.
    """
    if config.schedule.evicts_in_decode or config.policy is None:
        return config
    schedule = Schedule("none", config.schedule.prefill_chunk)
    return dataclasses.replace(config, schedule=schedule, **FULL_CACHE)


def committed(tree: PyTree) -> PyTree:
    """Returns the arrays committed to their devices.

    The results of a program are committed if its arguments are, and a program is
    compiled again for arguments that are not.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


class _Chunk(NamedTuple):
    """T tokens of every row: the first n are real, and they begin at `start`."""

    tokens: Int[Array, "B T"]
    n: Int[Array, "B"]
    start: Int[Array, "B"]


def prefill(model: Model, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
    """Reads the prompts with slots for `new` more tokens; evicts as the schedule says.

    A layer reads all chunks before the next layer begins, so that its weights and pairs
    stay in a processor's cache.
    """
    spec, dtype = model.spec, model.params["embed"].dtype
    capacity = config.prefill_capacity(spec, _padded_length(config, prompts), new)
    state = committed(cache.init(spec, config, len(prompts), capacity, dtype))
    return _forward(model, config, state, _chunks(config, prompts), is_prefill=True)


def compact(
    model: Model, config: CacheSpec, found: Prefilled, prompts: Prompts, new: int
) -> Prefilled:
    """Evicts between prefill and decode, if the schedule does; see `steps.compact`."""
    if not config.compacts:
        return found
    spec, state, learned = model.spec, found.state, _learned(config, model.spec)
    capacity = config.decode_capacity(spec, _padded_length(config, prompts), new)
    layers, stats, error = list(state.layers), list(state.stats), state.error
    for index in range(spec.num_layers):
        for place, heads in state.head_groups(index):
            layers[place], stats[place], error = _compact(
                (layers[place], stats[place], error, state.next_pos),
                learned[index],
                jnp.int32(index),
                _numbers(heads),
                spec=spec,
                config=config.of_group(index, heads),
                capacity=(capacity[place],),
                like=_like(spec, index),
            )
    state = state.replace(layers=tuple(layers), stats=tuple(stats), error=error)
    return found._replace(state=state)


def _prefilled(
    model: Model, config: CacheSpec, prompts: Prompts, new: int
) -> Prefilled:
    found = prefill(model, config.reading, prompts, new)
    return compact(model, config, found, prompts, new)


def _padded_length(config: CacheSpec, prompts: Prompts) -> int:
    """Returns the tokens of the longest prompt, in whole chunks."""
    chunk = config.schedule.prefill_chunk
    return -(-max(map(len, prompts)) // chunk) * chunk


def _chunks(config: CacheSpec, prompts: Prompts) -> list[_Chunk]:
    """Cuts the prompts into the chunks that the schedule reads."""
    first, chunk = config.first_chunk, config.schedule.prefill_chunk
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), _padded_length(config, prompts) + chunk), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    found = []
    for start in (0, *range(first, lengths.max(), chunk)):
        width = chunk if start else first
        tokens = padded[:, start : start + max(width, chunk)]
        n = np.clip(lengths - start, 0, width)
        before = np.minimum(lengths, start)
        found.append(_Chunk(*map(jnp.asarray, (tokens, n, before))))
    return found


def _forward(
    model: Model,
    config: CacheSpec,
    state: cache.KVState,
    chunks: Sequence[_Chunk],
    is_prefill: bool = False,
) -> Prefilled:
    """Runs all chunks through the first layer, then the second, and so on."""
    spec, params, learned = model.spec, model.params, _learned(config, model.spec)
    ends = {key: params[key] for key in params if key != "layers"}
    xs = [_embed(ends, chunk.tokens, chunk.start, spec=spec) for chunk in chunks]
    layers, stats, error = list(state.layers), list(state.stats), state.error
    for index, weights in enumerate(params["layers"]):
        like, groups = _like(spec, index), state.head_groups(index)
        order = _order([heads for _, heads in groups])
        for i, chunk in enumerate(chunks):
            qkv, mixed = _before(weights, xs[i], spec=spec, like=like), []
            for place, heads in groups:
                out, layers[place], stats[place], error = _attend(
                    weights["out"],
                    qkv,
                    layers[place],
                    stats[place],
                    error,
                    chunk,
                    learned[index],
                    jnp.int32(index),
                    _numbers(heads),
                    spec=spec,
                    config=config.of_group(index, heads),
                    is_prefill=is_prefill,
                    like=like,
                )
                mixed.append(out)
            xs[i] = _after(weights, xs[i], tuple(mixed), order, spec=spec, like=like)
    last, next_pos = jnp.zeros_like(xs[0][:, 0]), state.next_pos
    for x, chunk in zip(xs, chunks, strict=True):
        last, next_pos = _last(x, chunk.n, last, next_pos)
    state = state.replace(
        layers=tuple(layers), stats=tuple(stats), error=error, next_pos=next_pos
    )
    return Prefilled(state, _logits(ends, last, spec=spec))


def _like(spec: ModelSpec, index: int) -> int:
    """Returns the first layer with this one's window, whose programs it shares."""
    windows = [spec.sliding_window(i) for i in range(index + 1)]
    return windows.index(windows[-1])


def _numbers(heads: head_groups.Heads) -> Int[np.ndarray, "K"] | None:
    """Returns heads as an array, so that programs do not depend on which they are."""
    return heads and np.asarray(heads, np.int32)


def _order(heads: Sequence[head_groups.Heads]) -> Int[np.ndarray, "K"] | None:
    """Returns where each head of the layer stands in its concatenated head groups."""
    return None if heads[0] is None else np.argsort(np.concatenate(heads))


def _learned(config: CacheSpec, spec: ModelSpec) -> Sequence[PyTree]:
    """Returns every layer's weights of a learned policy; None for other policies."""
    params = config.policy.params if config.policy else None
    return params.layers if params is not None else (None,) * spec.num_layers


def _one_group(layer, stats, error, next_pos, heads, config) -> cache.KVState:
    """Returns a head group's state as that of a model of one layer with no others."""
    return cache.KVState(
        layers=(layer,),
        stats=(stats,),
        next_pos=next_pos,
        error=head_groups.take(error, heads),
        layout=config.layout,
        heads=((None,),),
    )


@functools.partial(jax.jit, static_argnames=("spec", "like"))
def _before(weights: PyTree, x: Float[Array, "B T M"], *, spec, like: int) -> tuple:
    """Returns queries, keys, values and the hidden states they are made of."""

    def attend(index, q, k, v, ops, cache):
        del index, cache
        return jnp.zeros_like(q), (q, k, v, ops.hidden)

    return decoder.layer(weights, spec, like, x, _no_rotation, None, attend)[1]


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
    """Finishes the layer, from the attention outputs of all its head groups."""
    whole = mixed[0] if order is None else jnp.concatenate(mixed, axis=1)[:, order]
    attend = lambda *_: (whole, None)
    return decoder.layer(weights, spec, like, x, _no_rotation, None, attend)[0]


def _no_rotation(x, positions=None):
    raise AssertionError("keys are rotated in `_attend`, by the cache")


@functools.partial(
    jax.jit,
    static_argnames=("spec", "config", "is_prefill", "like"),
    donate_argnames=("layer", "stats"),  # not `error`, which other groups read too
)
def _attend(
    out: Float[Array, "M KGD"],
    qkv: tuple[Array, ...],
    layer: PyTree,
    stats: Stats,
    error: Array,
    chunk: _Chunk,
    learned: PyTree,
    number: Array,
    heads: Array | None,
    *,
    spec: ModelSpec,
    config: CacheSpec,
    is_prefill: bool,
    like: int,
) -> tuple[Float[Array, "B H G T D"], PyTree, Stats, Array]:
    """Runs attention and cache of one head group."""
    q, k, v, hidden = qkv
    q, k, v = (head_groups.take(x, heads) for x in (q, k, v))
    state = _one_group(layer, stats, error, chunk.start, heads, config)
    positions = cache.next_positions(state, chunk.tokens.shape[1])
    apply_rope = decoder.rotations(spec, positions)[like]
    ops = decoder.layer_ops(out, spec, like, apply_rope, hidden)
    mixed, state = cache.step_layer(
        0,
        q,
        k,
        v,
        head_groups.ops_of(ops, heads),
        state,
        config=config,
        n=chunk.n,
        tokens=chunk.tokens,
        is_prefill=is_prefill,
        policy_params=learned,
        layer_number=number,
        head_numbers=heads,
    )
    error = state.error if heads is None else error.at[:, heads].set(state.error)
    return mixed, state.layers[0], state.stats[0], error


@functools.partial(jax.jit, static_argnames=("spec", "config", "capacity", "like"))
def _compact(group, learned, number, heads, *, spec, config, capacity, like):
    """Compacts one head group: `group` is its layer, statistics, errors, positions."""
    found = cache.compact(
        _one_group(*group, heads, config),
        config,
        capacity,
        [decoder.rotations(spec)[like]],
        None if learned is None else (learned,),
        first_layer=number,
        head_numbers=heads,
        scorings=[spec.scoring(like)],
    )
    error = found.error if heads is None else group[2].at[:, heads].set(found.error)
    return found.layers[0], found.stats[0], error


@functools.partial(jax.jit, static_argnames=("spec",))
def _embed(ends: PyTree, tokens: Array, start: Array, *, spec) -> Array:
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return decoder.embedded(ends, spec, tokens, positions)


@jax.jit
def _last(x, n, before, next_pos) -> tuple[Array, Array]:
    return steps.last_hidden(x, n, before), next_pos + n


@functools.partial(jax.jit, static_argnames=("spec",))
def _logits(ends: PyTree, last: Float[Array, "B M"], *, spec) -> Float[Array, "B V"]:
    return decoder.logits(ends, decoder.ended(ends, spec, last), spec)


_next_token = jax.jit(steps.next_token, static_argnames=("sampling", "eos"))
_logprobs = jax.jit(scoring.logprobs)
