"""Groups of comparable records: of one run, of a sweep, or of several runs.

Quality is compared among records of one model on one device; throughput, among records
that also share the memory limit and the prompts. Tasks of one name are distinct if the
length or number of prompts, the length of answers or the seed differ. Scores of
throughput records are of the timed answers, and are shown beside the rates.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvjax.evaluation.report.records import PROBES, Record, Source
from kvjax.types import UserError

ROW = ["series", "schedule", "budget", "codec"]  # identify a method
_TASK_KEYS = {  # tell tasks of one name apart, and how column names show them
    "prompt_tokens": "{:,.0f}",
    "new_tokens": "{:.0f} new",
    "num_examples": "{:.0f} prompts",
    "seed": "seed {:.0f}",
}
_MOST_DRIFT = 0.1  # of a probe: rates beyond it are not compared
_NEEDLES = {"needle", "passkey"}  # tasks scored by the share of pass keys found


# --- one record -----------------------------------------------------------------------


def text(value: Any) -> str:
    return "-" if value is None else str(value)


def finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def series(record: Record) -> str:
    return text(record.get("series") or record.get("method"))


def codec(record: Record) -> str:
    return record.get("codec", "identity")


def schedule(record: Record) -> str:
    """Returns the schedule, and the budget rule unless it is uniform."""
    rule = record.get("budget_rule") or "uniform"
    phases = text(record.get("schedule"))
    return phases if rule == "uniform" else f"{phases}, {rule}"


def joined(*names: str) -> str:
    """Joins names, leaving out the identity codec."""
    return ", ".join(name for name in names if name != "identity")


def setting(record: Record) -> str:
    """Returns schedule, budget rule and codec."""
    return joined(schedule(record), codec(record))


def slots(record: Record) -> str:
    """Returns the budget in slots: a number, or the range over heads and the mean."""
    budget = record.get("budget", ...)
    if budget is ...:
        return "-"
    if budget is None:
        return "all"
    if isinstance(budget, int | np.integer):
        return f"{budget:,}"
    least, most = min(map(np.min, budget)), max(map(np.max, budget))
    if least == most:
        return f"{most:,}"
    return f"{least:,}-{most:,} (mean {mean_slots(record):,.0f})"


def budget(record: Record) -> str:
    """Returns the budget as a share of the prompt if it was given so, else `slots`."""
    share = record.get("budget_share")
    return slots(record) if share is None else f"{100 * share:.4g}%"


def spread(record: Record) -> str:
    """Returns `slots` as the budget rule allocated them."""
    sizes = record.get("sizes")
    return slots(record | {"budget": sizes} if sizes else record)


def mean_slots(record: Record) -> float:
    """Returns slots per head, the mean over layers and their heads."""
    budget = record.get("budget") or 0
    layers = budget if isinstance(budget, list | tuple) else [budget]
    return float(np.mean([np.mean(layer) for layer in layers]))


def is_full(record: Record) -> bool:
    """Returns whether all pairs are kept unencoded and attention reads them all."""
    whole = record.get("budget", ...) is None and codec(record) == "identity"
    return whole and not record.get("offload")


def only_task(record: Record) -> Record:
    """Returns the record's task; nothing of several, whose mean has no interval."""
    tasks = list((record.get("tasks") or {}).values())
    return tasks[0] if len(tasks) == 1 else {}


def full_cache(records: Iterable[Record]) -> Record:
    """Returns the record of the full cache, or an empty one."""
    return next(filter(is_full, records), {})


def with_same_new(record: Record, records: Iterable[Record]) -> list[Record]:
    """Returns the records with the same number of new tokens, which are comparable."""
    return [r for r in records if r.get("new_tokens") == record.get("new_tokens")]


def differs(record: Record, base: Record) -> bool:
    """Returns whether the machine's speed differed by more than a tenth from `base`'s.

    The probes beside both records tell; without a probe the answer is no.
    """
    ratios = [ratio(record, base, key) for key in PROBES]
    return any(each is not None and abs(each - 1) > _MOST_DRIFT for each in ratios)


def speedup(record: Record, base: Record) -> float | None:
    """Returns the end-to-end rate over `base`'s, unless the machine `differs`."""
    return None if differs(record, base) else ratio(record, base, "output_tokens_per_s")


def ratio(record: Record, base: Record, key: str) -> float | None:
    value, whole = finite(record.get(key)), finite(base.get(key))
    return None if value is None or not whole else value / whole


# --- the records of one run -----------------------------------------------------------


class Score(NamedTuple):
    """The names of records' `score`.

    They are the `column` of a table, the `title` and the `axis` of a picture, and its
    `meaning`, a clause for "How to read it".
    """

    column: str
    title: str
    axis: str
    meaning: str


def score_of(records: Iterable[Record]) -> Score:
    """Returns the names of needle accuracy, one task's metric, or a mean of several."""
    metrics = metrics_of(records)
    if metrics.keys() <= _NEEDLES:
        found = "the share of prompts whose hidden pass key was found"
        return Score("Needle", "Needle accuracy", "accuracy (share of prompts)", found)
    named = [f"{name} ({metric})" for name, metric in metrics.items()]
    if len(named) == 1:
        return Score("Score", named[0], f"{named[0]}, mean over prompts", named[0])
    meaning = f"the mean over tasks: {', '.join(named)}"
    return Score("Score", f"Mean of {len(named)} tasks", "score", meaning)


def metrics_of(records: Iterable[Record]) -> dict[str, str]:
    """Returns the headline metric of each task."""
    tasks = [task for r in records for task in (r.get("tasks") or {}).items()]
    return {name: task["metric"] for name, task in tasks}


def names_of(records: Sequence[Record]) -> list[str]:
    """Returns a unique name per record: the method, and what distinguishes it."""

    def traits(record):
        new = record.get("new_tokens")
        new = "-" if new is None else f"{new} new"
        policy = text(record.get("policy"))
        return policy, schedule(record), slots(record), codec(record), new

    methods = [text(record.get("method")) for record in records]
    found = zip(methods, distinctions(methods, list(map(traits, records))), strict=True)
    names = [f"{name} ({', '.join(rest)})" if rest else name for name, rest in found]
    twins = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{n} #{i + 1}" if i else n for n, i in zip(names, twins, strict=True)]


