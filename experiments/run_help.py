"""What `run.py --help` tells beyond its flags: configs, fields, policies, tasks."""

import ast
import pathlib
import runpy
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax import policies
from kvjax.evaluation import tasks

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DEFAULT = str(CONFIGS / "quickstart.py")
_OVERRIDES = """\
Override any of them, each with a value of its type; a tuple is given whole. A field
that the config lacks, or has as None, wants a config of your own, which may begin with
another's (README). The budget that methods share may also be a share of the run's
longest prompt, where the config has it as a FieldReference(512, field_type=object).
Quote what the shell would read:

  --config.budget=256 --config.fidelity.num_windows=2
  --config.budget=25%                           heads keep what they need of it
  '--config.methods[4].policy=h2o'              a field of one method, counted from 0
  '--config.tasks[0].options.depths=(0.1,0.9)'  a tuple
  '--config.methods=({"name": "Full cache"}, {"name": "H2O", "policy": "h2o"})'"""


def text(config: str | None) -> str:
    """The pages, with the fields of the config FILE[:ARGUMENT], or the quickstart's."""
    shown = config or DEFAULT
    told = [f"  {name}  {words}" for name, words in _columns(_configs())]
    fields = [f"  --config.{name}  {what}" for name, what in _columns(_fields(shown))]
    return "\n".join(
        [
            "Configs, each with fields of its own (--config=FILE --help lists them):",
            *told,
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


def _configs() -> Iterator[tuple[str, str]]:
    for path in sorted(CONFIGS.rglob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield _name(str(path)), words.partition("\n")[0]


def _name(path: str) -> str:
    """Below the folder of configs, as one types it in the root folder."""
    return path.replace(f"{CONFIGS.parent}/", "")


def _fields(config: str) -> Iterator[tuple[str, str]]:
    path, _, argument = config.partition(":")
    make = runpy.run_path(path)["get_config"]
    return _leaves("", make(*filter(None, [argument])).to_dict())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every field that has a value of its own, with its type and value."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, each)
    elif isinstance(value, tuple) and any(isinstance(v, Mapping) for v in value):
        for index, each in enumerate(value):
            yield from _leaves(f"{name}[{index}]", each)
    elif value is not None:
        yield f"{name}={value!r}", type(value).__name__


def _columns(pairs: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    found = list(pairs)
    width = min(60, max(len(name) for name, _ in found))
    return [(name.ljust(width), words) for name, words in found]


def _filled(names: Any) -> str:
    return textwrap.fill(
        ", ".join(names),
        width=88,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
