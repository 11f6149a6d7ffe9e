"""Methods, tasks and sizes of an experiment, made from a config's fields."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
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
# Fields that methods share where they do not set their own, and tasks.
OF_METHODS = ("pinned", "prefill_chunk", "evict_size", "budget", "codec")
_OF_SCHEDULE = ("prefill_chunk", "evict_size", "first_chunk")
OF_TASKS = ("num_examples", "prompt_tokens", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: a cache configuration, and how it is measured and named.

    Attributes:
      name: what tables and pictures call it.
      cache: what the KV cache keeps, and how. Its policy is a name, so that a record
        can say it; None for the full cache.
      budget_share: the share of a prompt that a budget in pairs stands for, such as
        0.5, where tasks of other lengths have other budgets; for reports alone.
      series: the name of the row in a sweep's tables, and of the mark in pictures, that
        methods share which differ only in budget and schedule, and in throughput in the
        batch. None is the name.
      batch_rule: how its batch is chosen, one of `batch_rules.BATCH_RULES`; for
        throughput alone.
      batch_size: prompts at a time, where the batch rule is `fixed`.
    """

    name: str
    cache: CacheConfig
    budget_share: float | None = None
    series: str | None = None
    batch_rule: str | None = None
    batch_size: int | None = None

    def check(self) -> None:
        """Checks what can be checked without a model.

        Raises:
          UserError: see `CacheConfig.check`; a policy that is not a name.
        """
        policy = self.cache.policy
        if policy is not None and not isinstance(policy, Named):
            raise UserError(f"method {self.name!r}: policy {policy!r:.80}: give a text")
        self.cache.check()

    @property
    def policy(self) -> str | None:
        """The policy's name."""
        return self.cache.policy and self.cache.policy.name

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The policy's options."""
        return self.cache.policy.options if self.cache.policy else ()

    @property
    def schedule(self) -> Schedule:
        """When pairs are evicted, with the default in its place."""
        if self.cache.policy is None:
            return self.cache.schedule or Schedule("none")
        return self.cache.schedule or Schedule()

    @property
    def budget(self) -> Any:
        """Pairs per head, or a share; None for the full cache."""
        return self.cache.budget if self.cache.policy else None

    @property
    def share(self) -> float | None:
        """The share of a prompt that the budget is; None where it is none."""
        budget = self.budget
        return sizing.share(budget) if isinstance(budget, str) else self.budget_share

    @property
    def rule(self) -> str | None:
        """The budget rule as reports name it: `squeeze(p=0.3)`."""
        return self.cache.budget_rule and str(self.cache.budget_rule)

    @property
    def stored(self) -> str:
        """The codec as reports name it: `int4(group=16)`."""
        return str(self.cache.codec)


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """A task, and how much of it.

    Attributes:
      name: of `kvjax.evaluation.tasks.names()`, or `module:function` of one's own.
      num_examples: how many.
      prompt_tokens: most tokens of a prompt: longer ones are cut in their middle, and
        tasks that write prompts of any length write them that long. None is the task's
        own length, or else all that the model can read.
      max_new_tokens: most tokens of an answer; None is the task's own.
      options: of the task: `shots`, `depths`.
      ignore_eos: whether answers go on to `max_new_tokens` whatever ends them, an end
        token or a task's stop text, without which rates of methods that say more and
        less do not compare. Graded is what comes before that end all the same.
    """

    name: str
    num_examples: int
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """What every run depends on; `quality` and `throughput` add to it.

    Attributes:
      experiment: "quality" or "throughput".
      model, dtype, mesh: of `kvjax.load`.
      memory_gb: see `kvjax.engine.memory.device_memory`.
      seed: of all that is drawn.
      haystack: a folder of texts for tasks that need prose; None is the built-in one.
      data_dir: a folder of data sets.
      methods, tasks: what is compared, and on what.
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
        """Of work that progress is counted in."""

    def check(self) -> None:
        """Raises UserError for all that can be told wrong before a model is loaded."""
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
        self._tell_apart()

    def _tell_apart(self) -> None:
        """Raises UserError for methods that reports would take for one."""
        seen: dict[tuple, Method] = {}
        for method in self.methods:
            place = self._place(method)
            if (first := seen.setdefault(place, method)) is not method:
                raise UserError(
                    f"methods {first.name!r} and {method.name!r} share series "
                    f"{place[0]!r}, schedule, budget, its rule and codec, so reports "
                    "would take them for one: give each a series of its own"
                )

    def _place(self, method: Method) -> tuple:
        """Returns what tells methods of one series apart in reports."""
        series, phases = method.series or method.name, method.schedule.phases
        return series, phases, method.budget, method.rule, method.stored


def is_text(what: str, value: Any) -> None:
    """Raises UserError for what is none."""
    if not isinstance(value, str):
        raise UserError(f"{what} {value!r:.80}: give a text")


def at_least(least: int, **numbers: Any) -> None:
    """Raises UserError for the first that is smaller, or no number."""
    for field, value in numbers.items():
        if not (isinstance(value, int) and value >= least):
            more = "0 or more" if least == 0 else f"at least {least}"
            raise UserError(f"{field} {value}: {more}")


def flattened(config: Fields, overrides: Fields) -> dict[str, Any]:
    """A config's fields, the quick ones and the overrides in their places.

    If `quick` is there and true, the fields in `quick_fields` replace those of the same
    name; of a dict, its own fields. A `memory_gb` of 0 is the device's limit, and an
    empty text None. Overrides that are None change nothing.
    """
    given = dict(config)
    quick_fields = as_dict(given.pop("quick_fields", {}), "quick_fields")
    if given.pop("quick", False):
        for key, value in quick_fields.items():
            merges = isinstance(value, Mapping) and key in given
            given[key] = dict(given[key]) | dict(value) if merges else value
    given |= {key: v for key, v in overrides.items() if v is not None}
    for field in ("haystack", "data_dir", "mesh"):
        if field in given:
            given[field] = given[field] or None
    if given.get("memory_gb") == 0 and overrides.get("memory_gb") is None:
        given["memory_gb"] = None
    return given


def taken(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of these names, which are no longer in `fields`."""
    return {name: fields.pop(name) for name in names if name in fields}


