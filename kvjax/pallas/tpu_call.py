"""Builder of TPU kernel calls: operands, results and scratch memory by name."""

import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kvjax.pallas.tpu_kernel import LANES, Case, Form
from kvjax.types import Codes, numbers_of

NAME = "kvjax_attention"  # in profiles and compiler dumps


class Call:
    """A kernel call under construction: named operands, results and scratch.

    The body gets one object that holds a ref under each name.
    """

    def __init__(self, case: Case):
        self.grid, self.vmem = case.grid, case.vmem
        self.scalars, self.inputs, self.outputs = {}, {}, {}
        self.scratch, self.aliases = {}, {}
        self.pairs = []  # operands that stay in HBM

    def run(self, body: Callable, interpret) -> dict[str, Array]:
        """Runs `body(refs)` over the grid, and returns the results by name."""
        names = [*self.scalars, *self.inputs, *self.outputs, *self.scratch]
        operands, results = [*self.scalars, *self.inputs], list(self.outputs)
        kernel = pl.pallas_call(
            lambda *refs: body(
                types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[spec for _, spec in self.inputs.values()],
                out_specs=[spec for _, spec in self.outputs.values()],
                scratch_shapes=list(self.scratch.values()),
            ),
            out_shape=[shape for shape, _ in self.outputs.values()],
            input_output_aliases={
                operands.index(old): results.index(new)
                for old, new in self.aliases.items()
            },
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", *["arbitrary"] * 3),
                vmem_limit_bytes=self.vmem,
            ),
            interpret=interpret,
            name=NAME,
        )
        arrays = {name: array for name, (array, _) in self.inputs.items()}
        if not interpret:
            arrays |= {name: _in_hbm(arrays[name]) for name in self.pairs}
        found = kernel(*self.scalars.values(), *arrays.values())
        return dict(zip(results, found, strict=True))


def of_products(case: Case, q, k, pos, q_pos, n, stats) -> Call:
    """Builds a call with queries, keys, and the statistics of their weights."""
    spare = case.parts * case.queries - q.shape[3]
    if spare:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, spare), (0, 0)))
        q_pos = jnp.pad(q_pos, ((0, 0), (0, spare)), constant_values=-1)
    q = rearrange(q, "b k g (i t) d -> b k i (g t) d", i=case.parts)
    q_pos = rearrange(q_pos, "b (i t) -> b i t 1", i=case.parts)
    heads, rows, tile = case.heads, case.rows, case.tile
    by_group = _by_group(q, case)
    call = Call(case)
    call.scalars = {"n": n}
    call.inputs = {
        "q": (by_group, _of_queries(case, case.depth, by_group.shape[3])),
        "q_pos": (
            q_pos,
            pl.BlockSpec((1, 1, case.queries, 1), lambda b, h, i, *_: (b, i, 0, 0)),
        ),
        "pos": (
            pos,
            pl.BlockSpec((1, case.kv_heads, tile), lambda b, h, i, c, *_: (b, 0, c)),
        ),
    }
    _add_pairs(call, case, "k", k, case.k)
    for name in sorted(stats):
        call.outputs[name] = (_f32(*pos.shape), _every_slot(case))
    call.scratch = {
        "max_logit": pltpu.VMEM((heads, rows, 1), jnp.float32),
        "denominator": pltpu.VMEM((heads, rows, 1), jnp.float32),
        "p": pltpu.VMEM(
            (case.count, case.chunks, heads * case.room, LANES), jnp.float32
        ),
        "base": pltpu.VMEM((case.count, heads, rows, 1), jnp.float32),
    }
    if stats:
        call.scratch["share"] = pltpu.VMEM((heads * case.room, LANES), jnp.float32)
    return call


def add_values(call: Call, case: Case, v) -> None:
    """Adds values: the kernel computes the softmax sums and the output."""
    heads, rows, depth = case.heads, case.rows, case.depth
    _add_pairs(call, case, "v", v, case.v)
    if case.apart(case.v):
        shape = case.v.groups * case.room, case.tile
        call.scratch["stack"] = pltpu.VMEM(shape, jnp.float32)
    call.outputs |= {
        "out": (
            _f32(case.batch, case.kv_heads, case.parts, rows, depth),
            _of_queries(case, depth),
        ),
        "max_logit_out": sums(case),
        "denominator_out": sums(case),
    }
    call.scratch["part"] = pltpu.VMEM((heads, rows, depth), jnp.float32)


