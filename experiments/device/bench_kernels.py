"""Times the attention kernels beside a memory copy and other implementations.

    python experiments/device/bench_kernels.py                     # on a GPU or TPU
    python experiments/device/bench_kernels.py --target=tpu:v5e          # by libtpu
    python experiments/device/bench_kernels.py --target=cuda:h200.txtpb  # compiles only

On the device, times every shape with our kernel, with and without scores, and with
`jax.nn.dot_product_attention` (XLA, cuDNN) and tokamax if installed, as shares of the
copy bandwidth measured in the same run; then one decode step of an 8B model with random
weights. No network, no input files, under ten minutes.

Without a device nothing is timed: for a TPU the table shows the cycles that the
compiler schedules beside those of the bytes at the chip's bandwidth, and a kernel takes
the larger of the two. On a CPU without --target, all TPUs in `targets.CHIPS` are
compiled for.

Prints a table, writes it and a plot to --workdir, and ends with one JSON line.
"""

import dataclasses
import importlib.util
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import targets
from absl import flags

from kvjax import attention
from kvjax.attention import AttentionSpec, Pairs, Queries
from kvjax.attention.stored import Stored, decoded
from kvjax.cache import codecs
from kvjax.cli import command
from kvjax.evaluation import roofline
from kvjax.evaluation.report.grids import Table, markdown
from kvjax.pallas import tpu, tpu_call
from kvjax.types import UserError

