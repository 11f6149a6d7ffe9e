"""What is left of a prompt: the share of its pairs kept, by layer and place in it.

A map is small enough for a line of records: a string per layer, whose characters stand
for equal parts of the prompt, from "0", nothing kept there, to "9", everything.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

PARTS = 64


def drawn(kept: Sequence[Sequence[np.ndarray]], length: int) -> list[str]:
    """The map of one prompt.

    Args:
      kept: positions of the kept pairs, `[layer][head]`; those from `length` on, which
        were generated, do not count.
      length: of the prompt, in tokens.

    Returns:
      A string per layer, of `PARTS` characters or one per token if there are fewer.
    """
    edges = np.linspace(0, length, min(PARTS, length) + 1).round()
    room = np.diff(edges)
    return [
        "".join(
            str(round(9 * share))
            for share in np.mean([_counts(head, edges) for head in layer], 0) / room
        )
        for layer in kept
    ]


def shares(drawing: Sequence[str]) -> Float[np.ndarray, "L parts"]:
    """The shares that a map says, 0 to 1, to the nearest ninth."""
    return np.array([[int(digit) / 9 for digit in layer] for layer in drawing])


def _counts(head: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Kept pairs from each edge up to the next."""
    return np.diff(np.searchsorted(np.sort(head), edges))
