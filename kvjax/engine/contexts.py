"""Contexts: documents that are read and compressed once, for many questions.

::

    document -> read_context -> Context -> rows attend to its `prefix`
                                 |  ^
                            save v  | load_context
                          a safetensors file

A context is compressed without knowing any question. It belongs to one model and one
configuration of the cache, which its file names.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax import cache
from kvjax.cache import head_groups
from kvjax.cache import prefix as prefixes
from kvjax.cache.description import describe
from kvjax.cache.prefix import Prefix, rows_config
from kvjax.cache.spec import CacheSpec
from kvjax.engine import context_files
from kvjax.engine.jobs import bucket, job_of
from kvjax.engine.runner import Whole
from kvjax.models import placement
from kvjax.models.fingerprints import fingerprint
from kvjax.parallel import axes
from kvjax.types import Model, PyTree, UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """A document that has been read and compressed.

    Attributes:
      state: its KV pairs, one row; without the policy's statistics, as nothing is
        evicted any more.
      config: the configuration that it was read and compressed under.
      tokens: the document's token ids.
      model: the model's name.
      fingerprint: of the model's weights, see `kvjax.models.fingerprints`.
    """

    state: cache.KVState
    config: CacheSpec
    tokens: tuple[int, ...]
    model: str
    fingerprint: str

    def __repr__(self) -> str:
        return (
            f"Context({self.length:,} tokens read by {self.model}, "
            f"{self.nbytes / 1e6:,.3g} MB)"
        )

    @property
    def prefix(self) -> Prefix:
        """The KV pairs, for rows to attend to."""
        return Prefix(self.state, self.config)

    @property
    def length(self) -> int:
        """Tokens of the document, kept or not."""
        return len(self.tokens)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return cache.stored_bytes(self.state)[1]

    @functools.cached_property
    def kept_positions(self) -> list[list[np.ndarray]]:
        """Positions of the kept tokens, `[layer][head]`, in ascending order."""
        return cache.kept_positions(self.state)[0]

    def check(self, model: Model, config: CacheSpec) -> None:
        """Checks that requests under a configuration can go on after the document.

        Raises:
          UserError: it was read by other weights, in another dtype, or under another
            configuration.
        """
        _check_model(model, self.model, self.fingerprint, _dtype(self.state))
        _check_config("the context", describe(self.config), describe(config))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the context to a file, which replaces one of that name.

        Raises:
          UserError: the file cannot be written.
        """
        arrays = {name: axes.to_host(leaf) for name, leaf in _leaves(self.state.layers)}
        arrays["tokens"] = np.asarray(self.tokens, np.int32)
        values = {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "dtype": _dtype(self.state),
            "tokens_hash": _hash(self.tokens),
            "configuration": describe(self.config),
            "budget": self.config.budget,
            "capacities": cache.capacities(self.state),
        }
        context_files.write(pathlib.Path(path), arrays, values)


def read_context(model: Model, config: CacheSpec, tokens: Sequence[int]) -> Context:
    """Reads and compresses a document, without any question.

    Args:
      model: reads it.
      config: of the cache, for documents of this length. If its schedule also evicts
        while decoding, rows that go on after the document still keep all of their own
        pairs.
      tokens: the document's ids, at least one.

    Raises:
      UserError: no tokens, or more than the model's context; a configuration that rows
        cannot share, see `kvjax.cache.prefix.check`.
    """
    prefixes.check(config, rows_config(config))
    if not len(tokens):
        raise UserError("the document is empty: it needs at least one token")
    length = bucket(model.spec, config, len(tokens), 0)
    runner = Whole(model.params, job_of(model, config, length, 0))
    state = runner.prefill([list(tokens)]).state
    cache.raise_errors(state)
    config = runner.job.config  # a budget rule may have measured the document
    state = Prefix(state, config).frozen().state
    return Context(
        _first_row(state, config=config, over=placement.of(model.params)),
        config,
        tuple(map(int, tokens)),
        model.spec.name,
        fingerprint(model),
    )