FLAGS = flags.FLAGS
SCORED = frozenset({"attn_sum"})  # the statistic that most policies require
REPEATS = 30  # timed runs per kernel


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: T = 1 is decode, T > 1 a prefill chunk. bfloat16, or codes of it."""

    B: int = 64
    K: int = 8
    G: int = 4
    T: int = 1
    C: int = 2048
    D: int = 128
    codec: str = ""

    def __str__(self):
        sizes = dataclasses.asdict(self)
        codec = sizes.pop("codec")
        return " ".join(
            [*(f"{k}={v}" for k, v in sizes.items()), *filter(None, [codec])]
        )

    @property
    def arrays(self):
        """Shapes of q, k, v, pos, q_pos, n; k and v may be codes."""
        pairs = (self.B, self.K, self.C, self.D)
        array = jax.ShapeDtypeStruct
        kv = array(pairs, jnp.bfloat16)
        return (
            array((self.B, self.K, self.G, self.T, self.D), jnp.bfloat16),
            *jax.eval_shape(self.stored, kv, kv),
            array(pairs[:3], jnp.int32),
            array((self.B, self.T), jnp.int32),
            array((self.B,), jnp.int32),
        )

    def stored(self, k, v):
        """Returns keys and values as attention takes them."""
        if not self.codec:
            return k, v
        codec = codecs.make(self.codec)
        pairs = (k, codec.key), (v, codec.value)
        return tuple(Stored(t.encode(x), t, x.shape, x.dtype) for x, t in pairs)

    def bytes(self, stats=()) -> int:
        """Returns the bytes that a call must read or write at least once."""
        moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.arrays))
        queries = self.B * self.K * self.G * self.T
        return moved + 4 * queries * (self.D + 2) + 4 * len(stats) * self.arrays[3].size

    @property
    def flops(self) -> int:
        return 4 * self.B * self.K * self.G * self.T * self.C * self.D


BASE = Shape()
DECODE = [
    BASE,
    *(dataclasses.replace(BASE, B=b) for b in (1, 16, 256)),
    *(dataclasses.replace(BASE, G=g) for g in (1, 8)),
    *(dataclasses.replace(BASE, C=c) for c in (512, 8192)),
    *(dataclasses.replace(BASE, D=d) for d in (64, 96)),
    *(dataclasses.replace(BASE, codec=c) for c in ("int8", "k8v4", "int4")),
    *(dataclasses.replace(BASE, D=64, codec=c) for c in ("int8", "int4")),
]
BLOCK = [Shape(B=8, T=64), Shape(B=8, T=256), Shape(B=8, T=512), Shape(B=8, T=64, D=64)]


def define_flags():
    flags.DEFINE_string("target", "", "here, tpu:GENERATION or cuda:FILE; see above")
    flags.DEFINE_string("workdir", "runs/bench_kernels", "where table and plot go")
    flags.DEFINE_integer("repeats", REPEATS, "timed runs per kernel")
    flags.DEFINE_bool("quick", False, "one shape of each kind")
    flags.DEFINE_bool("step", True, "also time the decode step of a whole model")
    flags.DEFINE_integer("tile_kib", 0, "TPU: bytes of K per tile; 0: the table's")
    flags.DEFINE_integer("tile_rows", 0, "TPU: query rows per tile; 0: the table's")


def main(_):
    if not FLAGS.target and jax.default_backend() == "cpu":
        if not importlib.util.find_spec("libtpu"):
            raise UserError(
                "there is no accelerator here, and nothing to compile for one: install "
                "libtpu (`make compiled` does), or give --target"
            )
        names = [f"tpu:{name}" for name in targets.CHIPS]
    else:
        names = [FLAGS.target or "here"]
    out = pathlib.Path(FLAGS.workdir)
    out.mkdir(parents=True, exist_ok=True)
    shapes = [BASE, BLOCK[0]] if FLAGS.quick else DECODE + BLOCK
    figures = {name: bench(name, shapes) for name in names}
    text = "\n\n".join(table(name, rows) for name, rows in figures.items())
    (out / "kernels.md").write_text(text + "\n")
    print(text + "\n")
    plot(figures, out / "kernels.png")
    print(json.dumps({"file": str(out / "kernels.md"), **figures}))


def bench(target, shapes):
    """Returns rows of figures for one target."""
    if target == "here":
        step = {"decode step, 8B": whole_step()} if FLAGS.step else {}
        return timed(shapes, FLAGS.repeats) | step
    kind, _, detail = target.partition(":")
    if kind == "tpu" and detail in targets.CHIPS:
        return {str(shape): predicted(target, shape) for shape in shapes}
    return {str(shape): compiled(target, shape) for shape in shapes}


# ------------------------------------------------------------- without the device


def predicted(target, shape):
    """Returns the cycles that a TPU's compiler schedules, and those of the bytes.

    Where `/ floor` is below 1, memory hides the schedule; the last ratio and the time
    use the larger of the two.
    """
    chip = targets.CHIPS[target.partition(":")[2]]
    row, *whole = {}, 0.0, 0.0
    tiles = _tiles(targets.device(target).device_kind)
    grid = tpu.grid(*map(as_read, shape.arrays[:3]), tiles)
    for i, stats in enumerate((frozenset(), SCORED)):
        name = "scored" if stats else "plain"
        run = lambda q, k, v, *rest, stats=stats: tpu.attend(
            *(q, as_read(k), as_read(v), *rest), stats=stats, tiles=tiles
        )
        step, edges = targets.scheduled_cycles(
            target, tpu_call.NAME, run, *shape.arrays
        )
        cycles = np.prod(grid[:3]) * (step * grid[3] + edges)
        floor = shape.bytes(stats) / chip.bandwidth * chip.clock
        whole[i] = max(cycles, floor)
        row |= {
            f"{name} kcycles": cycles / 1e3,
            f"{name} floor": floor / 1e3,
            f"{name} / floor": cycles / floor,
        }
    row["scored / plain, schedule"] = row["scored kcycles"] / row["plain kcycles"]
    row["scored / plain"] = whole[1] / whole[0]
    row["scored us"] = whole[1] / chip.clock * 1e6
    return row


def compiled(target, shape):
    """Returns the temporary memory of a kernel that is compiled but cannot run."""
    kernel = "pallas_gpu" if target.startswith("cuda") else "pallas_tpu"
    row = {}
    for name, stats in (("plain", frozenset()), ("scored", SCORED)):
        run = by(kernel, stats)
        memory = targets.compile_for(target, run, *shape.arrays).memory_analysis()
        row[f"{name} temporary MiB"] = memory.temp_size_in_bytes / 2**20
    moved = jax.tree.leaves(shape.arrays[1:3])
    row["K and V MiB"] = sum(x.size * x.dtype.itemsize for x in moved) / 2**20
    return row


def as_read(pairs):
    """Returns the codes of stored pairs, and plain arrays unchanged."""
    return pairs.codes if isinstance(pairs, Stored) else pairs


def _tiles(kind):
    """Returns the tiles of a device kind, with the sizes that the flags set."""
    usual = tpu.TILES[kind]
    asked = {"pairs": FLAGS.tile_kib << 10, "rows": FLAGS.tile_rows}
    return usual._replace(**{name: size for name, size in asked.items() if size})


# ---------------------------------------------------------------- on the device


def timed(shapes, repeats=REPEATS):
    """Times every implementation at every shape, with the measured copy bandwidth."""
    bandwidth = roofline.measured_bandwidth()
    rows = {}
    for shape in shapes:
        arguments = random_arguments(shape)
        row = {"copy GB/s": bandwidth / 1e9}
        for name, way in ways().items():
            try:
                seconds = median_seconds(repeats, jax.jit(way), *arguments)
            except Exception as error:  # an implementation that cannot run this shape
                row[f"{name} failed"] = str(error).splitlines()[0][:120]
                continue
            row[f"{name} us"] = seconds * 1e6
            moved = shape.bytes(SCORED if "scored" in name else ())
            row[f"{name} of bandwidth"] = moved / seconds / bandwidth
            row[f"{name} TFLOP/s"] = shape.flops / seconds / 1e12
        if "scored us" in row and "plain us" in row:
            row["scored / plain"] = row["scored us"] / row["plain us"]
        rows[str(shape)] = row
        print(shape, json.dumps(row), flush=True)
    return rows


def ways():
    """Returns our kernels and others, as functions of q, k, v, pos, q_pos, n."""
    ours = f"pallas_{'gpu' if jax.default_backend() == 'gpu' else 'tpu'}"
    found = {"plain": by(ours), "scored": by(ours, SCORED)}
    found |= {"reference": by("reference"), "reference scored": by("reference", SCORED)}
    found["xla"] = by("xla")
    if jax.default_backend() == "gpu":
        found["cudnn"] = by("cudnn")
        if importlib.util.find_spec("tokamax"):
            found["tokamax"] = tokamax
    return found


def by(name, stats=frozenset()):
    """Returns an implementation as a function of a shape's arrays."""

    spec = AttentionSpec(stats, name)

    def way(q, k, v, pos, q_pos, n):
        queries, pairs = Queries(q, q_pos, n), Pairs(k, v, pos)
        partial, stats_found = attention.attend(queries, pairs, spec)
        return attention.normalize(partial), stats_found.attn_sum

    return way


