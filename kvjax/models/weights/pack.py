"""Packs checkpoint tensors into the params of `kvjax.models.decoder`.

Readers use Hugging Face's tensor names and `[out, in]` orientation, with the rows of
query and key heads in half-rotated order. Details of a file format stay in its reader,
and a family's tensor names in its `Names`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.families.names import Names
from kvjax.parallel import limits
from kvjax.types import ModelSpec, PyTree, UserError

Read = Callable[[str], np.ndarray]


class Placement(NamedTuple):
    """A destination of params other than the default device.

    Attributes:
      place: `(spec, path, array) -> jax.Array` transfers one host array, often a
        transposed view, given its path in the params (`("layers", 0, "qkv")`). It may
        permute rows or columns, but must not change the shape.
      shardings: `(spec) -> pytree` of the `jax.sharding.Sharding` that `place` gives
        each param. Copies in the cache folder are read with these.
      order: a name for the permutation that `place` applies, "" for none. Copies in the
        cache folder are distinguished by it.
    """

    place: Callable[[ModelSpec, tuple[str | int, ...], np.ndarray], jax.Array]
    shardings: Callable[[ModelSpec], PyTree]
    order: str = ""


def check_room(
    spec: ModelSpec,
    dtype: jnp.dtype,
    placement: Placement | None = None,
    memory: int | None = None,
) -> None:
    """Raises UserError for weights that do not fit in memory, before loading any.

    Args:
      spec: the model's shape.
      dtype: dtype of the params.
      placement: their destination; None for the default device.
      memory: bytes for them on a device, or in a CPU's machine; None for all that is
        free.
    """
    own = limits.device_bytes()
    shapes = decoder.param_shapes(spec, dtype)
    splits = placement and placement.shardings(spec)

    def size(leaf, split=None):
        shape = split.shard_shape(leaf.shape) if split else leaf.shape
        # CPU devices of a machine share its memory, so all their shards count.
        here = len(split.addressable_devices) if split and own is None else 1
        return here * math.prod(shape) * leaf.dtype.itemsize

    sizes = jax.tree.map(size, shapes, *filter(None, [splits]))
    taken = sum(jax.tree.leaves(sizes))
    memory = memory or own or int(limits.USABLE * limits.free_host_bytes())
    if taken >= memory:
        half = ", dtype='bfloat16'" if jnp.dtype(dtype).itemsize > 2 else ""
        raise UserError(
            f"weights of {spec.name} in {jnp.dtype(dtype)} take {taken / 1e9:.3g} GB "
            f"of {memory / 1e9:.3g}: give more memory{half}, or a smaller model"
        )


def on_device(
    spec: ModelSpec, path: tuple[str | int, ...], array: np.ndarray
) -> jax.Array:
    """Puts an array on the default device."""
    return jax.device_put(array)  # unlike jnp.array, makes no copy on the host first


def tensor_shapes(spec: ModelSpec, names: Names) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a checkpoint of this spec: Hugging Face name -> shape."""
    shapes = dict(_end_shapes(spec, names))
    for index in range(spec.num_layers):
        for part, template in names.layer.items():
            experts = range(spec.experts) if "{e}" in template else (0,)
            for expert in experts:
                name = template.format(i=index, e=expert)
                for kind, shape in _part_shapes(spec, part).items():
                    shapes[f"{name}.{kind}"] = shape
    return shapes


