"""Reads how much memory the devices and the machine have."""

import contextlib
import os
import pathlib
import sys

import jax

_MEMINFO, _CGROUP = map(pathlib.Path, ("/proc/meminfo", "/sys/fs/cgroup"))
_CGROUPS = (  # version 2 and 1: the limit, what is taken, and of that unused files
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
USABLE = 0.92  # of a device's limit: allocators fragment, runtimes need room


def device_bytes() -> int | None:
    """Returns usable bytes of the smallest device; None where it shares the host's."""
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices()]
    return int(min(limits) * USABLE) if all(limits) else None


def free_host_bytes() -> int:
    """Returns bytes that can be had without swapping; half of all if unknown."""
    _, left = _container_memory()
    with contextlib.suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) << 10, left)
    return min(host_bytes() // 2, left)


def host_bytes() -> int:
    """Returns bytes of the machine, or of the container that this runs in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _container_memory()[0])


def _container_memory() -> tuple[int, int]:
    """Bytes that the container may take, and those it has left; many without a limit.

    Pages of files that nobody uses are as good as free: the kernel drops them first.
    """
    for limit, taken, stat, unused in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            most, used = (int((_CGROUP / name).read_text()) for name in (limit, taken))
            found = dict(map(str.split, (_CGROUP / stat).read_text().splitlines()))
            left = most - used + int(found.get(unused, 0))
            return most, min(max(left, 0), most)
    return sys.maxsize, sys.maxsize