def distinctions(
    names: Sequence[str], traits: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Returns those traits of each row that vary between rows of its name."""
    frame = pd.DataFrame(traits, index=list(names))
    varied = frame.groupby(level=0).nunique() > 1
    rows = zip(names, frame.to_numpy(), strict=True)
    return [list(values[varied.loc[name].to_numpy()]) for name, values in rows]


def is_throughput(records: Sequence[Record]) -> bool:
    """Returns whether all records are of the throughput protocol."""
    return {record.get("experiment") for record in records} == {"throughput"}


def of_batch_rule(record: Record, records: Sequence[Record], rule: str) -> Record:
    """Returns the baseline whose `batch_rule` is "ed" or "full".

    It is the first with the same number of new tokens, or an empty record.
    """
    known = with_same_new(record, records)
    return next((r for r in known if r.get("batch_rule") == rule), {})


def times(record: Record, records: Sequence[Record], rule: str) -> float | None:
    """Returns the `speedup` of a record over the baseline `of_batch_rule`."""
    return speedup(record, of_batch_rule(record, records, rule))


def is_sweep(records: Sequence[Record]) -> bool:
    """Returns whether two series or more have several budgets or schedules."""
    found = pd.DataFrame([[series(r), setting(r), slots(r)] for r in records])
    return (found.drop_duplicates().groupby(0).size() > 1).sum() > 1


def sweep(records: Sequence[Record]) -> pd.DataFrame:
    """Returns a sweep as a frame: a row per record, without the full cache.

    Its columns are `record`, `series`, `setting`, `slots`, `score`, `kl` and `decode`
    (bytes of KV cache per prompt while decoding). Rows are sorted by setting, then by
    rising budget, then from the best: the highest score, then the smallest KL.
    """
    known = [r for r in records if r.get("budget") is not None]
    order = list(dict.fromkeys(map(setting, known)))
    keys = {"score": "score", "kl": "kl", "decode": "kv_bytes_decode"}
    frame = pd.DataFrame(
        {
            "record": known,
            "series": [series(r) for r in known],
            "setting": [setting(r) for r in known],
            "slots": [slots(r) for r in known],
            "size": [mean_slots(r) for r in known],
            **{k: [r.get(key) for r in known] for k, key in keys.items()},
        }
    ).astype(dict.fromkeys(keys, float))
    frame["place"] = frame["setting"].map(order.index)
    by = {"place": True, "size": True, "score": False, "kl": True}
    return frame.sort_values(list(by), ascending=list(by.values()), kind="stable")


# --- several runs ---------------------------------------------------------------------


class Quality:
    """Quality records of one model on one device.

    Attributes:
      model, device: of all records.
      sources: the files of the records.
      answers: a frame with a row per method and task: the method (`ROW`), the `column`
        of its score, `source` and `record`, the task's own fields as `task`, `score`,
        `prompt_tokens`, `slots`, and KV bytes per prompt as `decode` (while decoding)
        and `peak`.
      columns: each task's unique name in tables.
      rows: an index of methods: the full cache first, then falling budgets. A method
        need not have run every task.
    """

    def __init__(self, model: str, device: str, members: list[tuple[Source, Record]]):
        self.model, self.device = model, device
        self.sources = list({s.path: s for s, _ in members}.values())
        self.answers = _answers(members)
        self.columns = list(self.answers["column"].unique())
        size = self.answers.groupby("budget")["size"].mean()
        found = self.answers.drop_duplicates(ROW)
        found = found.sort_values("budget", key=lambda b: -b.map(size), kind="stable")
        self.rows = pd.MultiIndex.from_frame(found[ROW])
        full = found[[is_full(record) for record in found["record"]]]
        self.full: tuple | None = next(iter(full[ROW].itertuples(index=False)), None)

    def pivot(self, values: str) -> pd.DataFrame:
        """Returns one field of the answers, methods by tasks; NaN where unknown."""
        frame = self.answers.set_index([*ROW, "column"])[values].unstack("column")
        return frame.reindex(index=self.rows, columns=self.columns)

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """The tasks' headline metrics, 0 to 1, methods by tasks."""
        return self.pivot("score")

    def of_full(self, values: pd.DataFrame) -> pd.Series:
        """Returns the full cache's row; NaN if there is none."""
        return values.loc[self.full] if self.full else values.iloc[0] * np.nan

    @functools.cached_property
    def differences(self) -> pd.DataFrame:
        """The `mean` difference to the full cache's scores over `count` tasks.

        `rank` is the rank among methods of the same budget that ran all tasks, NaN for
        others. Methods that tables show as equal share their rank.
        """
        delta = self.scores - self.of_full(self.scores)
        frame = pd.DataFrame({"mean": delta.mean(axis=1), "count": delta.count(axis=1)})
        ranked = frame["mean"].where(frame["count"] == len(self.columns)).round(3)
        if self.full:
            ranked[self.full] = np.nan
        of_budget = ranked.groupby("budget")
        frame["rank"] = of_budget.rank(method="min", ascending=False)
        frame["best"] = (frame["rank"] == 1) & (of_budget.transform("nunique") > 1)
        return frame

    @functools.cached_property
    def best(self) -> pd.DataFrame:
        """Marks the best method of each budget, unless tables show all as equal."""
        shown = self.scores.round(3)
        of_budget = shown.groupby("budget")
        return (shown == of_budget.transform("max")) & (
            of_budget.transform("nunique") > 1
        )


def quality_groups(sources: Iterable[Source]) -> list[Quality]:
    """Groups quality records by model and device.

    Raises:
      UserError: two files have the same method's answers to the same task.
    """

    def key(source, record):
        return text(record.get("model")), text(record.get("device"))

    groups = _grouped(sources, lambda r: r["experiment"] != "throughput", key)
    return [Quality(*key, members) for key, members in groups.items()]


def _grouped(
    sources: Iterable[Source],
    include: Callable[[Record], bool],
    key: Callable[[Source, Record], tuple],
) -> dict[tuple, list[tuple[Source, Record]]]:
    groups: dict[tuple, list[tuple[Source, Record]]] = {}
    for source in sources:
        for record in filter(include, source.records):
            groups.setdefault(key(source, record), []).append((source, record))
    return groups


def _answers(members: list[tuple[Source, Record]]) -> pd.DataFrame:
    """Returns the frame of `Quality`.

    Of several runs' full caches with the same results, the first is kept.

    Raises:
      UserError: two files have the same method's answers to the same task.
    """
    frame = pd.DataFrame(
        _answer(source, record, name, task)
        for source, record in members
        for name, task in _tasks(record).items()
    )
    numbers = [*_TASK_KEYS, "score", "decode", "peak"]
    frame[numbers] = frame[numbers].astype(float).replace([np.inf, -np.inf], np.nan)
    frame["column"] = _columns(frame)
    # Methods of one run may differ in nothing but their names.
    methods = frame.groupby(["path", *ROW])["method"].transform("nunique")
    frame["series"] = frame["series"].where(methods == 1, frame["method"])
    place = [*ROW, "column"]
    baseline = frame["record"].map(is_full)  # runs of the same prompts share it
    frame = frame[~(baseline & frame.duplicated([*place, "score", "decode", "peak"]))]
    for _, twin in frame[frame.duplicated(place)].iterrows():
        first = frame[(frame[place] == twin[place]).all(axis=1)].iloc[0]
        raise UserError(
            f"{twin['method']} on {twin['name']} is in both {first['path']} and "
            f"{twin['path']}: name one of them"
        )
    return frame


def _answer(source: Source, record: Record, name: str, task: Record) -> dict[str, Any]:
    return {
        "series": series(record),
        "schedule": schedule(record),
        "budget": budget(record),
        "codec": codec(record),
        "size": np.inf if slots(record) == "all" else mean_slots(record),
        "slots": slots(record),
        "name": name,
        "prompt_tokens": task.get("most_prompt_tokens", record.get("prompt_tokens")),
        "new_tokens": task.get("max_new_tokens", record.get("max_new_tokens")),
        "num_examples": task.get("num_examples"),
        "seed": record.get("seed"),
        "score": task["score"],
        "decode": record.get("kv_bytes_decode"),
        "peak": record.get("kv_bytes_peak_per_seq"),
        "method": record["method"],
        "path": source.path,
        "source": source,
        "record": record,
        "task": task,
    }


def _tasks(record: Record) -> dict[str, Record]:
    """Returns a record's tasks; without any, its score is of pass keys in prose."""
    bare = {"metric": "accuracy", "score": record.get("score")}
    return record.get("tasks") or {
        "needle": bare | {"num_examples": record.get("num_examples")}
    }


def _columns(answers: pd.DataFrame) -> list[str]:
    """Returns each answer's task, and what distinguishes tasks of that name."""
    varied = answers.groupby("name")[list(_TASK_KEYS)].nunique(dropna=False) > 1

    def column(row):
        parts = [
            form.format(row[key])
            for key, form in _TASK_KEYS.items()
            if varied.loc[row["name"], key] and pd.notna(row[key])
        ]
        return " ".join([row["name"], ", ".join(parts)]).strip()

    return [column(row) for row in answers.to_dict("records")]


class Throughput(NamedTuple):
    """Throughput records that share model, device, memory limit and prompts.

    `tasks` names the tasks of the prompts; it is empty where records do not say.
    """

    model: str
    device: str
    memory_bytes: int | None
    prompt_tokens: int | None
    tasks: tuple[str, ...]
    sources: list[Source]
    records: list[Record]


def throughput_groups(sources: Iterable[Source]) -> list[Throughput]:
    """Groups throughput records, in the order of sources and records.

    Where a file also has records of other engines, these take kvjax's model and device:
    the same weights and machine under other names.

    Raises:
      UserError: two files have the same method's throughput.
    """

    def is_ours(record):
        return record.get("engine", "kvjax") == "kvjax"

    def key(source, record):
        ours = [r for r in source.records if is_ours(r)]
        named = record if is_ours(record) or not ours else ours[0]
        return (
            text(named.get("model")),
            text(named.get("device")),
            record.get("memory_bytes"),
            record.get("prompt_tokens"),
            tuple(named.get("tasks") or ()),
        )

    groups = _grouped(sources, lambda r: r["experiment"] == "throughput", key)
    return [_throughput(key, members) for key, members in groups.items()]


def _throughput(shared: tuple, members: list[tuple[Source, Record]]) -> Throughput:
    first: dict[tuple, Source] = {}
    for source, record in members:
        key = method, new = record["method"], record.get("new_tokens")
        if key in first:
            raise UserError(
                f"{method} with {new} new tokens is in both {first[key].path} and "
                f"{source.path}: name one of them"
            )
        first[key] = source
    sources = list({s.path: s for s, _ in members}.values())
    return Throughput(*shared, sources, [record for _, record in members])
