"""Encodes the examples of tasks, grades answers, and averages scores."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from kvjax.engine import tokenization
from kvjax.engine.text_stream import before_stop, text_after
from kvjax.evaluation import tasks
from kvjax.evaluation.config import Experiment, TaskRun
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.tasks.base import Encoded, Example, Task, encode, options_of
from kvjax.types import Model, UserError

_Z = 1.959964  # the normal distribution's quantile of 97.5%


class Samples(NamedTuple):
    """The encoded examples of one task.

    Attributes:
      run: the task's settings.
      task: the task; None for random tokens, which cannot be graded.
      examples: its examples, with their references.
      prompts: their tokens, and the number of tokens that were cut out.
      new: maximal number of tokens of an answer.
    """

    run: TaskRun
    task: Task | None
    examples: list[Example]
    prompts: list[Encoded]
    new: int

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def lengths(self) -> list[int]:
        return [len(prompt.tokens) for prompt in self.prompts]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.prompts)

    def tokens(self, rows: Iterable[int]) -> list[Sequence[int]]:
        return [self.prompts[i].tokens for i in rows]


class Mixed(NamedTuple):
    """Examples of several tasks, interleaved so that one batch can hold all tasks.

    Attributes:
      parts: the samples of each task.
      rows: (index in `parts`, index in its examples) of every row: the first example of
        each task, then the second of each, and so on.
    """

    parts: tuple[Samples, ...]
    rows: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self.parts)

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.tokens(range(len(self.rows)))))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.rows)

    def answered_in(self, new: int) -> "Mixed":
        """Returns the same prompts with answers of `new` tokens."""
        return self._replace(parts=tuple(p._replace(new=new) for p in self.parts))

    @property
    def graded(self) -> bool:
        """Returns whether answers can be graded: those to random tokens cannot."""
        return None not in [part.task for part in self.parts]

    def tokens(self, rows: Iterable[int]) -> list[Sequence[int]]:
        places = (self.rows[row] for row in rows)
        return [self.parts[part].prompts[i].tokens for part, i in places]


def mixed_of(
    experiment: Experiment, model: Model, new: int, even: bool = False
) -> Mixed:
    """Returns the examples of all tasks; random tokens if the model has no tokenizer.

    Answers have at most `new` tokens. `even`: all prompts of a task are shortened to
    its shortest.

    Raises:
      UserError: see `samples_of`.
    """
    if model.tokenizer is None:
        return mixed([_random(experiment, run, model, new) for run in experiment.tasks])
    found = [samples_of(experiment, run, model, new) for run in experiment.tasks]
    return mixed(list(map(_of_one_length, found)) if even else found)


def mixed(parts: Sequence[Samples]) -> Mixed:
    """Interleaves the examples of several tasks."""
    rows = [(n, i) for n, part in enumerate(parts) for i in range(len(part.prompts))]
    return Mixed(tuple(parts), tuple(sorted(rows, key=lambda row: row[1])))


def samples_of(
    experiment: Experiment, run: TaskRun, model: Model, new: int | None = None
) -> Samples:
    """Returns a task's encoded examples, which are the same for all methods.

    `new` is the most tokens of an answer; None takes it from the run or the task.

    Raises:
      UserError: the task is unknown, its data is missing, or a prompt does not fit the
        model's context.
    """
    task = tasks.get(run.name)
    new = new or run.max_new_tokens or task.max_new_tokens
    room = model.spec.context_length - new
    room = min(room, run.prompt_tokens or room)
    known = options_of(task)
    common = {"haystack": experiment.haystack, "data_dir": experiment.data_dir}
    common["length"] = run.prompt_tokens
    options = {k: v for k, v in common.items() if k in known and v is not None}
    options |= dict(run.options)
    count = run.num_examples
    examples = task.examples(model.tokenizer, count, experiment.seed, **options)
    encoded = functools.partial(encode, model.tokenizer, task, room=room)
    prompts = [encoded(each) for each in examples]
    if "length" in known and any(prompt.cut for prompt in prompts):
        raise UserError(
            f"task {run.name} writes prompts that are longer than the {room} tokens "
            f"that {model.spec.name} can read before {new} new ones: give it "
            f"prompt_tokens of {room} or less"
        )
    return Samples(run, task, examples, prompts, new)


def _random(experiment: Experiment, run: TaskRun, model: Model, new: int) -> Samples:
    """Returns prompts of random tokens, which cannot be graded."""
    size = run.num_examples, run.prompt_tokens or model.spec.context_length - new
    rng = np.random.default_rng(experiment.seed)
    drawn = rng.integers(model.spec.vocab_size, size=size).tolist()
    return Samples(run, None, [], [Encoded(tuple(row), 0) for row in drawn], new)


def _of_one_length(samples: Samples) -> Samples:
    """Shortens all prompts to the shortest one, by tokens far from the hidden key.

    Libraries that pad their prompts are then compared without the cost of padding.
    Samples are returned unchanged if an example has no `depth`.
    """
    depths = [dict(example.details).get("depth") for example in samples.examples]
    if None in depths:
        return samples
    least = min(samples.lengths)

    def shortened(prompt, depth):
        cut = least // 4 if depth >= 0.5 else 3 * least // 4
        rest = cut + len(prompt.tokens) - least
        kept = prompt.tokens[:cut] + prompt.tokens[rest:]
        return Encoded(kept, prompt.cut + rest - cut)

    return samples._replace(prompts=list(map(shortened, samples.prompts, depths)))


def graded(
    samples: Samples, model: Model, rows: Sequence[int], new: Sequence[Sequence[int]]
) -> Record:
    """Returns the texts and scores of some examples' answers; None without a task.

    An answer ends at its first end token, even if generation continued. It is graded up
    to its first stop text.
    """
    if samples.task is None:
        return {"texts": None, "scores": None}
    stop, grade = samples.task.stop, samples.task.grade
    decode = functools.partial(text_after, model.tokenizer, skip_special_tokens=True)
    texts = list(map(decode, samples.tokens(rows), _until_end(model, new)))
    scores = [
        grade(before_stop(text, stop), samples.examples[i])
        for i, text in zip(rows, texts, strict=True)
    ]
    return {"texts": texts, "scores": scores}


def _until_end(model: Model, answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the answers up to their first end tokens."""
    ends = tokenization.end_tokens(model)
    before_end = lambda token: token not in ends
    return [list(itertools.takewhile(before_end, tokens)) for tokens in answers]


