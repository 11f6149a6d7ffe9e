"""Records put together where they may be compared: of a run, a sweep, or several runs.

Quality is compared among records of one model on one device; throughput, among those
that also share the memory limit and the prompts. A task counts as another one if its
prompts' length or number, the answer's length or the seed differ. Scores of throughput
records are of the answers that were timed, and stand beside the rates.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvjax.evaluation.report.records import PROBES, Record, Source
from kvjax.types import UserError

ROW = ["series", "schedule", "budget", "codec"]  # a method, whatever its task
_ASKED = {  # what tells tasks of one name apart, and how names of columns say it
    "prompt_tokens": "{:,.0f}",
    "new_tokens": "{:.0f} new",
    "num_examples": "{:.0f} prompts",
    "seed": "seed {:.0f}",
}
_APART = 0.1  # of a probe: beyond it rates are not compared
_NEEDLES = {"needle", "passkey"}  # tasks whose score is the share of pass keys found


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
    """When pairs go, and by which rule layers share them if not alike."""
    rule = record.get("budget_rule") or "uniform"
    when = text(record.get("schedule"))
    return when if rule == "uniform" else f"{when}, {rule}"


def joined(*names: str) -> str:
    """Names of a method's parts, but for a codec that stores pairs as they are."""
    return ", ".join(name for name in names if name != "identity")


def setting(record: Record) -> str:
    """When pairs go, and how those that stay are stored."""
    return joined(schedule(record), codec(record))


def slots(record: Record) -> str:
    """The budget in slots: a number, or the smallest head's to the largest's."""
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
    """`slots`, or the share of a prompt that they are."""
    share = record.get("budget_share")
    return slots(record) if share is None else f"{100 * share:.4g}%"


def spread(record: Record) -> str:
    """`slots`, as the budget's rule shared them out."""
    sizes = record.get("sizes")
    return slots(record | {"budget": sizes} if sizes else record)


def mean_slots(record: Record) -> float:
    """Slots per head, as a mean over layers and their heads."""
    budget = record.get("budget") or 0
    layers = budget if isinstance(budget, list | tuple) else [budget]
    return float(np.mean([np.mean(layer) for layer in layers]))


def is_full(record: Record) -> bool:
    """Whether all pairs stay, as they are, and attention reads them all."""
    whole = record.get("budget", ...) is None and codec(record) == "identity"
    return whole and not record.get("offload")


def full_cache(records: Iterable[Record]) -> Record:
    """The record of the full cache, or an empty one."""
    return next(filter(is_full, records), {})


def as_many_new(record: Record, records: Iterable[Record]) -> list[Record]:
    """Those with as many new tokens, to which rates and bytes compare."""
    return [r for r in records if r.get("new_tokens") == record.get("new_tokens")]


def differs(record: Record, base: Record) -> bool:
    """Whether the machine was faster or slower by more than a tenth than for `base`.

    By the probes beside both; where one has none, nobody knows.
    """
    apart = [ratio(record, base, key) for key in PROBES]
    return any(each is not None and abs(each - 1) > _APART for each in apart)


def speedup(record: Record, base: Record) -> float | None:
    """End-to-end rate over that of `base`, where the machine was the same for both."""
    return None if differs(record, base) else ratio(record, base, "output_tokens_per_s")


def ratio(record: Record, base: Record, key: str) -> float | None:
    value, whole = finite(record.get(key)), finite(base.get(key))
    return None if value is None or not whole else value / whole


# --- the records of one run -----------------------------------------------------------


class Score(NamedTuple):
    """What records' `score` is called.

    That is, the `column` of a table, the `title` and the `axis` of a picture, and its
    `meaning`, a clause for "how to read it".
    """

    column: str
    title: str
    axis: str
    meaning: str


def score_of(records: Iterable[Record]) -> Score:
    """The share of needles found, one task's metric, or the mean of several."""
    metrics = metrics_of(records)
    if metrics.keys() <= _NEEDLES:
        found = "the share of prompts whose hidden pass key was found"
        return Score("Needle", "Needle accuracy", "accuracy (share of prompts)", found)
    told = [f"{name} ({metric})" for name, metric in metrics.items()]
    if len(told) == 1:
        return Score("Score", told[0], f"{told[0]}, mean over prompts", told[0])
    what = f"the mean over tasks: {', '.join(told)}"
    return Score("Score", f"Mean of {len(told)} tasks", "score", what)