def add_write(call: Call, case: Case, new_k, new_v, slot) -> None:
    """Adds the write of a KV pair: K and V become results in their own buffers."""
    call.scalars["slot"] = slot
    for name, new, form in (("k", new_k, case.k), ("v", new_v, case.v)):
        stored = call.inputs[name][0]
        new = as_stored(new[:, :, None].astype(stored.dtype), form)
        whole = pl.BlockSpec((1, *new.shape[1:]), lambda b, *_: (b, 0, 0, 0))
        call.inputs["new_" + name] = (new, whole)
        shape = jax.ShapeDtypeStruct(stored.shape, stored.dtype)
        call.outputs[name + "_out"] = (shape, pl.BlockSpec(memory_space=pltpu.HBM))
        call.aliases[name] = name + "_out"
    call.scratch["sent"] = pltpu.SemaphoreType.DMA((2, case.heads))


def add_pick(call: Call, case: Case, pos, total) -> None:
    """Adds the running totals, and the choice of the next slot."""
    call.inputs["total"] = (total, _every_slot(case))
    call.inputs["all_pos"] = (pos, _every_slot(case))
    call.outputs["total_out"] = (_f32(*total.shape), _every_slot(case))
    call.outputs["next_slot"] = (
        jax.ShapeDtypeStruct((case.batch, case.heads, 1), jnp.int32),
        pl.BlockSpec((1, case.heads, 1), lambda b, *_: (b, 0, 0)),
    )
    call.aliases["total"] = "total_out"


def _add_pairs(call: Call, case: Case, name: str, pairs, form: Form) -> None:
    """Adds a tile of K or V, and of its scales."""
    coded = isinstance(pairs, Codes)
    numbers = numbers_of(pairs)
    shape = (form.width, case.tile) if form.minor else (case.tile, form.width)
    spec = pl.BlockSpec(
        (1, case.heads, *shape),
        lambda b, h, i, c, *_: (b, h, 0, c) if form.minor else (b, h, c, 0),
    )
    call.inputs[name] = (as_stored(numbers, form), spec)
    call.pairs.append(name)
    if coded:
        scale = pl.BlockSpec(
            (1, case.heads, form.groups, case.tile),
            lambda b, h, i, c, *_: (b, h, 0, c),
        )
        call.inputs[name + "_scale"] = (jnp.swapaxes(pairs.scale, 2, 3), scale)


def _by_group(q, case: Case):
    """Repeats query rows [..., R, D] for every group of channels of K, zero outside.

    Each group's rows are filled up to whole tiles.
    """
    groups = case.k.groups
    if not case.apart(case.k):
        return q
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, case.room - case.rows), (0, 0)])
    group = jnp.arange(case.depth) // (case.depth // groups)
    own = group[None] == jnp.arange(groups)[:, None]  # [N, D]
    own = own[None, None, None, :, None]
    q = jnp.where(own, q[..., None, :, :], jnp.zeros((), q.dtype))
    return rearrange(q, "b k i n r d -> b k i (n r) d")


def as_stored(pairs: Array, form: Form) -> Array:
    """Converts K or V to its memory form, or back."""
    return jnp.swapaxes(pairs, 2, 3) if form.minor else pairs


def _of_queries(case: Case, width: int, rows: int | None = None) -> pl.BlockSpec:
    """Returns the block of a step's query rows in an array [B, K, parts, R, width]."""
    shape = (1, case.heads, 1, rows or case.rows, width)
    return pl.BlockSpec(shape, lambda b, h, i, *_: (b, h, i, 0, 0))


def sums(case: Case) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """Lays a number per query row along lanes: as a column each takes 128 in HBM."""
    width = case.heads * case.rows
    block = pl.BlockSpec((1, 1, 1, 1, width), lambda b, h, i, *_: (b, h, i, 0, 0))
    return _f32(*case.grid[:3], 1, width), block


def _every_slot(case: Case) -> pl.BlockSpec:
    """Returns the block with all of a row's slots in an array [B, K, C]."""
    return pl.BlockSpec((1, case.kv_heads, case.slots), lambda b, *_: (b, 0, 0))


def _in_hbm(pairs: Array) -> Array:
    """Keeps XLA from moving a small cache into VMEM before the kernel, and back."""
    return pltpu.with_memory_space_constraint(pairs, pltpu.HBM)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
