"""What is going on, in a line: on a terminal and in a notebook, and nowhere else."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

Say = Callable[[str, int], None]  # what runs now, and how many prompts just ended


def silent(what: str, prompts: int = 0) -> None:
    """Says nothing."""


@contextlib.contextmanager
def line(prompts: int, wanted: bool | None = None) -> Iterator[Say]:
    """A line that shows from the first word on, and goes when the work ends.

    Args:
      prompts: how many there are; 0 where none run.
      wanted: whether to show it. None is where somebody looks: at a terminal, or in a
        notebook, unless KVJAX_PROGRESS is 0.
    """
    if wanted is None:
        wanted = _somebody_looks()
    bars: list[tqdm] = []

    def say(what: str, ended: int = 0) -> None:
        if not bars:
            form = None if prompts else "{desc}"
            bars.append(
                tqdm(total=prompts, unit="prompt", leave=False, bar_format=form)
            )
        bars[0].set_description_str(what, refresh=False)
        bars[0].update(ended)
        bars[0].refresh()

    try:
        yield say if wanted else silent
    finally:
        for bar in bars:
            bar.close()


def _somebody_looks() -> bool:
    if os.environ.get("KVJAX_PROGRESS") == "0":
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules
