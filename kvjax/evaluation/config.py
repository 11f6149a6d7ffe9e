"""What an experiment asks: methods, tasks and sizes, made from a config's fields."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.cache import budgets, codecs, offload, parts, sizing
from kvjax.cache.offload import Offload
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, make_spec
from kvjax.engine.memory import device_memory
from kvjax.evaluation import tasks
from kvjax.evaluation.tasks import base, data, text
from kvjax.types import ModelSpec, UserError

Fields = Mapping[str, Any]
Pairs = tuple[tuple[str, Any], ...]  # of such, which have a hash
# Fields that methods share where they do not set their own, and tasks.
OF_METHODS = ("pinned", "prefill_chunk", "evict_size", "budget", "codec")
OF_TASKS = ("num_examples", "prompt_tokens", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
      name: what tables and pictures call it.
      policy: a name of `kvjax.policies.names()`, or `module:function` of one's own;
        None for the full cache.
      options: the policy's parameters.
      pinned: how many of the first and of the newest pairs stay whatever the policy
        says, see `kvjax.policies.protect`; None is the policy's own.
      phases, prefill_chunk, evict_size, first_chunk: the `Schedule`.
      budget: |kv|, one int, or for every layer one or one per head; or a share of the
        run's longest prompt, as "25%", of which heads keep what they need where that
        is known (see `make_spec`); None for the full cache.
      budget_share: the share of a prompt that a budget in pairs stands for, such as
        0.5, where tasks of other lengths have other budgets; for reports alone.
      budget_rule: shares out the budget between layers: a name, or `module:function`;
        in a config also a dict of `name` and the rule's parameters.
      rule_options: the budget rule's parameters.
      codec: how pairs are stored: a name, or `module:function`; in a config also a dict
        of `name` and the codec's parameters.
      codec_options: the codec's parameters.
      offload: which values lie in host memory, fields of `kvjax.Offload`; in a config a
        dict of them, or `top_n` alone. None for none.
      rope_positions, eviction: where a key stands for its rotary angle, and how a
        layer makes room, see `CacheSpec`; an eviction of None is the default.
      implementation: which attention runs, see `CacheSpec`.
      series: what the methods have in common that differ only in budget and schedule,
        and in throughput in the batch: the name of their row in a sweep's tables and
        of their mark in pictures; None is the name.
      batch_rule: how its batch is found, one of `batch_rules.BATCH_RULES`; of
        throughput alone.
      batch_size: prompts at a time, where the batch rule is `fixed`.
    """

    name: str
    policy: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    pinned: tuple[int, int] | None = None
    phases: str = "prefill_and_decode"
    prefill_chunk: int | None = None
    evict_size: int | None = None
    first_chunk: str = "remainder"
    budget: int | str | tuple[parts.Sizes, ...] | None = None
    budget_share: float | None = None
    budget_rule: str | None = None
    rule_options: tuple[tuple[str, Any], ...] = ()
    codec: str = "identity"
    codec_options: tuple[tuple[str, Any], ...] = ()
    offload: tuple[tuple[str, Any], ...] | int | None = None
    rope_positions: str = "original"
    eviction: str | None = None
    implementation: str | None = None
    series: str | None = None
    batch_rule: str | None = None
    batch_size: int | None = None

    def cache_config(self, spec: ModelSpec, length: int | None = None) -> CacheSpec:
        """What is kept of prompts of `length` tokens at most.

        Raises:
          UserError: the parts do not fit each other, or the length is needed.
        """
        policy, schedule = self.check()
        return make_spec(
            spec,
            policy,
            self.budget,
            schedule,
            budget_rule=self.made_rule(),
            length=length,
            codec=self.made_codec(),
            offload=self.made_offload(),
            rope_positions=self.rope_positions,
            implementation=self.implementation,
            **({"eviction": self.eviction} if self.eviction else {}),
        )

    def check(self) -> tuple[policies.Policy | None, Schedule]:
        """Policy and schedule, or a UserError for what is wrong in any model."""
        self.made_codec()
        self.made_offload()
        rule = self.made_rule() or budgets.uniform()
        if self.policy is None:
            return None, Schedule("none", self.prefill_chunk, self.evict_size)
        sizes = self.prefill_chunk, self.evict_size, self.first_chunk
        schedule = Schedule(self.phases, *sizes)
        policy = self._policy()
        if isinstance(self.budget, str):  # sizes follow from the prompts
            sizing.share(self.budget)
            return policy, schedule
        sizes = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        for size in budgets.possible(rule, sizes) if sizes != (None,) else ():
            sizing.check_budget(size, policy, schedule)
        return policy, schedule

    def _policy(self) -> policies.Policy:
        is_text(f"method {self.name!r}: policy", self.policy)
        policy = policies.make(self.policy, **dict(self.options))
        if self.pinned is None:
            return policy
        if np.shape(self.pinned) != (2,):
            raise UserError(
                f"pinned is {self.pinned!r:.80}: give two numbers, of first and newest "
                "pairs, such as (4, 16)"
            )
        return policies.protect(policy, *self.pinned)

    def made_rule(self) -> budgets.BudgetRule | None:
        """The budget rule; None where none is named.

        Raises:
          UserError: an unknown name, or options that it does not take.
        """
        if not self.budget_rule:
            return None
        return budgets.make(self.budget_rule, **dict(self.rule_options))

    def made_codec(self) -> codecs.Codec:
        """How pairs are stored.

        Raises:
          UserError: an unknown name, or options that it does not take.
        """
        return _made_codec(self.codec, self.codec_options)

    def made_offload(self) -> Offload | None:
        """Which values lie in host memory.

        Raises:
          UserError: fields that are unknown or out of range.
        """
        given = self.offload
        return offload.make(dict(given) if isinstance(given, tuple) else given)

    @property
    def share(self) -> float | None:
        """The share of a prompt that the budget is; None where it is none."""
        text = isinstance(self.budget, str)
        return sizing.share(self.budget) if text else self.budget_share

    @property
    def rule(self) -> str | None:
        """The budget rule as reports name it: `squeeze(p=0.3)`."""
        return _called(self.budget_rule, self.rule_options)

    @property
    def stored(self) -> str:
        """The codec as reports name it: `int4(group=16)`."""
        return _called(self.codec, self.codec_options)


def _called(name: str | None, options: Pairs) -> str | None:
    """A name, and parameters if there are any."""
    told = lambda value: _called(*_aside(value)) if _is_named(value) else value
    every = ", ".join(f"{key}={told(value)}" for key, value in options)
    return f"{name}({every})" if every else name


def _made_codec(name: str, options: Pairs) -> codecs.Codec:
    """A codec whose parameters may be codecs with parameters."""
    made = lambda value: _made_codec(*_aside(value)) if _is_named(value) else value
    return codecs.make(name, **{key: made(value) for key, value in options})


def _is_named(value: Any) -> bool:
    """Whether pairs stand for something that has a name and parameters."""
    pairs = isinstance(value, tuple) and all(isinstance(x, tuple) for x in value)
    return pairs and "name" in dict(value)


def _aside(pairs: Pairs) -> tuple[str, Pairs]:
    """The name among pairs, and the others."""
    return dict(pairs)["name"], tuple(pair for pair in pairs if pair[0] != "name")


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
        self._tell_apart([method.check()[1] for method in self.methods])

    def _tell_apart(self, schedules: Sequence[Schedule]) -> None:
        """Raises UserError for methods that reports would take for one."""
        seen: dict[tuple, Method] = {}
        for method, schedule in zip(self.methods, schedules, strict=True):
            place = self._place(method, schedule)
            if (first := seen.setdefault(place, method)) is not method:
                raise UserError(
                    f"methods {first.name!r} and {method.name!r} share series "
                    f"{place[0]!r}, schedule, budget, its rule and codec, so reports "
                    "would take them for one: give each a series of its own"
                )

    def _place(self, method: Method, schedule: Schedule) -> tuple:
        """What reports know a method by."""
        series = method.series or method.name
        return series, schedule.phases, method.budget, method.rule, method.stored


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
    """A method from its fields and those that it shares with others.

    The full cache is read in the same chunks; budget, eviction and codec are none of
    its.
    """
    if not as_dict(fields, "method").get("policy"):
        shared = {key: value for key, value in shared.items() if key == "prefill_chunk"}
    what = f"method {fields.get('name')!r}"
    fields = _with_options_aside({**shared, **fields}, what)
    return with_options(Method, fields, what)


_NAMED = {"budget_rule": "rule_options", "codec": "codec_options"}


def _with_options_aside(fields: Fields, what: str) -> Fields:
    """The fields with the parameters of a budget rule and a codec aside from its name.

    A dict of them stands for both, as in `{"name": "squeeze", "p": 0.3}`; one of an
    offload becomes pairs.
    """
    for field, aside in _NAMED.items():
        if isinstance(given := fields.get(field), Mapping):
            options = dict(given)
            if not isinstance(name := options.pop("name", None), str):
                raise UserError(f"{what}: {field} {given} has no name: give one")
            fields = {**fields, field: name, aside: _as_pairs(options)}
    if isinstance(given := fields.get("offload"), Mapping):
        fields = {**fields, "offload": _as_pairs(given)}
    return fields


def task(fields: Fields, shared: Fields) -> TaskRun:
    """A task from its fields and those that it shares with others."""
    fields = {**shared, **as_dict(fields, "task")}
    return with_options(TaskRun, fields, f"task {fields.get('name')!r}")


def with_options(cls, fields: Fields, what: str):
    """`build` for a class with `options`: a dict in a config, sorted pairs here."""
    options = as_dict(fields.get("options", {}), f"{what}: options")
    return build(cls, {**fields, "options": _as_pairs(options)}, what)


def _as_pairs(options: Fields) -> tuple[tuple[str, Any], ...]:
    """Sorted pairs, lists and dicts among the values made tuples: these have a hash."""
    plain = lambda value: tuple(value) if isinstance(value, list) else value
    return tuple(
        (key, _as_pairs(value) if isinstance(value, Mapping) else plain(value))
        for key, value in sorted(options.items())
    )


def build(cls, fields: Fields, what: str):
    """A dataclass from a dict, its lists made tuples and its fields checked."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(as_dict(fields, what)) - known)
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
