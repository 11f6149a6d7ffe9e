"""Runs a program while another one is being traced."""

from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

R = TypeVar("R")


def run_aside(function: Callable[[], R]) -> R:
    """Returns function(), computed now even if the caller is being traced.

    It runs in a thread of its own, which traces nothing.
    `jax.ensure_compile_time_eval` is not enough: it also evaluates `program_id` in a
    kernel's body, where there is no grid yet.
    """
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
