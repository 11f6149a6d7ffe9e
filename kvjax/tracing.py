"""Running one program while another is being traced."""

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def run_aside(function: Callable[[], R]) -> R:
    """function(), computed now, whatever the caller is tracing.

    In a thread of its own, which traces nothing. `jax.ensure_compile_time_eval` is not
    enough: under it an operation without traced inputs is evaluated at once also where
    a kernel's body asks for its place on the grid, and there is no grid yet.

    Raises:
      Exception: whatever `function` raises.
    """
    found: list[R] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
