"""RULER's variable tracking (vt): find all variables that a chain assigns a value."""

import functools
import string
from typing import Any

import numpy as np

from kvjax.evaluation.tasks.fit import Draft, Writer, largest, stream
from kvjax.evaluation.tasks.ruler.niah import NOISE

# The texts are those of scripts/data/synthetic/constants.py of NVIDIA/RULER.
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text "
    "above."
)
PRIMER = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{num_v} variables are assigned the value {query}, they are: "
)
_VARIABLES = 5  # one chain of four hops
_SHOT_TOKENS = 500  # limit of the solved example, without its answer
_SHOT_LINES = 5  # its minimal lines of noise


def writer(tokenizer: Any, seed: int) -> Writer:
    """Returns the writer of vt; its size is the number of lines of noise.

    Args:
      tokenizer: measures the solved example that begins each prompt.
      seed: the seed of the examples.
    """

    def fits(lines: int) -> bool:
        text = "".join(_puzzle(stream((seed,), 0), 3, lines)[:2])
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids) <= _SHOT_TOKENS

    lines = largest(fits, _SHOT_LINES, _SHOT_LINES)
    return Writer(functools.partial(_write, lines), _VARIABLES)


def _write(shot_lines: int, seed: tuple[int, ...], size: int) -> Draft:
    shot = _puzzle(stream(seed, 0), 3, shot_lines)
    prompt, primer, names = _puzzle(stream(seed, 1), 5, size)
    solved = f"{shot[0]}{shot[1]} {' '.join(shot[2])}\n\n"
    return Draft(solved + prompt, names, primer)


def _puzzle(
    rng: np.random.Generator, letters: int, lines: int
) -> tuple[str, str, tuple[str, ...]]:
    """Returns prompt, primer and answers; variables have names of `letters` letters."""
    names = _names(rng, letters)
    value = str(rng.integers(10_000, 99_999))
    sources = (value, *(f"VAR {name} " for name in names))
    chain = [f"VAR {a} = {b}" for a, b in zip(names, sources, strict=False)]
    text = [NOISE] * lines
    places = np.sort(rng.choice(lines, _VARIABLES, replace=False)).tolist()
    for step, place in enumerate(places):
        text.insert(place + step, chain[step])
    filled = {"context": "\n".join(text), "query": value, "num_v": _VARIABLES}
    return TEMPLATE.format(**filled), PRIMER.format(**filled), names


def _names(rng: np.random.Generator, letters: int) -> tuple[str, ...]:
    names: dict[str, None] = {}  # in the order drawn, each once
    while len(names) < _VARIABLES:
        names["".join(rng.choice(list(string.ascii_uppercase), letters))] = None
    return tuple(names)