def metrics_of(records: Iterable[Record]) -> dict[str, str]:
    """The headline metric of each task."""
    tasks = [task for r in records for task in (r.get("tasks") or {}).items()]
    return {name: task["metric"] for name, task in tasks}


def names_of(records: Sequence[Record]) -> list[str]:
    """A name of its own for each record: the method, and what sets it apart."""

    def parts(record):
        new = record.get("new_tokens")
        told = text(record.get("policy")), schedule(record), slots(record)
        return *told, codec(record), "-" if new is None else f"{new} new"

    methods = [text(record.get("method")) for record in records]
    frame = pd.DataFrame(map(parts, records), index=methods)
    varied = frame.groupby(level=0).nunique() > 1
    names = []
    for method, told in zip(methods, frame.to_numpy(), strict=True):
        apart = ", ".join(told[varied.loc[method].to_numpy()])
        names.append(f"{method} ({apart})" if apart else method)
    twins = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{n} #{i + 1}" if i else n for n, i in zip(names, twins, strict=True)]


def is_throughput(records: Sequence[Record]) -> bool:
    """Whether these are of the throughput protocol, which has a table of its own."""
    return {record.get("experiment") for record in records} == {"throughput"}


def of_rule(record: Record, records: Sequence[Record], rule: str) -> Record:
    """The method whose `batch_rule` is "ed" or "full", of which rates are multiples.

    That is, the first such method with as many new tokens; an empty record if none is.
    """
    known = as_many_new(record, records)
    return next((r for r in known if r.get("batch_rule") == rule), {})


def times(record: Record, records: Sequence[Record], rule: str) -> float | None:
    """The `speedup` of a record over the method `of_rule`."""
    return speedup(record, of_rule(record, records, rule))


def is_sweep(records: Sequence[Record]) -> bool:
    """Whether two series or more come with several budgets or schedules."""
    found = pd.DataFrame([[series(r), setting(r), slots(r)] for r in records])
    return (found.drop_duplicates().groupby(0).size() > 1).sum() > 1


def sweep(records: Sequence[Record]) -> pd.DataFrame:
    """A sweep as a frame: a row per record, the full cache's left out.

    Its columns are `record`, `series`, `setting`, `slots`, `score`, `kl` and `decode`
    (bytes of KV cache per prompt while decoding). Settings stand together, budgets
    rising; within one the best comes first: the highest score, then the smallest KL.
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
    """Records of one model on one device that tell a quality.

    Attributes:
      model, device: theirs.
      sources: the files that they are from.
      answers: a frame with a row per method and task: what the method is (`ROW`), the
        `column` that its score stands in, `source` and `record`, the task's own fields
        as `task`, `score`, `prompt_tokens`, `slots`, and KV bytes per prompt while
        decoding and at most as `decode` and `peak`.
      columns: each task's name in tables, one of its own.
      rows: an index of methods: the full cache first, then budgets falling. Not every
        method need have run every task.
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
        """One field of the answers: methods by tasks, NaN where it is not known."""
        frame = self.answers.set_index([*ROW, "column"])[values].unstack("column")
        return frame.reindex(index=self.rows, columns=self.columns)

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """The tasks' headline metrics, between 0 and 1."""
        return self.pivot("score")

    def of_full(self, values: pd.DataFrame) -> pd.Series:
        """The full cache's row; of NaN if there is none."""
        return values.loc[self.full] if self.full else values.iloc[0] * np.nan

    @functools.cached_property
    def differences(self) -> pd.DataFrame:
        """`mean` difference to the full cache's scores, and of how many tasks: `count`.

        `rank` is the place among those of the budget that ran all tasks, equals by as
        many digits as tables show sharing it, and NaN for others.
        """
        apart = self.scores - self.of_full(self.scores)
        frame = pd.DataFrame({"mean": apart.mean(axis=1), "count": apart.count(axis=1)})
        ranked = frame["mean"].where(frame["count"] == len(self.columns)).round(3)
        if self.full:
            ranked[self.full] = np.nan
        of_budget = ranked.groupby("budget")
        frame["rank"] = of_budget.rank(method="min", ascending=False)
        frame["best"] = (frame["rank"] == 1) & (of_budget.transform("nunique") > 1)
        return frame

    @functools.cached_property
    def best(self) -> pd.DataFrame:
        """Where some other method of the budget is worse, and none is better.

        By as many digits as tables show.
        """
        shown = self.scores.round(3)
        of_budget = shown.groupby("budget")
        return (shown == of_budget.transform("max")) & (
            of_budget.transform("nunique") > 1
        )