def each_of(given: dict[str, Any], what: str, otherwise: tuple = ()) -> Sequence[Any]:
    """The `methods` or `tasks` of a config, which no longer holds them."""
    found = given.pop(what, otherwise)
    if not isinstance(found, list | tuple):
        raise UserError(f"{what} {found!r:.80}: give a tuple, of a dict for each")
    return found


def as_dict(fields: Any, what: str) -> Fields:
    """The fields, or a UserError for what has none."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{what} {fields!r:.80}: give a dict of its fields")
    return fields


def method(fields: Fields, shared: Fields) -> Method:
    """Returns a method from its fields and those that it shares with others.

    Fields of `CacheConfig` and of its `Schedule` stand beside the method's own, and
    `options` are the policy's. The full cache is read in the same chunks; the shared
    budget, eviction and codec are none of its.

    Raises:
      UserError: an unknown field, or a budget for the full cache.
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
    cache = {key: value for key, value in cache.items() if value not in ("",)}
    try:
        own["cache"] = build(CacheConfig, cache, what)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    return build(Method, own, what)


def _policy(name: Any, options: Any, what: str) -> Any:
    """Returns a policy as `CacheConfig` takes it, from its name and its options."""
    options = dict(as_dict(options, f"{what}: options"))
    if isinstance(name, str) and options:
        return {"name": name, **options}
    return name or None


def _schedule(cache: Fields, sizes: Fields, what: str) -> Any:
    """Returns a schedule as `CacheConfig` takes it, with sizes that stand beside it."""
    phases = cache.get("schedule")
    if not cache["policy"]:
        phases = "none"
    if isinstance(phases, Mapping):
        return {**sizes, **phases}
    if phases is not None and not isinstance(phases, str):
        return phases
    return ({} if phases is None else {"phases": phases}) | dict(sizes)


def task(fields: Fields, shared: Fields) -> TaskRun:
    """A task from its fields and those that it shares with others."""
    fields = {**shared, **as_dict(fields, "task")}
    what = f"task {fields.get('name')!r}"
    options = as_dict(fields.get("options", {}), f"{what}: options")
    return build(TaskRun, {**fields, "options": option_pairs(what, options)}, what)


def build(cls: type, fields: Fields, what: str) -> Any:
    """Returns a dataclass from a config's fields, their lists made tuples.

    Raises:
      UserError: no dict, or a field that is unknown or missing.
    """
    fields = as_dict(fields, what)
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return types.build(cls, plain, what)
