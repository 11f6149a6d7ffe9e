"""Ways of computing the same thing, timed in turn or compiled for another target.

Reads the flags `target` and `repeats`, which scripts that race define by
`define_flags`.
"""

import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import targets
from absl import flags

FLAGS = flags.FLAGS


def define_flags(repeats):
    """Those that `race` reads.

    Args:
      repeats: of each way, unless told.
    """
    flags.DEFINE_string("target", "cpu", "cpu, tpu:GENERATION or cuda:FILE")
    told = "runs of each way; the first one is not counted"
    flags.DEFINE_integer("repeats", repeats, told, lower_bound=2)


class Way(NamedTuple):
    call: Callable  # (state, *inputs) -> (state, result); the state is donated
    make: Callable  # () -> (state, *inputs); run for shapes alone without a device
    units: int = 1  # steps, blocks or layers in a call: times are per unit
    options: dict[str, Any] | None = None  # of the compiler


def race(ways):
    """Compiles all ways, then runs them in turn: a dict of figures for each."""
    compiled, figures = {}, {}
    place = jax.sharding.SingleDeviceSharding(targets.device(FLAGS.target))
    abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
    for name, way in ways.items():
        shapes = jax.tree.map(abstract, jax.eval_shape(way.make))
        started = time.perf_counter()
        lowered = jax.jit(way.call, donate_argnums=0).lower(*shapes)
        traced = time.perf_counter()
        compiled[name] = lowered.compile(way.options)
        memory = compiled[name].memory_analysis()
        figures[name] = {
            "trace s": traced - started,
            "compile s": time.perf_counter() - traced,
            "temporary MiB": memory.temp_size_in_bytes / 2**20,
            "aliased MiB": memory.alias_size_in_bytes / 2**20,
        }
        if FLAGS.target.startswith("tpu"):
            cycles, unpriced = count_cycles(compiled[name].as_text()) / way.units
            figures[name] |= {"kilocycles": cycles / 1e3, "not priced": unpriced}
    if FLAGS.target != "cpu":
        return figures
    arguments = {name: list(way.make()) for name, way in ways.items()}
    times = {name: [] for name in ways}
    for _ in range(FLAGS.repeats):
        for name, given in arguments.items():
            started = time.perf_counter()
            given[0], out = compiled[name](*given)
            jax.block_until_ready((given[0], out))
            times[name].append((time.perf_counter() - started) * 1e3)
    for name, way in ways.items():
        figures[name]["ms"] = float(np.median(times[name][1:])) / way.units
        figures[name]["least ms"] = min(times[name]) / way.units
    return figures


def compare(figures, base):
    """Adds to figures how long every way takes, or its cycles, as parts of `base`'s."""
    for row in figures.values():
        if cost := next((c for c in ("ms", "kilocycles") if c in row), None):
            row[f"of {base}"] = row[cost] / figures[base][cost]


def count_cycles(text):
    """The compiler's estimate: loops times their trips, a cond's dearest branch.

    Returns [cycles, runs of fusions, scatters and sorts it has no estimate for].
    """
    bodies, current = {}, []
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*{$", line):
            current = bodies.setdefault("ENTRY" if found[1] else found[2], [])
        current.append(line)

    @functools.cache
    def total(name):
        cost = np.zeros(2)
        for line in bodies.get(name, ()):
            if found := re.search(r'"estimated_cycles":"(\d+)"', line):
                cost[0] += int(found[1])
            elif re.search(r" (fusion|scatter|sort)\(", line):
                cost[1] += 1
            if found := re.search(r" while\(.*condition=%?(\S+), body=%?(\S+),", line):
                test = "\n".join(bodies[found[1]])
                trips = re.search(r" s32\[\]\S* constant\((\d+)\)", test)
                cost += total(found[2]) * int(trips[1] if trips else 1)
            elif found := re.search(r"branch_computations={([^}]*)}", line):
                cost += max(
                    (total(n.strip(" %")) for n in found[1].split(",")), key=sum
                )
        return cost

    return total("ENTRY")


def show(title, figures):
    names = list(next(iter(figures.values())))
    print(f"\n| {title} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, row in figures.items():
        cells = " | ".join(f"{row[n]:.4g}" for n in names)
        print(f"| {name} | {cells} |", flush=True)
