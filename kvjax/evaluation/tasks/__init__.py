"""Tasks: text in, tokenized examples and grades out. Nothing here needs an accelerator.

`get` gives a task by its name and `names` lists them; `base` says what a task is made
of, `data` reads published data sets. `text` gives long prose, `needle` hides pass keys
in it, `fidelity` cuts it into windows and measures how far one model's predictions are
from another's.

A task of one's own is registered, or a config names it as `module:attribute`.
"""

import difflib
import importlib
from collections.abc import Callable

from kvjax.evaluation.tasks.base import Task
from kvjax.registry import imported
from kvjax.types import UserError

_REGISTERED: dict[str, Task | Callable[[], Task]] = {}

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


def register(name: str, task: Task | Callable[[], Task]) -> None:
    """Lets `name` stand for a task, or for what a function makes when it is asked for.

    Raises:
      UserError: the name is taken, or holds a colon.
    """
    if ":" in name or name in names():
        raise UserError(
            f"task {name!r} cannot be registered: the name is taken, or holds a colon, "
            "which is for module:attribute"
        )
    _REGISTERED[name] = task


def get(name: str) -> Task:
    """The task of this name, or `module:attribute`, a task or a function returning one.

    Raises:
      UserError: there is none, or it is something else.
    """
    found = imported("task", name) if ":" in name else _known(name)
    task = found() if callable(found) else found
    if not isinstance(task, Task):
        raise UserError(f"task {name!r}: expected a Task, got {task!r:.80}")
    return task


def names() -> list[str]:
    """The names of all tasks, sorted."""
    own = (name for module in set(MODULES.values()) for name in _tasks(module))
    return sorted([*own, *_REGISTERED])


def _known(name: str) -> Task | Callable[[], Task]:
    """By its name. Raises UserError, with the likeliest name, if none is."""
    first = name.partition("/")[0]
    task = _tasks(MODULES[first]).get(name) if first in MODULES else None
    task = task or _REGISTERED.get(name)
    if task is None:
        known = names()
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"no task {name!r}; {hint}there are {', '.join(known)}")
    return task


def _tasks(module: str) -> dict[str, Task]:
    return importlib.import_module(f"kvjax.evaluation.tasks.{module}").TASKS