def _end_shapes(spec: ModelSpec, names: Names) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors that belong to no layer."""
    m, v, e = spec.model_dim, spec.vocab_size, spec.embed_dim or spec.model_dim
    ends = {"embed": (v, e)}
    if spec.positions == "learned":
        ends["positions"] = (spec.context_length + names.skipped_positions, m)
    if e != m:
        ends |= {"embed_in": (m, e), "embed_out": (e, m)}
    if not spec.tie_embeddings:
        ends["head"] = (v, e)
    for part, shape in ends.items():
        yield f"{names.ends[part]}.weight", shape
    if spec.final_norm:
        for kind, shape in _norm_shapes(spec).items():
            yield f"{names.ends['final_norm']}.{kind}", shape


def _norm_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return dict.fromkeys(kinds, (spec.model_dim,))


def _part_shapes(spec: ModelSpec, part: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a part's weight and, where it has one, its bias."""
    m, f, d = spec.model_dim, spec.ff_dim, spec.head_dim
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    if part in ("attn_norm", "mlp_norm", "attn_after", "mlp_after"):
        return _norm_shapes(spec)
    if part in ("q_norm", "k_norm"):
        return {"weight": (d,)}
    rows, columns, biased = {
        "q": (q, m, "qkv"),
        "k": (kv, m, "qkv"),
        "v": (kv, m, "qkv"),
        "qkv": (q + 2 * kv, m, "qkv"),
        "out": (m, q, "out"),
        "gate": (f, m, "mlp"),
        "up": (f, m, "mlp"),
        "gate_up": (2 * f, m, "mlp"),
        "down": (m, f, "mlp"),
        "router": (spec.experts, m, ""),
    }[part]
    found = {"weight": (rows, columns)}
    return found | ({"bias": (rows,)} if biased in spec.biases else {})


def check_heads(spec: ModelSpec, source) -> None:
    """Raises UserError for heads that rotary positions or grouping cannot use."""
    rotates = spec.positions != "learned"
    if spec.head_dim < 1 or (rotates and spec.head_dim % 2):
        raise UserError(
            f"{source} has head_dim {spec.head_dim}: it must be 1 or more, and even "
            "for rotary positions, use another checkpoint"
        )
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"{source} has {spec.num_kv_heads} KV heads for {spec.num_heads} query "
            "heads: the second must be a multiple of the first, use another checkpoint"
        )


def check(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    source,
) -> None:
    """Compares a checkpoint's tensors (name to shape) with the expected ones.

    Raises:
      UserError: naming the first tensor that is missing, unknown or of another shape.
    """
    if missing := [name for name in expected if name not in found]:
        raise UserError(
            f"{source} lacks {len(missing)} tensors, {missing[0]} first: fetch the "
            "checkpoint again, all of its files"
        )
    if extra := [name for name in found if name not in expected]:
        raise UserError(
            f"{source} has {len(extra)} tensors that its architecture does not "
            f"use, {extra[0]} first: take a checkpoint of the plain model"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{name} in {source} has shape {tuple(found[name])}, its configuration "
                f"asks for {tuple(shape)}: the two are not of the same model"
            )


def pack(
    spec: ModelSpec,
    names: Names,
    read: Read,
    dtype: jnp.dtype,
    placement: Placement | None = None,
) -> PyTree:
    """Reads every tensor once and packs it; layouts as in `kvjax.models.decoder`.

    An array is read after the one before it has been transferred, so the host holds one
    array and, while this is joined from several tensors, one of those.

    Args:
      spec: the model's shape.
      names: the checkpoint's tensor names.
      read: returns a tensor by Hugging Face name, `[out, in]`, any float dtype. It must
        not be written to later: the params may be a view of it.
      dtype: dtype of the params.
      placement: destination of the params; None for the default device.
    """

    def tensor(name: str) -> np.ndarray:
        return np.asarray(read(name)).astype(dtype, copy=False)

    place = placement.place if placement else on_device

    def put(array: np.ndarray, *path: str | int) -> jax.Array:
        return jax.block_until_ready(place(spec, path, array))

    end = lambda part: tensor(names.ends[part] + ".weight")
    params = {
        "embed": put(end("embed"), "embed"),
        "layers": tuple(
            _layer(spec, names, index, tensor, put) for index in range(spec.num_layers)
        ),
    }
    if spec.final_norm:
        name = names.ends["final_norm"]
        params["final_norm"] = _norm(spec, name, tensor, put, "final_norm")
    if spec.positions == "learned":
        skipped = names.skipped_positions
        params["positions"] = put(end("positions")[skipped:], "positions")
    if spec.embed_dim not in (None, spec.model_dim):
        for part in ("embed_in", "embed_out"):
            params[part] = put(end(part), part)
    if not spec.tie_embeddings:
        params["head"] = put(end("head"), "head")
    expected = jax.tree.map(lambda leaf: leaf.shape, decoder.param_shapes(spec))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == expected
    return params


