"""Tiles in a GPU's shared memory: copies into it, and reads from it.

Keys and values stream through rings of buffers, each tile refilled as soon as it is
used up. Of codes the ring holds these and their scales; a tile of them becomes numbers
on the way through the registers, in a buffer from which the tensor core reads.
"""

import dataclasses
import inspect
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array

TILE = 64  # slots, or query rows, per step: the M of one tensor-core instruction
LANES = 8  # query heads of a KV head in decoding, padded to the narrowest N

# Older loads want an index of their own, besides the view's.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _INDEX and _INDEX.default is inspect.Parameter.empty else ()

# How the tensor core spreads a tile's rows, and its columns, over the threads.
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that differ between the hardware and the interpreter."""

    interpret: bool

    def load(self, ref, *index, layout=plgpu.Layout.WGMMA, swizzled=False):
        """Loads a tile into registers, in the tensor core's layout."""
        if self.interpret:
            return ref[index or ...]
        ref = ref.at[index] if index else ref
        return plgpu.load(ref, *_NO_INDEX, layout=layout, optimized=swizzled)

    def column(self, ref, slot, index, count):
        """Loads ref[slot, index::count] as a column along the rows of codes."""
        if self.interpret:
            return ref[slot].reshape(TILE, count)[:, index]
        column = ref.at[slot].reshape(TILE, count).at[:, index]
        return plgpu.load(column, *_NO_INDEX, layout=ROWS, optimized=False)

    def store(self, ref, tile, swizzled=False):
        """ref[...] = tile, in however small pieces (0.12 refuses them unasked)."""
        if self.interpret or not hasattr(plgpu, "store"):
            ref[...] = tile
        else:
            plgpu.store(ref, tile, optimized=swizzled)

    def full(self, shape, value, layout=plgpu.Layout.WGMMA):
        tile = jnp.full(shape, value, jnp.float32)
        return tile if self.interpret else plgpu.layout_cast(tile, layout)

    def iota(self, shape, axis):
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def store_transposed(self, ref, tile, swizzled=False):
        """ref[...] = tile.T, with `tile` in registers."""
        if self.interpret:
            ref[...] = tile.T
        else:
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
            self.store(ref.T, tile, swizzled)

    def product(self, a, b, acc=None, *, flip_a=False, flip_b=False):
        """a @ b (+ acc) in float32; `flip` takes an operand's transpose, in place."""
        if self.interpret:
            a = a if isinstance(a, jax.Array) else a[...]
            out = jnp.dot(
                a.T if flip_a else a,
                b[...].T if flip_b else b[...],
                preferred_element_type=jnp.float32,
                precision=jax.lax.Precision.HIGHEST,
            )
            return out if acc is None else acc + out
        a, b = a.T if flip_a else a, b.T if flip_b else b
        if acc is not None:
            return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))

        def multiply(ref):
            plgpu.wgmma(ref, a, b)
            return ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def swizzle_of(width):
    """Bytes of the widest swizzle whose pieces a bfloat16 row of `width` is made of.

    The interpreter, which takes rows that no swizzle divides, does not swizzle.
    """
    return next((size for size in (128, 64) if 2 * width % size == 0), 32)


def whole_width(width):
    """The head dim filled up to the tensor core's M, in shared memory alone.

    Copies bring zeros for what lies past the end of a row, without reading it.
    """
    return -(-width // TILE) * TILE


def tile_type(shape, dtype, swizzle):
    """Allocates tensor core operands; both operands of a product need one swizzle.

    The interpreter's float32 tiles ignore it.
    """
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


def _code_type(shape, dtype):
    """Shared memory for codes, swizzled if rows are long enough to need it.

    Else the threads of a warp, which read pieces of eight rows, meet in a few banks.
    """
    size = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next((each for each in (128, 64, 32) if size % each == 0), None)
    if swizzle is None:
        return plgpu.SMEM(shape, dtype)
    return tile_type(shape, dtype, swizzle)


def rows_of(tile):
    """Returns the slice of tile number `tile`."""
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def fetch(source, target, barrier):
    """Starts a copy to shared memory; past the end of a dimension it brings zeros."""
    zeros = plgpu.OOBFillMode.ZEROS
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=zeros)


def spread(x, shape, axis):
    """Broadcasts a vector along `axis` of `shape`."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def stream(begin, end, refill, ready, step, carry):
    """carry = step(i, slot, carry) for the tiles begin to end of a ring of buffers.

    Tile i lies in slot i % stages once its barrier opens; then the slot is refilled.
    """
    stages = ready.shape[0]

    def body(i, carry):
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(ready.at[slot])
        carry = step(i, slot, carry)
        plgpu.commit_smem()  # all have read the slot before copies overwrite it
        refill(i + stages, slot)
        return carry

    return jax.lax.fori_loop(jnp.int32(begin), jnp.int32(end), body, carry)


class Source(NamedTuple):
    """Keys or values of all rows' heads in device memory.

    Attributes:
      tiles: [H, C, D] numbers; or [H, C, P] codes, several a byte.
      scale: bf16[H, C * N] of N groups of channels; None of numbers.
    """

    tiles: Array
    scale: Array | None = None

    @property
    def groups(self) -> int:
        """N, the number of groups; 0 for pairs that are not coded."""
        return 0 if self.scale is None else self.scale.shape[1] // self.tiles.shape[1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one key or value, with its scales."""
        return self.tiles.shape[2] * self.tiles.dtype.itemsize + 2 * self.groups

    def same_tiles(self, other: "Source") -> bool:
        """Returns whether the other's tiles fit the same ring."""
        form = lambda source: (source.tiles.shape, source.tiles.dtype, source.groups)
        return form(self) == form(other)

    @property
    def copies(self) -> int:
        """Returns the number of copies per tile, which is a barrier's arrival count."""
        return 1 + len(_pieces(self.groups))

    def swizzle(self, depth: int) -> int:
        """Of a tile of numbers; what codes become is stored part by part."""
        return swizzle_of(depth if self.scale is None else self.tiles.shape[2])

    def fetch(self, ring: "Ring", head, tile, slot, barrier) -> None:
        """Starts the copies of a tile to a slot of the ring."""
        # Past the end of a row of numbers, which the tensor core wants filled up.
        across = pl.ds(jnp.int32(0), ring.tiles.shape[2])
        fetch(self.tiles.at[head, rows_of(tile), across], ring.tiles.at[slot], barrier)
        for start, size in _pieces(self.groups):
            place = pl.multiple_of(tile * (TILE * self.groups) + start, TILE)
            here = ring.scale.at[slot, pl.ds(start, size)]
            fetch(self.scale.at[head, pl.ds(place, size)], here, barrier)