def tokamax(q, k, v, pos, q_pos, n):
    """Runs tokamax's attention with our mask; its layout has heads after slots."""
    import tokamax as library

    del n
    b, heads, group, length, depth = q.shape
    k, v = decoded(k), decoded(v)
    q = jnp.moveaxis(q, 3, 1).reshape(b, length, heads * group, depth)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    visible = (pos[:, :, None] >= 0) & (pos[:, :, None] <= q_pos[:, None, :, None])
    mask = jnp.repeat(visible, group, axis=1)
    return library.dot_product_attention(q, k, v, mask=mask)


def random_arguments(shape):
    """Returns a full cache of random KV pairs, made on the device."""

    @jax.jit
    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        pairs = (shape.B, shape.K, shape.C, shape.D)
        q, k, v = (
            jax.random.normal(key, size, jnp.bfloat16)
            for key, size in zip(
                keys, (shape.arrays[0].shape, pairs, pairs), strict=True
            )
        )
        floats = q, *shape.stored(k, v)
        pos = jnp.broadcast_to(jnp.arange(shape.C), shape.arrays[3].shape)
        start = shape.C - shape.T
        q_pos = jnp.broadcast_to(start + jnp.arange(shape.T), (shape.B, shape.T))
        return *floats, pos, q_pos, jnp.full((shape.B,), shape.T)

    return make()


