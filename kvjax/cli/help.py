"""Writes the pages of `kvjax run --help`: configs, fields, policies and tasks."""

import runpy
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvjax import policies
from kvjax.cli import configs
from kvjax.evaluation import tasks

_OVERRIDES = """\
Override any of them, each with a value of its type; a tuple is given whole. A field
that the config lacks, or has as None, needs a config of your own, which may begin with
another's (README). The budget that methods share may also be a share of the run's
longest prompt, where the config has it as a FieldReference(512, field_type=object).
Quote what the shell would read:

  --config.budget=256 --config.fidelity.num_windows=2
  --config.budget=25%                           a share, heads of different sizes
  '--config.methods[4].policy=h2o'              a field of one method, counted from 0
  '--config.tasks[0].options.depths=(0.1,0.9)'  a tuple
  '--config.methods=({"name": "Full cache"}, {"name": "H2O", "policy": "h2o"})'"""


def text(config: str | None) -> str:
    """Returns the pages, with the fields of the config FILE[:ARGUMENT]."""
    shown = config or str(configs.FOLDER / "quickstart.py")
    rows = [f"  {name}  {words}" for name, words in _columns(configs.descriptions())]
    fields = [f"  --config.{name}  {kind}" for name, kind in _columns(_fields(shown))]
    return "\n".join(
        [
            "Configs, each with fields of its own (--config=NAME --help lists them):",
            *rows,
            f"\nFields of {_name(shown)}:",
            *fields,
            "",
            _OVERRIDES,
            "\nPolicies:",
            _filled(policies.names()),
            "\nTasks:",
            _filled(tasks.names()),
            "\nEither may also be module:function of your own.",
        ]
    )


def _name(config: str) -> str:
    """Returns the name of a config of kvjax's, or the file of another."""
    return config.replace(f"{configs.FOLDER}/", "").replace(".py", "")


def _fields(config: str) -> Iterator[tuple[str, str]]:
    path, _, argument = config.partition(":")
    make = runpy.run_path(path)["get_config"]
    return _leaves("", make(*filter(None, [argument])).to_dict())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields every field that has a value of its own, as NAME=VALUE, and its type."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, each)
    elif isinstance(value, tuple) and any(isinstance(v, Mapping) for v in value):
        for index, each in enumerate(value):
            yield from _leaves(f"{name}[{index}]", each)
    elif value is not None:
        yield f"{name}={value!r}", type(value).__name__


def _columns(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    rows = list(rows)
    width = min(60, max(len(name) for name, _ in rows))
    return [(name.ljust(width), words) for name, words in rows]


def _filled(names: Iterable[str]) -> str:
    return textwrap.fill(
        ", ".join(names),
        width=88,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
