"""How much memory a piece of work has taken, measured."""

import contextlib
import ctypes
import pathlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def peak_memory(weights: int) -> Iterator[list[int]]:
    """Measures the most bytes held inside the block, the weights included.

    On GPU and TPU it is the allocator's peak, told only if the block raised it, since
    it cannot be reset. On a CPU it is the growth of the process's resident set over
    what it was before, plus the weights; what the allocator still holds of earlier work
    is given back first, or it would be used again unseen. The list stays empty where
    neither is known.
    """
    found: list[int] = []
    device = jax.local_devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    resident = _resident_peak(reset=True) if device.platform == "cpu" else None
    yield found
    if before is not None:
        peak = device.memory_stats()["peak_bytes_in_use"]
        found.extend([peak] if peak > before else [])
    elif resident is not None:
        found.append(weights + _resident_peak() - resident)


def _resident_peak(reset: bool = False) -> int | None:
    """The process's largest resident set in bytes since the last reset (Linux)."""
    try:
        if reset:
            with contextlib.suppress(OSError, AttributeError):  # of glibc alone
                ctypes.CDLL(None).malloc_trim(0)
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
