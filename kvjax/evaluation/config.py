"""What an experiment asks: methods, tasks and sizes, made from a config's fields."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils

from kvjax import policies
from kvjax.cache import config
from kvjax.cache.config import CacheConfig, make_config
from kvjax.cache.schedule import Schedule
from kvjax.engine.planner import device_memory
from kvjax.types import ModelSpec, UserError

_OF_METHODS = ("prefill_chunk", "evict_size", "budget")  # fields that methods share
_RESULTS = ("records.jsonl", "batches.jsonl", "reference.npy")  # that runs leave
_OF_TASKS = ("examples", "prompt_tokens", "max_new_tokens")  # and tasks


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
      name: what tables and pictures call it.
      policy: a name of `kvjax.policies.names()`, None for the full cache.
      options: the policy's parameters.
      phases, prefill_chunk, evict_size: the `Schedule`; `evict_size` None is the prefill_chunk.
      budget: |kv|, one int or one per layer; None for the full cache.
      rope_positions: where a key stands for its rotary angle, see `CacheConfig`.
      implementation: which attention runs, see `CacheConfig`.
      label: what the methods have in common that differ only in budget and schedule,
        the name of their row in a sweep's tables and pictures; None is the name.
    """

    name: str
    policy: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    phases: str = "prefill_and_decode"
    prefill_chunk: int = 64
    evict_size: int | None = None
    budget: int | tuple[int, ...] | None = None
    rope_positions: str = "original"
    implementation: str | None = None
    label: str | None = None

    def compression(self, spec: ModelSpec) -> CacheConfig:
        """Raises UserError where the parts do not fit each other."""
        policy, schedule = self.check()
        return make_config(
            spec,
            policy,
            self.budget,
            schedule,
            rope_positions=self.rope_positions,
            implementation=self.implementation,
        )

    def check(self) -> tuple[policies.Policy | None, Schedule]:
        """Policy and schedule, or a UserError for what is wrong in any model."""
        evict_size = self.prefill_chunk if self.evict_size is None else self.evict_size
        if self.policy is None:
            return None, Schedule("none", self.prefill_chunk, evict_size)
        schedule = Schedule(self.phases, self.prefill_chunk, evict_size)
        policy = policies.make(self.policy, **dict(self.options))
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        for budget in set(budgets) - {None}:
            config.check_budget(budget, policy, schedule)
        return policy, schedule


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """A task, and how much of it.

    Attributes:
      name: of `kvjax.evaluation.tasks.names()`.
      examples: how many.
      prompt_tokens: most tokens of a prompt: longer ones are cut in their middle, and
        tasks that write prompts of any length write them that long. None is the task's
        own length, or else all that the model can read.
      max_new_tokens: most tokens of an answer; None is the task's own.
      options: of the task: `shots`, `depths`.
      ignore_eos: whether answers go on to `max_new_tokens` whatever ends them, without
        which rates of methods that say more and less do not compare.
    """

    name: str
    examples: int
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a run depends on; see `configs/quickstart.py` for the fields.

    With `layerwise`, prompts run as in `kvjax.engine.layerwise`: for sweeps over many methods.
    Nothing is timed then, and memory is planned from shapes, for one method at a time.
    `windows` of 0 leaves fidelity out. `mesh` is as in `kvjax.models.meshes.mesh`.
    """

    model: str
    dtype: str
    memory_gb: float | None
    seed: int
    haystack: str | None
    methods: tuple[Method, ...]
    tasks: tuple[TaskRun, ...]
    windows: int = 0
    window_prompt_tokens: int = 0
    window_continuation_tokens: int = 0
    layerwise: bool = False
    data_dir: str | None = None
    mesh: str | None = None

    @property
    def units(self) -> int:
        """Of work that progress is counted in: prompts read."""
        each = sum(task.examples for task in self.tasks) + self.windows
        return len(self.methods) * each

    def check(self) -> None:
        """Raises UserError for all that can be told wrong before a model is loaded."""
        for what in ("methods", "tasks"):
            names = [each.name for each in getattr(self, what)]
            if not names or len(set(names)) < len(names):
                raise UserError(f"{what} {names}: give one or more, of different names")
        for task in self.tasks:
            for field in ("examples", "prompt_tokens", "max_new_tokens"):
                value = getattr(task, field)
                if value is not None and value < 1:
                    raise UserError(f"{task.name}: {field} {value}: at least 1")
        for field in ("windows", "seed"):
            if getattr(self, field) < 0:
                raise UserError(f"{field} {getattr(self, field)}: 0 or more")
        if self.mesh and self.layerwise:
            raise UserError("a mesh runs whole models: set layerwise to false")
        device_memory(self.memory_gb)
        for method in self.methods:
            method.check()


def from_config(config: dict[str, Any], overrides: dict[str, Any]) -> Experiment:
    """The experiment that a config's fields describe.

    Args:
      config: fields of `Experiment`; `prefill_chunk`, `evict_size` and `budget` for the methods,
        `examples`, `prompt_tokens` and `max_new_tokens` for the tasks that do not set
        their own. A `memory_gb` of 0 is the device's limit; an empty text is None. If
        `quick` is there and true, the fields in `quick_fields` replace those of the
        same name, `methods` among them.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    given = flattened(config, overrides)
    of_methods, of_tasks = (
        {key: given.pop(key) for key in keys if key in given}
        for keys in (_OF_METHODS, _OF_TASKS)
    )
    given["methods"] = tuple(method(m, of_methods) for m in given.pop("methods", ()))
    given["tasks"] = tuple(
        with_options(TaskRun, of_tasks | dict(task), f"task {task.get('name')!r}")
        for task in given.pop("tasks", ())
    )
    return build(Experiment, given, "config")