def load_context(
    path: str | os.PathLike,
    model: Model,
    config: CacheSpec | Callable[[int], CacheSpec],
) -> Context:
    """Reads a context from a file of `Context.save`.

    Args:
      path: the file.
      model: the one that read the document.
      config: the configuration that the document was compressed under, or a function
        that returns it for the document's length.

    Raises:
      UserError: the file is not there, is truncated or damaged, or is no context; it is
        of another version, model, dtype or configuration.
    """
    path, over = pathlib.Path(path), placement.of(model.params)
    arrays, found = context_files.read(path)
    _check_model(model, found["model"], found["fingerprint"], found["dtype"])
    tokens = tuple(arrays.pop("tokens").tolist())
    if not isinstance(config, CacheSpec):
        config = config(len(tokens))
    _check_config(path, found["configuration"], describe(config))
    if config.measures:
        config = dataclasses.replace(config, budget=_tuples(found["budget"]))
    if over:
        head_groups.check_split(config.budget, over.shape[axes.HEADS])
    shapes = _shapes(model, config, tuple(found["capacities"]), found["dtype"])
    state = _filled(path, shapes, arrays, len(tokens))
    return Context(
        jax.device_put(state, _shardings(state, config, over)),
        config,
        tokens,
        found["model"],
        found["fingerprint"],
    )


@functools.partial(jax.jit, static_argnames=("config", "over"))
def _first_row(
    state: cache.KVState, *, config: CacheSpec, over: Mesh | None
) -> cache.KVState:
    """Returns the first row; on a mesh, all devices of the rows get a copy."""
    if len(state.next_pos) > 1:
        row = jnp.zeros((1,), jnp.int32)
        layers = tuple(state.layout.rows(layer, row) for layer in state.layers)
        head = {"next_pos": state.next_pos[:1], "error": state.error[:1]}
        state = state.replace(layers=layers, **head)
    if over is None:
        return state
    split = _shardings(state, config, over)
    return jax.tree.map(jax.lax.with_sharding_constraint, state, split)


def _shardings(state: cache.KVState, config: CacheSpec, over: Mesh | None) -> PyTree:
    """Returns where every array lies; None for the default device."""
    if over is None:
        return None
    split = prefixes.partitions(Prefix(state, config)).state
    return jax.tree.map(lambda names: NamedSharding(over, names), split)


def _shapes(
    model: Model, config: CacheSpec, capacities: tuple[int, ...], dtype: str
) -> cache.KVState:
    """Returns the shapes of a context's state."""
    sizes = 1, capacities, jnp.dtype(dtype)
    make = lambda: Prefix(cache.init(model.spec, config, *sizes), config).frozen()
    return jax.eval_shape(make).state


def _filled(
    path: pathlib.Path,
    shapes: cache.KVState,
    arrays: dict[str, np.ndarray],
    length: int,
) -> cache.KVState:
    """Returns a state of these shapes, with the arrays of a file."""
    leaves = _leaves(shapes.layers)
    if {name for name, _ in leaves} != set(arrays):
        raise context_files.damaged(path, "its arrays are not those of its codec")
    filled = []
    for name, shape in leaves:
        array = arrays[name]
        if array.dtype == np.uint8 and shape.dtype.itemsize == 1:
            array = array.view(shape.dtype)  # safetensors does not know float8
        if (array.shape, array.dtype) != (shape.shape, shape.dtype):
            raise context_files.damaged(
                path, f"{name} is {array.dtype}{list(array.shape)}, not {shape}"
            )
        filled.append(array)
    return shapes.replace(
        layers=jax.tree.unflatten(jax.tree.structure(shapes.layers), filled),
        next_pos=np.array([length], np.int32),
        error=np.zeros(shapes.error.shape, np.uint32),
    )


def _leaves(layers: PyTree) -> list[tuple[str, Any]]:
    """Returns every array of the layers with its name in a file."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    return [(f"layers.{name(path)}", leaf) for path, leaf in leaves]


def _dtype(state: cache.KVState) -> str:
    """Returns the name of the dtype that pairs are decoded to."""
    return jax.eval_shape(state.layout.keys, state.layers[0]).dtype.name


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def _check_model(model: Model, name: str, weights: str, dtype: str) -> None:
    """Raises UserError if a context was read by other weights, or in another dtype."""
    loaded, own = fingerprint(model), str(model.params["embed"].dtype)
    if weights != loaded:
        raise UserError(
            f"the context was read by {name} (weights {weights}), and the model is "
            f"{model.spec.name} ({loaded}): take that model, or read the document again"
        )
    if dtype != own:
        raise UserError(
            f"the context was read in {dtype}, and the model is loaded in {own}: load "
            "it with that dtype, or read the document again"
        )


def _check_config(
    path: pathlib.Path, found: Mapping[str, str], asked: Mapping[str, str]
) -> None:
    """Raises UserError that names the first field in which configurations differ."""
    for field, value in asked.items():
        if (other := found.get(field)) != value:
            raise UserError(
                f"context {path} was compressed with {field} {other!s:.120}, and "
                f"{field} {value:.120} is asked for: give the same, or read the "
                "document again"
            )


def _tuples(budget: Any) -> Any:
    return tuple(map(_tuples, budget)) if isinstance(budget, list) else budget
