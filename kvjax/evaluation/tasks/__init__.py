"""Tasks: text in, tokenized examples and grades out. Nothing here needs an accelerator.

`get` gives a task by its name and `names` lists them; `base` says what a task is made
of, `data` reads published data sets. `text` gives long prose, `needle` hides pass keys
in it, `fidelity` cuts it into windows and measures how far one model's predictions are
from another's.
"""

import difflib
import importlib

from kvjax.evaluation.tasks.base import Task
from kvjax.types import UserError

# The first part of a task's name (bbh in bbh/snarks), and the module of this package
# whose `TASKS: dict[str, Task]` holds all tasks of that first part.
MODULES = {
    "bbh": "bbh",
    "cnn_dailymail": "summaries",
    "gsm8k": "gsm8k",
    "longbench": "longbench",
    "multi_news": "summaries",
    "narrativeqa": "answers",
    "needle": "passkey",
    "passkey": "passkey",
    "ruler": "ruler",
    "ruler_file": "ruler",
    "samsum": "summaries",
    "triviaqa": "answers",
    "xsum": "summaries",
}


def get(name: str) -> Task:
    """The task of this name. Raises UserError, with the likeliest name, if none is."""
    first = name.partition("/")[0]
    task = _tasks(MODULES[first]).get(name) if first in MODULES else None
    if task is None:
        known = names()
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"no task {name!r}; {hint}there are {', '.join(known)}")
    return task


def names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(name for module in set(MODULES.values()) for name in _tasks(module))


def _tasks(module: str) -> dict[str, Task]:
    return importlib.import_module(f"kvjax.evaluation.tasks.{module}").TASKS
