"""Memory of the device and the host: limits, measured peaks, and freed blocks."""

import contextlib
import ctypes
import pathlib
from collections.abc import Iterator

import jax

from kvjax.parallel import limits
from kvjax.types import UserError, real_number

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as mallopt numbers them
_LARGE = 1 << 20  # bytes


def device_memory(memory_gb: float | None = None) -> int:
    """Returns the bytes that weights, state and temporaries may take together.

    Args:
      memory_gb: the limit in units of 1e9 bytes. None is 92% of the limit of the
        smallest device on GPU and TPU; on a CPU, half of the free memory of the machine
        or of the container, which its virtual devices share.

    Raises:
      UserError: a limit that is not positive, or above the device's own (on a CPU, all
        memory of the machine or the container).
    """
    own = limits.device_bytes()
    if memory_gb is None:
        return own or limits.free_host_bytes() // 2 // len(jax.local_devices())
    if real_number("memory_gb", memory_gb) <= 0:
        raise UserError(f"memory_gb {memory_gb}: must be larger than 0")
    own = own or limits.host_bytes()
    if memory_gb * 1e9 > own:
        offered = own // 10**8 / 10
        raise UserError(f"memory_gb {memory_gb}: the device offers {offered}")
    return int(memory_gb * 1e9)


def host_memory(memory_gb: float | None = None) -> int:
    """Returns the bytes of host memory that offloaded values may take.

    Args:
      memory_gb: the limit in units of 1e9 bytes; None is half of the free memory.

    Raises:
      UserError: a limit above the machine's memory.
    """
    if memory_gb is None:
        return limits.free_host_bytes() // 2
    if memory_gb * 1e9 > (own := limits.host_bytes()):
        offered = own // 10**8 / 10
        raise UserError(f"offload memory_gb {memory_gb}: the machine offers {offered}")
    return int(memory_gb * 1e9)


@contextlib.contextmanager
def peak_memory(weights: int, on_host: int = 0) -> Iterator[list[int]]:
    """Measures the most bytes held inside the block, the weights included.

    On GPU and TPU it is the allocator's peak, and known only if the block raised it,
    since it cannot be reset. On a CPU it is the growth of the process's resident set
    inside the block, plus the weights. From then on glibc returns large blocks to the
    system as they are freed: by default it keeps those of up to 32 MiB, and the holes
    between them made 2.7 GB of a plan of 1.9. The list stays empty where neither is
    known.

    Args:
      weights: bytes of the weights.
      on_host: bytes that lie in host memory on purpose. A CPU's memory is the same:
        they are subtracted.
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
    """Returns the process's largest resident set since the last reset, in bytes."""
    try:
        if reset:
            _return_large_blocks()
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return None
    return _field(status, "VmHWM")


def resident() -> int:
    """Returns the process's resident set in bytes; 0 on systems other than Linux."""
    with contextlib.suppress(OSError):
        return _field(pathlib.Path("/proc/self/status").read_text(), "VmRSS")
    return 0


def _field(status: str, name: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _return_large_blocks() -> None:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
    trim()


def trim() -> None:
    """Returns freed blocks to the system; does nothing under other C libraries.

    By default glibc keeps freed blocks of up to 32 MiB for the thread that allocated
    them. XLA allocates the next state on other threads, which cannot reuse them.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