def median_seconds(repeats, function, q, *rest):
    """Returns the median seconds of a call, with several calls per program.

    A call started from Python takes at least 60 to 100 us on a fast GPU. The barrier
    makes each call wait for the one before it.
    """
    calls = 10

    @jax.jit
    def several(q, *rest):
        def again(_, found):
            waiting, _ = jax.lax.optimization_barrier((q, found))
            return function(waiting, *rest)

        return jax.lax.fori_loop(1, calls, again, function(q, *rest))

    jax.block_until_ready(several(q, *rest))
    times = []
    for _ in range(max(repeats // calls, 3)):
        started = time.perf_counter()
        jax.block_until_ready(several(q, *rest))
        times.append((time.perf_counter() - started) / calls)
    return float(np.median(times))


def whole_step():
    """Times a decode step of an 8B model, as a share of the time of its bytes."""
    import model_step

    spec, bandwidth = model_step.SPECS["llama-3.1-8b"], roofline.measured_bandwidth()
    row = {"copy GB/s": bandwidth / 1e9}
    for name in (None, "reference"):
        seconds, moved = model_step.timed(spec, 64, 2048, 32, name)
        label = name or "kernels"
        row |= {
            f"{label} ms": seconds * 1e3,
            f"{label} of roofline": moved / bandwidth / seconds,
            f"{label} tokens/s": 64 / seconds,
        }
    return row


# ------------------------------------------------------------------- table, plot


def table(target, rows):
    """Returns a Markdown table of one target's figures."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    note = {
        "here": f"measured on {jax.devices()[0].device_kind}",
        "tpu": "from the compiler's schedule; no device has run it",
        "cuda": "compiled, not run",
    }[target.partition(":")[0]]
    cells = [
        [shape, *(_cell(row.get(c, "")) for c in columns)]
        for shape, row in rows.items()
    ]
    made = markdown(Table(["shape", *columns], cells))
    return f"### {target} ({note})\n\n{made}"


def _cell(value):
    return value if isinstance(value, str) else f"{value:.3g}"


def plot(figures, path):
    """Plots shares of the bandwidth, or scheduled cycles over those of the bytes."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shares = {
        target: {shape: _shares(row) for shape, row in rows.items() if _shares(row)}
        for target, rows in figures.items()
    }
    shares = {target: rows for target, rows in shares.items() if rows}
    if not shares:
        return
    fig, axes = plt.subplots(
        1, len(shares), figsize=(1 + 5 * len(shares), 6), sharey=True, squeeze=False
    )
    for ax, (target, rows) in zip(axes[0], shares.items(), strict=True):
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        height = 0.8 / len(names)
        for i, name in enumerate(names):
            at = np.arange(len(rows)) + i * height - 0.4 + height / 2
            ax.barh(at, [row.get(name, 0) for row in rows.values()], height, label=name)
        ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
        ax.axvline(1, color="black", linewidth=0.8)
        if target == "here":
            ax.set(title=target, xlabel="share of the memory bandwidth", xlim=(0, 1.1))
        else:
            label = "scheduled cycles / cycles that the bytes take"
            ax.set(title=target, xlabel=label, xscale="log", xlim=(0.1, 20))
            ax.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter("")
        ax.invert_yaxis()
    axes[0, 0].legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def _shares(row):
    ends = " of bandwidth", " / floor"
    return {
        name.removesuffix(end): x
        for name, x in row.items()
        for end in ends
        if name.endswith(end)
    }


def run(argv):
    """Runs `main`; requests schedules first, before a TPU's compiler is loaded."""
    if FLAGS.target.startswith("tpu") or not (FLAGS.target or targets.accelerators()):
        targets.want_schedules()
    try:
        main(argv)
    finally:
        targets.forget_schedules()


if __name__ == "__main__":
    define_flags()
    command.run(run)