def mixed_graded(
    samples: Mixed, model: Model, rows: Sequence[int], new: Sequence[Sequence[int]]
) -> Record:
    """Returns `graded` for mixed samples, each answer graded by its own task."""
    if not samples.graded:
        return {"texts": None, "scores": None}
    answers = [
        graded(samples.parts[part], model, [i], [tokens])
        for (part, i), tokens in zip([samples.rows[r] for r in rows], new, strict=True)
    ]
    return {key: [each[key][0] for each in answers] for key in ("texts", "scores")}


def interval(scores: Sequence[float]) -> Record:
    """Returns the 95% confidence interval of the mean score over prompts.

    Wilson's interval if every score is 0 or 1, so that their mean is a proportion;
    otherwise Student's t interval of the mean, clipped to [0, 1]. (Earlier records have
    the normal distribution's, "normal", which is too narrow for few prompts.)

    Returns:
      `interval`: its two ends, or None if all scores are equal and not 0 or 1, since
      their spread cannot be estimated; and `interval_method`: "wilson" or "student".
    """
    n, mean, z = len(scores), float(np.mean(scores)), _Z
    if set(scores) <= {0, 1}:
        middle = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (mean * (1 - mean) / n + z**2 / (4 * n**2)) ** 0.5
        return {"interval": _ends(middle, half), "interval_method": "wilson"}
    ends = None
    if len(set(scores)) > 1:
        quantile = float(special.stdtrit(n - 1, 0.975))
        ends = _ends(mean, quantile * float(np.std(scores, ddof=1)) / n**0.5)
    return {"interval": ends, "interval_method": "student"}


def _ends(middle: float, half: float) -> list[float]:
    return [max(0.0, middle - half), min(1.0, middle + half)]


def summary(samples: Samples, batches: Sequence[Record]) -> Record | None:
    """Returns a task's mean scores, also by the details of its examples (depth, ...).

    `batches` are lines with the fields of `graded` and the `examples` that they ran. If
    an example ran several times, its first score counts. The result is a record's entry
    under `tasks`; None if nothing was graded.
    """
    if samples.task is None:
        return None
    scores: dict[int, dict[str, float]] = {}
    for batch in batches:
        ran = zip(batch["examples"], batch["scores"], strict=True)
        scores = dict(ran) | scores
    metric, breakdown = samples.task.metric, {}
    for i, score in sorted(scores.items()):
        place = tuple(sorted(samples.examples[i].details))
        breakdown.setdefault(place, []).append(score[metric])
    names = next(iter(scores.values()))
    means = {
        name: float(np.mean([score[name] for score in scores.values()]))
        for name in names
    }
    return {
        "metric": metric,
        "score": means[metric],
        "metrics": means,
        "num_examples": len(scores),
        **interval([score[metric] for score in scores.values()]),
        "prompt_tokens": samples.mean_length,
        "most_prompt_tokens": samples.run.prompt_tokens or samples.longest,
        "max_new_tokens": samples.new,
        "cut_prompts": sum(prompt.cut > 0 for prompt in samples.prompts),
        "breakdown": [
            dict(place) | {"score": float(np.mean(found)), "num_examples": len(found)}
            for place, found in sorted(breakdown.items())
            if place
        ],
    }


def summaries(samples: Mixed, batches: Sequence[Record]) -> dict[str, Record]:
    """Returns the `summary` of every task that ran; empty if nothing was graded."""
    if not samples.graded:
        return {}
    lines: list[list[Record]] = [[] for _ in samples.parts]
    for batch in batches:
        for row, score in zip(batch["examples"], batch["scores"], strict=True):
            part, i = samples.rows[row]
            lines[part].append({"examples": [i], "scores": [score]})
    ran = zip(samples.parts, lines, strict=True)
    return {part.name: summary(part, each) for part, each in ran if each}
