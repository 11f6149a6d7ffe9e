"""How much memory a piece of work has taken, measured."""

import contextlib
import ctypes
import pathlib
from collections.abc import Iterator

import jax

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # names of mallopt's parameters
_LARGE = 1 << 20  # bytes


@contextlib.contextmanager
def peak_memory(weights: int, on_host: int = 0) -> Iterator[list[int]]:
    """Measures the most bytes held inside the block, the weights included.

    On GPU and TPU it is the allocator's peak, told only if the block raised it, since
    it cannot be reset. On a CPU it is the growth of the process's resident set over
    what it was before, plus the weights. There glibc is told to hand back large blocks
    as they are freed, now and from here on: by itself it keeps those of up to 32 MiB,
    and the holes between them made 2.7 GB of a plan of 1.9. The list stays empty where
    neither is known.

    Args:
      weights: bytes of the weights.
      on_host: bytes that lie in the host's memory by intention. A CPU's is the same
        memory: they are taken off.
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
        found.append(weights + _resident_peak() - resident - on_host)


def _resident_peak(reset: bool = False) -> int | None:
    """The process's largest resident set in bytes since the last reset (Linux)."""
    try:
        if reset:
            _hand_back_freed()
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _hand_back_freed() -> None:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
    trim()


def trim() -> None:
    """Hands back what is free now; other C libraries than glibc have no such choice.

    By itself glibc keeps freed blocks of up to 32 MiB for the thread that allocated
    them. XLA's next state comes from other threads, so that it would lie beside them.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
