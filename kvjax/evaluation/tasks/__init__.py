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

from kvjax.evaluation.tasks.base import Example, Task
from kvjax.registry import Registry
from kvjax.types import UserError

__all__ = ["MODULES", "Example", "Task", "get", "names", "register"]

_registry = Registry("task", Task)  # of the user's own

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


def register(name: str, task: Callable[[], Task]) -> Callable[[], Task]:
    """Lets `name` stand for a task, or for what a function makes; returns it.

    Raises:
      UserError: the name is taken, or holds a colon.
    """
    if _own(name):
        raise UserError(
            f"task {name!r} cannot be registered: kvjax has one, use another"
        )
    return _registry.register(name, task)


def get(name: str) -> Task:
    """The task of this name, or `module:name` of one's own: a Task, or what makes one.

    Raises:
      UserError: there is none, with the likeliest name; or it is something else.
    """
    if task := _own(name):
        return task
    if ":" in name or name in _registry.names():
        return _registry.make(name)
    known = names()
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(f"no task {name!r}; {hint}there are {', '.join(known)}")


def names() -> list[str]:
    """The names of all tasks, sorted."""
    own = (name for module in set(MODULES.values()) for name in _tasks(module))
    return sorted([*own, *_registry.names()])


def _own(name: str) -> Task | None:
    first = name.partition("/")[0]
    return _tasks(MODULES[first]).get(name) if first in MODULES else None


def _tasks(module: str) -> dict[str, Task]:
    return importlib.import_module(f"kvjax.evaluation.tasks.{module}").TASKS
