"""Tasks, which provide examples and grade answers. Nothing here needs an accelerator.

`get` returns a task by name, and `names` lists them. `base` defines tasks and encodes
their examples; `data` reads published data sets. `text` provides long prose, `needle`
hides pass keys in it, and `fidelity` cuts it into windows and compares the predictions
of two models.

Users register their own tasks, or name them in a config as `module:attribute`.
"""

import difflib
import importlib
from collections.abc import Callable

from kvjax.evaluation.tasks.base import Example, Task
from kvjax.registry import Registry
from kvjax.types import UserError

__all__ = ["MODULES", "Example", "Task", "get", "names", "register"]

_registry = Registry("task", Task)  # tasks of the user

# Maps the first part of a task's name (bbh in bbh/snarks) to the module whose
# `TASKS: dict[str, Task]` holds all tasks with that first part.
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
    """Registers a task, or a function that returns one, under a name; returns it.

    Raises:
      UserError: the name is taken, or contains a colon.
    """
    if _own(name):
        raise UserError(
            f"task {name!r} cannot be registered: kvjax has one, use another"
        )
    return _registry.register(name, task)


def get(name: str) -> Task:
    """Returns the task of this name: kvjax's, a registered one, or `module:name`.

    Raises:
      UserError: there is no such task (the error suggests a similar name), or the
        object is not a task.
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
    """Returns the names of all tasks, sorted."""
    own = (name for module in set(MODULES.values()) for name in _tasks(module))
    return sorted([*own, *_registry.names()])


def _own(name: str) -> Task | None:
    first = name.partition("/")[0]
    return _tasks(MODULES[first]).get(name) if first in MODULES else None


def _tasks(module: str) -> dict[str, Task]:
    return importlib.import_module(f"kvjax.evaluation.tasks.{module}").TASKS
