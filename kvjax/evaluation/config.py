"""Builds the methods and tasks of an experiment from the fields of a config."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax import types
from kvjax.cache import sizing
from kvjax.cache.config import CacheConfig
from kvjax.cache.schedule import Schedule
from kvjax.engine.memory import device_memory
from kvjax.evaluation import tasks
from kvjax.evaluation.tasks import base, data, text
from kvjax.messages import warn
from kvjax.registry import Named, option_pairs
from kvjax.types import UserError

Fields = Mapping[str, Any]
# Fields of a config that are defaults for its methods, and for its tasks.
OF_METHODS = ("pinned", "prefill_chunk", "evict_size", "budget", "codec")
_OF_SCHEDULE = ("prefill_chunk", "evict_size", "first_chunk")
OF_TASKS = ("num_examples", "prompt_tokens", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of an experiment: a named cache configuration and its batch rule.

    Attributes:
      name: its name in tables and figures.
      cache: the configuration of the KV cache. Its policy must be a name, so that
        records can hold it; None is the full cache.
      budget_share: the share of a prompt that a budget in pairs stands for, such as
        0.5, if budgets differ between tasks of different lengths; used by reports only.
      series: groups methods that differ only in budget, schedule and (in throughput)
        batch: one row of a sweep's table, one marker in figures. None is the name.
      batch_rule: chooses the batch, one of `batch_rules.BATCH_RULES`; throughput only.
      batch_size: number of prompts per batch, under the batch rule `fixed`.
    """

    name: str
    cache: CacheConfig
    budget_share: float | None = None
    series: str | None = None
    batch_rule: str | None = None
    batch_size: int | None = None

    def check(self) -> None:
        """Checks the method as far as possible without a model.

        Raises:
          UserError: see `CacheConfig.check`; or the policy is not a name.
        """
        policy = self.cache.policy
        if policy is not None and not isinstance(policy, Named):
            raise UserError(f"method {self.name!r}: policy {policy!r:.80}: give a text")
        self.cache.check()

    @property
    def policy(self) -> str | None:
        """Returns the policy's name; None for the full cache."""
        return self.cache.policy and self.cache.policy.name

    @property
    def schedule(self) -> Schedule:
        """Returns the schedule, or the default one."""
        if self.cache.policy is None:
            return self.cache.schedule or Schedule("none")
        return self.cache.schedule or Schedule()

    @property
    def budget(self) -> Any:
        """Returns KV pairs per head, or a share; None for the full cache."""
        return self.cache.budget if self.cache.policy else None

    @property
    def share(self) -> float | None:
        """Returns the budget as a share of a prompt; None if it is not one."""
        budget = self.budget
        return sizing.share(budget) if isinstance(budget, str) else self.budget_share

    @property
    def rule(self) -> str | None:
        """Returns the budget rule as reports write it: `squeeze(p=0.3)`."""
        return self.cache.budget_rule and str(self.cache.budget_rule)

    @property
    def stored(self) -> str:
        """Returns the codec as reports write it: `int4(group=16)`."""
        return str(self.cache.codec)


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """The settings of one task in an experiment.

    Attributes:
      name: one of `kvjax.evaluation.tasks.names()`, or `module:function` for a task of
        the user's.
      num_examples: number of examples.
      prompt_tokens: maximal tokens of a prompt. Longer prompts are cut in the middle;
        tasks that generate prompts of any length generate this length. None is the
        task's default length, or else the model's context.
      max_new_tokens: maximal tokens of an answer; None is the task's default.
      options: of the task: `shots`, `depths`.
      ignore_eos: whether generation continues to `max_new_tokens` past end tokens and
        stop texts, so that rates of methods with answers of different lengths can be
        compared. Answers are still graded only up to their end.
    """

    name: str
    num_examples: int
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """The fields that quality and throughput experiments share.

    Attributes:
      experiment: "quality" or "throughput".
      model, dtype, mesh: of `kvjax.load`.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      seed: seeds all random draws.
      haystack: a folder of texts for tasks that need prose; None is the built-in text.
      data_dir: a folder of data sets.
      methods: the methods to compare.
      tasks: the tasks to compare them on.
    """

    experiment: str
    model: str
    dtype: str
    memory_gb: float | None
    seed: int
    haystack: str | None
    methods: tuple[Method, ...]
    tasks: tuple[TaskRun, ...]
    data_dir: str | None = None
    mesh: str | None = None

    @property
    @abc.abstractmethod
    def units_per_method(self) -> int:
        """Returns the units of work per method, for progress reports."""

    def check(self) -> None:
        """Raises UserError for errors that can be found before a model is loaded."""
        for what in ("methods", "tasks"):
            names = [str(each.name) for each in getattr(self, what)]
            if not names or len(set(names)) < len(names):
                raise UserError(f"{what} {names}: give one or more, of different names")
        for task in self.tasks:
            is_text("task name", task.name)
            base.check_options(tasks.get(task.name), dict(task.options))
            sizes = {field: getattr(task, field) for field in OF_TASKS}
            own = {field: size for field, size in sizes.items() if size is not None}
            at_least(1, **{"num_examples": task.num_examples} | own)
        at_least(0, seed=self.seed)
        device_memory(self.memory_gb)
        for field in ("haystack", "data_dir"):
            if getattr(self, field):
                is_text(field, getattr(self, field))
        if self.data_dir:
            data.folder(self.data_dir)
        if self.haystack:
            text.existing(self.haystack)
        for method in self.methods:
            method.check()
        self._check_distinct()

    def _check_distinct(self) -> None:
        """Raises UserError for two methods that reports could not tell apart."""
        by_place: dict[tuple, Method] = {}
        for method in self.methods:
            place = self._place(method)
            if (first := by_place.setdefault(place, method)) is not method:
                raise UserError(
                    f"methods {first.name!r} and {method.name!r} share series "
                    f"{place[0]!r}, schedule, budget, budget rule and codec, so "
                    "reports cannot tell them apart: give each a series of its own"
                )

    def _place(self, method: Method) -> tuple:
        """Returns the fields by which reports distinguish methods of one series."""
        series, phases = method.series or method.name, method.schedule.phases
        return series, phases, method.budget, method.rule, method.stored


