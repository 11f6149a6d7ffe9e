"""What kvjax says on stderr while it works: progress, notices and warnings."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

Say = Callable[[str, int], None]  # what runs now, and how many prompts just ended
_WRAPPERS = ("jax", "jaxtyping")  # what functions of the package may be called through
_BRIEF = 0.1  # seconds: a stage that took less, such as a compilation kept, is not told


def silent(what: str, prompts: int = 0) -> None:
    """Says nothing."""


@contextlib.contextmanager
def progress(
    total: int, wanted: bool | None = None, unit: str = "prompt"
) -> Iterator[Say]:
    """Shows on stderr what runs, until the block ends.

    A bar shows what runs from the first word on, and goes when the work ends. Where
    nobody looks, as in a log file, every stage that has ended gets a line with its
    seconds.

    Args:
      total: how many prompts there are; 0 where none run.
      wanted: True shows a bar, False nothing. None is what KVJAX_PROGRESS says: 1 for
        a bar, 0 for nothing; where that is not set, a bar at a terminal and in a
        notebook, and lines elsewhere.
      unit: what `total` counts, for the bar.
    """
    if wanted is None:
        wanted = _chosen()
    with {True: _bar, False: _nothing, None: _lines}[wanted](total, unit) as say:
        yield say


def _chosen() -> bool | None:
    """Whether a bar shows, or nothing; None is lines."""
    told = {"0": False, "1": True}.get(os.environ.get("KVJAX_PROGRESS", ""))
    if told is None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return True
    return told


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
    """A stage ends when the next one is named, units are told, or the block ends."""
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
    """One line to stderr, for what takes long or differs from what was expected."""
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called into kvjax, however deep in it the reason lies."""
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
    """The frame that called the package's outermost one, past what wraps functions."""
    found, frame = inner, inner
    while frame.f_back is not None:
        of, frame = _package(frame), frame.f_back
        found = frame if of == "kvjax" else found
    while _package(found) in _WRAPPERS and found.f_back is not None:
        found = found.f_back
    return found


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