class Ring(NamedTuple):
    """Buffers in shared memory that tiles of a `Source` stream through.

    Attributes:
      tiles: [stages, TILE, W] numbers, W the head dim or more; or codes
        [stages, TILE, P].
      scale: bf16[stages, TILE * N]; None of numbers.
      wide: [TILE, W] what the codes of one tile stand for; None of numbers.
    """

    tiles: Array
    scale: Array | None = None
    wide: Array | None = None

    @classmethod
    def of(cls, source: Source, stages: int, depth: int, width: int, dtype) -> "Ring":
        """Returns the types of a ring's memory, for D channels in rows of W `dtype`."""
        swizzle, shape = source.swizzle(depth), (stages, TILE)
        if source.scale is None:
            return cls(tile_type((*shape, width), dtype, swizzle))
        packed = source.tiles.shape[2]
        return cls(
            _code_type((*shape, packed), source.tiles.dtype),
            plgpu.SMEM((stages, TILE * source.groups), source.scale.dtype),
            tile_type((TILE, width), dtype, swizzle),
        )

    def numbers(self, ops: Ops, slot, depth: int, weight=None):
        """A tile for the tensor core, [TILE, W] of which D channels hold something.

        Args:
          ops: what to do it with.
          slot: of the ring.
          depth: D.
          weight: [TILE] of codes alone: those without one become zero; they may be NaN.
        """
        if self.wide is None:
            return self.tiles.at[slot]
        codes, dtype = ops.load(self.tiles, slot), self.wide.dtype
        scales = self._scales(ops, slot)
        if weight is not None:
            scales = [jnp.where(weight > 0, scale, 0.0) for scale in scales]
        scales = [scale.astype(dtype) for scale in scales]
        packed = self.tiles.shape[2]
        for part in range(depth // packed):
            steps = _part(codes, part, depth // packed, dtype)
            scale = _by_channel(ops, scales, codes.shape, part * packed, depth)
            ops.store(self.wide.at[:, pl.ds(part * packed, packed)], steps * scale)
        plgpu.commit_smem()
        return self.wide

    def _scales(self, ops: Ops, slot) -> list:
        """Loads every group's scales, f32[TILE] each."""
        groups = self.scale.shape[1] // TILE
        read = lambda group: ops.column(self.scale, slot, group, groups)
        return [read(group).astype(jnp.float32) for group in range(groups)]


def _pieces(groups: int) -> list[tuple[int, int]]:
    """Splits the copy of a tile's scales into starts and sizes of at most 256."""
    total = TILE * groups
    return [(start, min(256, total - start)) for start in range(0, total, 256)]


def _part(codes, part: int, parts: int, dtype):
    """Extracts the codes at one place of every byte, as `dtype`.

    All are exact in bfloat16, and so they are made in it: signed bytes become two of
    them in a few instructions, where a float32 takes a slow conversion each way. They
    are masked where they lie: registers of bytes know no shifts.
    """
    if jnp.issubdtype(codes.dtype, jnp.floating):
        return codes.astype(jnp.float32).astype(dtype)
    if parts == 1:
        return codes.astype(dtype)
    bits = 8 // parts
    place = 2 ** (part * bits)
    held = codes & jnp.uint8((2**bits - 1) * place)
    if part == parts - 1:  # the number less its half, as the upper bits of a byte
        return (held ^ jnp.uint8(128)).astype(jnp.int8).astype(dtype) * (1 / place)
    return held.astype(jnp.int8).astype(dtype) * (1 / place) - 2.0 ** (bits - 1)


def _by_channel(ops: Ops, scales: list, shape, first: int, depth: int):
    """Returns each channel's scale [TILE, P], for P channels from `first` on."""
    size = depth // len(scales)
    groups = range(first // size, (first + shape[1] - 1) // size + 1)
    found = spread(scales[groups[0]], shape, 0)
    for group in groups[1:]:
        channel = ops.iota(shape, 1) + first
        found = jnp.where(
            channel < group * size, found, spread(scales[group], shape, 0)
        )
    return found


def clear(ops, tile, weight):
    """Zeroes the rows of a tile of values without weight, which may hold NaN."""
    held = ops.load(tile, swizzled=True)
    kept = spread(weight, tile.shape, 0) > 0
    tile[...] = jnp.where(kept, held, jnp.zeros((), held.dtype))
    plgpu.commit_smem()