def is_text(what: str, value: Any) -> None:
    """Raises UserError if the value is not a text."""
    if not isinstance(value, str):
        raise UserError(f"{what} {value!r:.80}: give a text")


def at_least(least: int, **numbers: Any) -> None:
    """Raises UserError for the first value that is not an integer >= `least`."""
    for field, value in numbers.items():
        if not (isinstance(value, int) and value >= least):
            more = "0 or more" if least == 0 else f"at least {least}"
            raise UserError(f"{field} {value}: {more}")


def flattened(config: Fields, overrides: Fields) -> dict[str, Any]:
    """Returns the fields of a config after its quick fields and the overrides.

    If `quick` is true, the fields in `quick_fields` replace those of the same name; a
    dict is merged into the dict of the same name. A `memory_gb` of 0 means the device's
    limit, and an empty `haystack`, `data_dir` or `mesh` means None. Overrides that are
    None change nothing.
    """
    fields = dict(config)
    quick_fields = as_dict(fields.pop("quick_fields", {}), "quick_fields")
    if fields.pop("quick", False):
        for key, value in quick_fields.items():
            merges = isinstance(value, Mapping) and key in fields
            fields[key] = dict(fields[key]) | dict(value) if merges else value
    fields |= {key: v for key, v in overrides.items() if v is not None}
    for name in ("haystack", "data_dir", "mesh"):
        if name in fields:
            fields[name] = fields[name] or None
    if fields.get("memory_gb") == 0 and overrides.get("memory_gb") is None:
        fields["memory_gb"] = None
    return fields