def _layer(spec: ModelSpec, names: Names, index: int, tensor: Read, put) -> PyTree:
    """Returns one layer's params."""
    here = ("layers", index)
    layer = {}

    def add(key: str, array: np.ndarray) -> None:
        layer[key] = put(array, *here, key)

    def one(part: str, kind: str = "weight") -> np.ndarray:
        return tensor(f"{names.layer[part].format(i=index)}.{kind}")

    first = "gate_up" if spec.gated else "up"
    parts = ("gate", "up") if "gate" in names.layer else (first,)
    add("qkv", _heads(spec, names, one, "weight"))
    add("out", one("out"))
    for key, its in ((first, parts), ("down", ("down",))):
        add(key, _mlp(spec, names, index, tensor, its))
    if "router" in names.layer:
        add("router", one("router"))
    for norm in ("attn_norm", "mlp_norm", "attn_after", "mlp_after"):
        if norm in names.layer:
            name = names.layer[norm].format(i=index)
            layer[norm] = _norm(spec, name, tensor, put, *here, norm)
    for norm in ("q_norm", "k_norm") if spec.qk_norm else ():
        add(norm, one(norm))
    if "qkv" in spec.biases:
        add("qkv_bias", _heads(spec, names, one, "bias"))
    if "out" in spec.biases:
        add("out_bias", one("out", "bias"))
    if "mlp" in spec.biases:
        add(first + "_bias", np.concatenate([one(part, "bias") for part in parts]))
        add("down_bias", one("down", "bias"))
    return layer


def _heads(spec: ModelSpec, names: Names, one, kind: str) -> np.ndarray:
    """Joins rows of queries, keys and values, KV head by KV head: [K (G+2) D, ...]."""
    k, g, d = spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim
    if "qkv" in names.layer:
        fused = one("qkv", kind)
        if names.grouped:
            return fused
        pieces = iter(np.split(fused, [k * g * d, (k * g + k) * d]))
    else:
        pieces = (one(name, kind) for name in "qkv")
    split = lambda piece: piece.reshape(k, -1, d, *piece.shape[1:])
    # map, because a generator's variable would hold a piece while the next is read.
    heads = _join(map(split, pieces), g + 2, 1)
    return heads.reshape(-1, *heads.shape[3:])


def _mlp(
    spec: ModelSpec, names: Names, index: int, tensor: Read, parts: tuple[str, ...]
) -> np.ndarray:
    """Concatenates projections along `out`: [out, in], or [X, in, out] for experts."""
    rows = sum(_part_shapes(spec, part)["weight"][0] for part in parts)
    name = lambda part, expert: names.layer[part].format(i=index, e=expert) + ".weight"
    one = lambda expert: _join((tensor(name(part, expert)) for part in parts), rows, 0)
    if not spec.experts:
        return one(0)
    stack = _join((one(e)[None] for e in range(spec.experts)), spec.experts, 0)
    return np.swapaxes(stack, -1, -2)


def _join(pieces: Iterable[np.ndarray], length: int, axis: int) -> np.ndarray:
    """Concatenates pieces to this length along an axis, holding one at a time."""
    whole, done = None, 0
    for piece in pieces:
        size = piece.shape[axis]
        if size == length:
            return piece
        if whole is None:
            shape = (*piece.shape[:axis], length, *piece.shape[axis + 1 :])
            whole = np.empty(shape, piece.dtype)
        into = np.moveaxis(whole, axis, 0)[done : done + size]
        into[:] = np.moveaxis(piece, axis, 0)
        done += size
        del piece  # before the next one is read
    return whole


def _norm(spec: ModelSpec, name: str, tensor: Read, put, *path: str | int) -> PyTree:
    if spec.norm != "layer":
        return put(tensor(name + ".weight"), *path)
    kinds = ("weight", "bias")
    return {kind: put(tensor(f"{name}.{kind}"), *path, kind) for kind in kinds}