def flattened(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A config's fields, the quick ones and the overrides in their places."""
    given = dict(config)
    quick_fields = given.pop("quick_fields", {})
    if given.pop("quick", False):
        given |= quick_fields
    given |= {key: v for key, v in overrides.items() if v is not None}
    for field in ("haystack", "data_dir", "mesh"):
        if field in given:
            given[field] = given[field] or None
    if given.get("memory_gb") == 0 and overrides.get("memory_gb") is None:
        given["memory_gb"] = None
    return given


def method(fields: dict[str, Any], shared: dict[str, Any]) -> Method:
    """A method from its fields and those that it shares with others.

    The full cache is read in the same blocks; budget and eviction are none of its.
    """
    if not fields.get("policy"):
        shared = {key: value for key, value in shared.items() if key == "prefill_chunk"}
    fields = shared | dict(fields)
    return with_options(Method, fields, f"method {fields.get('name')!r}")


def with_options(cls, fields: dict[str, Any], what: str):
    """`build` for a class with `options`: a dict in a config, sorted pairs here."""
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in fields.get("options", {}).items()
    }
    return build(cls, dict(fields) | {"options": tuple(sorted(options.items()))}, what)


def build(cls, fields: dict[str, Any], what: str):
    """A dataclass from a dict, its lists made tuples and its fields checked."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(
            f"{what} has an unknown field {unknown[0]!r}: fields are "
            + ", ".join(sorted(known))
        )
    try:
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        )
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None


def opened(experiment: Any, workdir: pathlib.Path) -> pathlib.Path:
    """The folder, if what lies in it answers the same question.

    Args:
      experiment: a dataclass: the question, kept in `experiment.json`.
      workdir: made if it is not there.

    Raises:
      UserError: it holds results of another configuration, or cannot be made.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        workdir = _own(workdir)
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}; name another") from None
    asked = json.loads(json.dumps(dataclasses.asdict(experiment)))
    path = workdir / "experiment.json"
    found = [name for name in _RESULTS if (workdir / name).exists()]
    if found and not path.exists():
        raise UserError(
            f"workdir {workdir} holds {found[0]} of a run that nothing tells about: "
            "name another folder or delete it"
        )
    if not found:
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asked, indent=2) + "\n")
        partial.replace(path)
        return workdir
    before = json.loads(path.read_text())
    changed = sorted(key for key in asked if asked[key] != before.get(key))
    if changed:
        raise UserError(
            f"workdir {workdir} holds results of another configuration ({changed[0]} "
            f"was {before.get(changed[0])!r:.80}): name another folder or delete it"
        )
    return workdir


def _own(workdir: pathlib.Path) -> pathlib.Path:
    """The folder of this process: process 0's is the workdir itself.

    Of a run on several hosts every process writes the same results. The others begin
    with what process 0 has, on a disk that all share, so that all take the same steps.
    """
    if jax.process_count() == 1:
        return workdir
    own = workdir
    if index := jax.process_index():
        own = workdir / f"process-{index}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        for path in workdir.iterdir():
            if path.is_file():
                shutil.copy(path, own)
    multihost_utils.sync_global_devices("workdir")
    return own
