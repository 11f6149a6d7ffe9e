"""Progress, notices and warnings on stderr."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

Say = Callable[[str, int], None]  # the current stage; how many prompts just ended
_WRAPPERS = ("jax", "jaxtyping")  # packages whose frames may lie around ours
_BRIEF = 0.1  # seconds; shorter stages, such as a cached compilation, get no line


def silent(what: str, prompts: int = 0) -> None:
    """Reports nothing."""


@contextlib.contextmanager
def progress(
    total: int, show: bool | None = None, unit: str = "prompt"
) -> Iterator[Say]:
    """Shows progress on stderr until the block ends.

    A bar shows the current stage, and disappears at the end. In a log file, every stage
    gets a line with its seconds when it ends.

    Args:
      total: number of prompts; 0 if the work is not counted.
      show: True shows a bar, False nothing. None follows KVJAX_PROGRESS: 1 for a bar,
        0 for nothing; if it is not set, a bar at a terminal and in a notebook, and
        lines elsewhere.
      unit: the word for what `total` counts.
    """
    if show is None:
        show = _default()
    with {True: _bar, False: _nothing, None: _lines}[show](total, unit) as say:
        yield say


def _default() -> bool | None:
    """Returns True for a bar, False for nothing, None for lines."""
    setting = {"0": False, "1": True}.get(os.environ.get("KVJAX_PROGRESS", ""))
    if setting is None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return True
    return setting


@contextlib.contextmanager
def _bar(total: int, unit: str) -> Iterator[Say]:
    from tqdm import tqdm  # here: most processes show lines

    bars: list[tqdm] = []

    def say(what: str, ended: int = 0) -> None:
        if not bars:
            form = None if total else "{desc}"
            bars.append(tqdm(total=total, unit=unit, leave=False, bar_format=form))
        bars[0].set_description_str(what, refresh=False)
        bars[0].update(ended)
        bars[0].refresh()

    try:
        yield say
    finally:
        for bar in bars:
            bar.close()


@contextlib.contextmanager
def _nothing(total: int, unit: str) -> Iterator[Say]:
    yield silent


@contextlib.contextmanager
def _lines(total: int, unit: str) -> Iterator[Say]:
    """A stage ends when the next one begins, prompts end, or the block ends."""
    running, start, done = "", 0.0, 0

    def say(what: str, ended: int = 0) -> None:
        nonlocal running, start, done
        now, done = time.monotonic(), done + ended
        if ended or (running and now - start >= _BRIEF):
            count = f" ({done} of {total})" if ended and total else ""
            spent = f": {now - start:.1f} s" if running else ""
            notice(f"{running or what}{spent}{count}")
        running, start = "" if ended else what, now

    yield say
    say("", 0)


def notice(text: str) -> None:
    """Prints one line to stderr."""
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the caller's line that called into kvjax, from any depth in it."""
    where = _caller(sys._getframe())
    warnings.warn_explicit(
        text,
        category,
        where.f_code.co_filename,
        where.f_lineno,
        where.f_globals.get("__name__"),
        where.f_globals.setdefault("__warningregistry__", {}),
    )


def _caller(inner: FrameType) -> FrameType:
    """Returns the frame that called the package's outermost one, past wrappers."""
    found, frame = inner, inner
    while frame.f_back is not None:
        of, frame = _package(frame), frame.f_back
        found = frame if of == "kvjax" else found
    while _package(found) in _WRAPPERS and found.f_back is not None:
        found = found.f_back
    return found


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