def taken(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Removes the fields of these names from `fields`, and returns them."""
    return {name: fields.pop(name) for name in names if name in fields}


def _each(fields: Fields, what: str) -> Sequence[Any]:
    """Returns the `methods` or `tasks` of a config."""
    found = fields.get(what, ())
    if not isinstance(found, list | tuple):
        raise UserError(f"{what} {found!r:.80}: give a tuple, of a dict for each")
    return found


def as_dict(fields: Any, what: str) -> Fields:
    """Returns the fields; raises UserError if they are not a mapping."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{what} {fields!r:.80}: give a dict of its fields")
    return fields


def method(fields: Fields, shared: Fields) -> Method:
    """Builds a method from its fields and the defaults of the config.

    Fields of `CacheConfig` and of its `Schedule` stand beside the method's own;
    `options` are the policy's. The full cache takes only `prefill_chunk` from the
    defaults.

    Raises:
      UserError: a field is unknown, or the full cache has a budget.
    """
    own = dict(as_dict(fields, "method"))
    what = f"method {own.get('name')!r}"
    if not own.get("policy"):
        shared = taken(dict(shared), ("prefill_chunk",))
        if own.get("budget") is not None:
            raise UserError(
                f"{what}: the full cache has no budget, got budget {own['budget']}: "
                "name a policy, or leave the budget out"
            )
    own = {"budget": None, **shared, **own}
    if "phases" in own:
        warn(f"{what}: write schedule for phases", DeprecationWarning)
        own["schedule"] = own.pop("phases")
    cache = taken(own, tuple(field.name for field in dataclasses.fields(CacheConfig)))
    cache["policy"] = _policy(cache.get("policy"), own.pop("options", {}), what)
    cache["schedule"] = _schedule(cache, taken(own, _OF_SCHEDULE), what)
    try:
        own["cache"] = build(CacheConfig, cache, what)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    return build(Method, own, what)


def _policy(name: Any, options: Any, what: str) -> Any:
    """Returns `CacheConfig.policy` for a policy's name and options."""
    options = dict(as_dict(options, f"{what}: options"))
    if isinstance(name, str) and options:
        return {"name": name, **options}
    return name or None


def _schedule(cache: Fields, sizes: Fields, what: str) -> Any:
    """Returns `CacheConfig.schedule` for a schedule and the sizes beside it."""
    phases = cache.get("schedule")
    if not cache["policy"]:
        phases = "none"
    if isinstance(phases, Mapping):
        return {**sizes, **phases}
    if phases is not None and not isinstance(phases, str):
        return phases
    return ({} if phases is None else {"phases": phases}) | dict(sizes)


def task(fields: Fields, shared: Fields) -> TaskRun:
    """Builds a task's settings from its fields and the defaults of the config."""
    fields = {**shared, **as_dict(fields, "task")}
    what = f"task {fields.get('name')!r}"
    options = as_dict(fields.get("options", {}), f"{what}: options")
    return build(TaskRun, {**fields, "options": option_pairs(what, options)}, what)


def experiment(
    cls: type[Any],
    fields: Fields,
    of_methods: tuple[str, ...],
    of_tasks: tuple[str, ...],
    build_method: Callable[[Any, Fields], Method] = method,
) -> Any:
    """Builds an experiment from the fields of a config.

    Args:
      cls: a subclass of `Experiment`.
      fields: its fields, and the defaults of its methods and tasks.
      of_methods, of_tasks: names of the fields that are such defaults.
      build_method: builds a method from its fields and the defaults.

    Raises:
      UserError: a field is missing or unknown.
    """
    own = dict(fields)
    method_defaults, task_defaults = taken(own, of_methods), taken(own, of_tasks)
    methods = (build_method(each, method_defaults) for each in _each(own, "methods"))
    tasks = (task(each, task_defaults) for each in _each(own, "tasks"))
    return build(cls, own | {"methods": (*methods,), "tasks": (*tasks,)}, "config")


def build(cls: type, fields: Fields, what: str) -> Any:
    """Builds a dataclass from a config's fields; lists become tuples.

    Raises:
      UserError: the fields are not a dict, or one is unknown or missing.
    """
    fields = as_dict(fields, what)
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return types.build(cls, plain, what)
