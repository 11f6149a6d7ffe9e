"""Compiles for an accelerator that is absent, and reads the compiler's schedule.

A target is `tpu:v5e` (libtpu, no TPU), `cuda:FILE` (jax-cuda13-plugin and NVIDIA's
compiler packages, no GPU; FILE holds a GPU's target configuration as text), or `here`.
"""

import dataclasses
import functools
import glob
import os
import re
import shutil
import tempfile

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kvjax.evaluation import roofline
from kvjax.parallel import host

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1", "v5p": "v5p:2x2x1"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU core's bandwidth (bytes/s) and clock (Hz).

    The clock follows from the matrix rate: MXUs of 128 or 256 squared take one row per
    cycle on v5e, two on later chips.
    """

    bandwidth: float
    clock: float


def _core(device: str, products: int, cores: int = 1) -> Chip:
    """Returns a core that does `products` multiplications per cycle."""
    rates = roofline.device(device).rates
    return Chip(rates.bytes_per_s / cores, rates.flops_per_s / cores / (2 * products))


CHIPS = {
    "v5e": _core("tpu-v5e", 4 * 128**2),
    "v6e": _core("tpu-v6e", 2 * 256**2 * 2),
    "tpu7x": _core("tpu7x", 2 * 256**2 * 2, cores=2),
}


def accelerators() -> list[str]:
    """Returns device files of TPUs and GPUs, which are known before JAX starts."""
    return [
        *glob.glob("/dev/accel*"),
        *glob.glob("/dev/vfio/[0-9]*"),
        *glob.glob("/dev/nvidia[0-9]*"),
    ]


@functools.cache
def device(target: str):
    """Returns the device of a target.

    Raises:
      RuntimeError: the packages that describe the target are missing.
    """
    kind, _, detail = target.partition(":")
    here = jax.devices()[0]  # also finds the plugins
    if kind == "here":
        return here
    if kind == "cpu":
        return jax.devices("cpu")[0]
    if kind == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        name = TPUS.get(detail, detail if ":" in detail else f"{detail}:2x2")
        return topologies.get_topology_desc(name, platform="tpu").devices[0]
    with open(detail) as file:
        config = {"target_config": file.read(), "topology": "1x1x1"}
    return topologies.get_topology_desc("", platform="cuda", **config).devices[0]


def compile_for(target, function, *shapes, donate=()):
    """Compiles a function of arrays for the target's device.

    Shapes are pytrees of `jax.ShapeDtypeStruct`; `kvjax.parallel.host.like` marks those
    in host memory. `donate` are the arguments to donate.
    """
    where = device(target)
    alone = jax.sharding.Mesh([where], ("one",))
    there = jax.NamedSharding(alone, jax.P(), memory_kind=host.KIND)
    here = jax.sharding.SingleDeviceSharding(where)
    put = lambda s: jax.ShapeDtypeStruct(
        s.shape, s.dtype, sharding=there if host.nbytes(s) else here
    )
    shapes = jax.tree.map(put, shapes)
    described = AbstractDevice(where.device_kind, None, _platform(target, where))
    mesh = AbstractMesh(
        (1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=described
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*shapes)
    return lowered.compile()


def _platform(target, where) -> str:
    kind = target.partition(":")[0]
    return {"cuda": "gpu", "here": where.platform}.get(kind, kind)


@functools.cache
def _dump() -> str:
    """Returns the folder where libtpu writes schedules; set before libtpu loads."""
    return tempfile.mkdtemp(prefix="kvjax_schedules_")


def want_schedules() -> None:
    """Makes libtpu write schedules. Call it before any TPU target is used."""
    flags = f"--xla_jf_dump_to={_dump()} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"


def scheduled_cycles(target, name, function, *shapes, donate=()) -> tuple[int, int]:
    """Returns the scheduled cycles of one grid step of a Pallas kernel, for a TPU.

    TPU cores issue one bundle of instructions per cycle, in order. The schedule
    includes latencies of instructions but not waits for memory.

    Returns:
      The bundles of every step, and those of branches that neither copy nor multiply
      matrices, which only the first and the last tile of a row run. Branches that
      multiply do not count: the only one recomputes a product after a NaN in an empty
      slot.
    """
    for old in os.listdir(_dump()):
        os.remove(os.path.join(_dump(), old))
    compile_for(target, function, *shapes, donate=donate)
    paths = glob.glob(os.path.join(_dump(), f"*-{name}*-final_bundles.txt"))
    (path,) = [path for path in paths if "schedule-analysis" not in path]
    with open(path) as file:
        return _executed(file.read().splitlines())


def forget_schedules() -> None:
    shutil.rmtree(_dump(), ignore_errors=True)


def _executed(lines) -> tuple[int, int]:
    """Returns the bundles of every step, and those of first and last tiles."""
    bundles, ends = [], {}
    for line in lines:
        if not re.match(r"\s*0x[0-9a-f]+\s|\s*0\s+:", line):
            continue
        bundles.append(line)
        for region in re.findall(r"empty region (\d+)", line):
            ends[region] = len(bundles) - 1
    redone, edges = set(), set()
    for start, line in enumerate(bundles):
        found = re.search(r"sbr\.rel .*target = \$region(\d+)", line)
        end = ends.get(found[1], 0) if found else 0
        body = range(start + 1, end)
        inside = "".join(bundles[i] for i in body)
        if "sbr.rel" in inside or "dma" in inside:
            continue
        (redone if "vmatmul" in inside else edges).update(body)
    return len(bundles) - len(redone) - len(edges), len(edges)
