"""Running one program while another is being traced."""

from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

R = TypeVar("R")


def run_aside(function: Callable[[], R]) -> R:
    """function(), computed now, whatever the caller is tracing.

    In a thread of its own, which traces nothing. `jax.ensure_compile_time_eval` is not
    enough: under it an operation without traced inputs is evaluated at once also where
    a kernel's body asks for its place on the grid, and there is no grid yet.
    """
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