def quality_groups(sources: Iterable[Source]) -> list[Quality]:
    """Groups of what tells a quality, by model and device.

    Raises:
      UserError: two files have the same method's answers to the same task.
    """

    def key(source, record):
        return text(record.get("model")), text(record.get("device"))

    groups = _grouped(sources, lambda r: r["experiment"] != "throughput", key)
    return [Quality(*key, members) for key, members in groups.items()]


def _grouped(
    sources: Iterable[Source],
    wanted: Callable[[Record], bool],
    key: Callable[[Source, Record], tuple],
) -> dict[tuple, list[tuple[Source, Record]]]:
    groups: dict[tuple, list[tuple[Source, Record]]] = {}
    for source in sources:
        for record in filter(wanted, source.records):
            groups.setdefault(key(source, record), []).append((source, record))
    return groups


def _answers(members: list[tuple[Source, Record]]) -> pd.DataFrame:
    """The frame of `Quality`.

    Of several runs' full caches with the same results, the first is there.

    Raises:
      UserError: two files have the same method's answers to the same task.
    """
    frame = pd.DataFrame(
        _answer(source, record, name, task)
        for source, record in members
        for name, task in _tasks(record).items()
    )
    numbers = [*_ASKED, "score", "decode", "peak"]
    frame[numbers] = frame[numbers].astype(float).replace([np.inf, -np.inf], np.nan)
    frame["column"] = _columns(frame)
    # A run's methods differ in name, if in nothing else.
    methods = frame.groupby(["path", *ROW])["method"].transform("nunique")
    frame["series"] = frame["series"].where(methods == 1, frame["method"])
    place = [*ROW, "column"]
    baseline = frame["record"].map(is_full)  # which runs of the same prompts share
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
    """A record without tasks is one of pass keys in prose."""
    bare = {"metric": "accuracy", "score": record.get("score")}
    return record.get("tasks") or {
        "needle": bare | {"num_examples": record.get("num_examples")}
    }


def _columns(answers: pd.DataFrame) -> list[str]:
    """The task of each answer, and what sets it apart from others of its name."""
    varied = answers.groupby("name")[list(_ASKED)].nunique(dropna=False) > 1

    def column(row):
        parts = [
            form.format(row[key])
            for key, form in _ASKED.items()
            if varied.loc[row["name"], key] and pd.notna(row[key])
        ]
        return " ".join([row["name"], ", ".join(parts)]).strip()

    return [column(row) for row in answers.to_dict("records")]


class Throughput(NamedTuple):
    """Throughput records that share model, device, memory limit and prompts.

    `tasks` names those that the prompts are of, none where records do not say.
    """

    model: str
    device: str
    memory_bytes: int | None
    prompt_tokens: int | None
    tasks: tuple[str, ...]
    sources: list[Source]
    records: list[Record]


def throughput_groups(sources: Iterable[Source]) -> list[Throughput]:
    """Groups of throughput records, sources and records in the order given.

    Other engines' records count as of our model and device where a file has both: the
    same weights and machine, by other names.

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


def _throughput(key: tuple, members: list[tuple[Source, Record]]) -> Throughput:
    seen: dict[tuple, Source] = {}
    for source, record in members:
        place = record["method"], record.get("new_tokens")
        if place in seen:
            raise UserError(
                f"{place[0]} with {place[1]} new tokens is in both {seen[place].path} "
                f"and {source.path}: name one of them"
            )
        seen[place] = source
    sources = list({s.path: s for s, _ in members}.values())
    return Throughput(*key, sources, [record for _, record in members])
