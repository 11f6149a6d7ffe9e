"""transformers and kvpress, each at the largest batch that one memory limit allows.

`measure` gives one record per method, to stand beside kvjax's own::

    methods = [Method(), Method("key_diff", 512)]
    measure("venv/bin/python", path_of_gguf, methods, prompts, 64, int(4e9))

What the other libraries are given so that it is fair: the same token ids, all prompts
of one length, nothing padded, EOS ignored; one call for the prompt, as in kvpress' own
pipeline, and logits of its last token alone; for transformers also the prompt in
chunks, if that lets more rows in (the faster of the two is the record, the other stands
under `alternatives`); a press for exactly `budget` pairs per head; sdpa attention,
except for the press that reads attention weights. On a CPU a batch is weighed with an
allocator that hands back what is freed, and timed with one that does not (`Meter` in
`peers.worker`), so that what malloc holds back counts against nobody.
"""

import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.types import UserError
from peers import Peer, PeerDied, PeerError, memory, presses

CHUNK = 256  # prompt tokens at a time, where transformers reads in chunks
UNGRADED = (
    "accuracy",
    "examples",
    "loss",
    "reference_loss",
    "kl",
    "top1_agreement",
)
Progress = Callable[[str, int], None]  # what runs now, and methods just finished


class Method(NamedTuple):
    """What is to be measured.

    Attributes:
      policy: of `presses.LABELS`, run by kvpress; None is transformers' full cache.
      budget: pairs per head that stay of the prompt.
      options: of the press, by its own names, such as SnapKV's `window_size`.
    """

    policy: str | None = None
    budget: int | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # read only

    @property
    def name(self) -> str:
        if self.policy is None:
            return "transformers full cache"
        return f"kvpress {presses.LABELS[self.policy]}"

    def request(self, prompt_tokens: int) -> dict[str, Any]:
        """What the worker makes the press of."""
        ratio = presses.ratio(self.budget, prompt_tokens) if self.policy else None
        return {"policy": self.policy, "ratio": ratio, "options": self.options}

    def kept(self, prompt_tokens: int) -> int:
        return min(self.budget, prompt_tokens) if self.policy else prompt_tokens

    def work(self, prompt_tokens: int, new: int, chunk: int | None) -> memory.Work:
        window = {"snapkv": self.options.get("window_size", 64), "tova": 1}
        return memory.Work(
            prompt_tokens,
            new,
            self.kept(prompt_tokens) if self.policy else None,
            chunk,
            self.policy,
            window.get(self.policy, 0),
            self.policy in presses.EAGER,
        )


def measure(
    python: str,
    gguf_path: str | pathlib.Path,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    memory_bytes: int,
    repeats: int = 3,
    progress: Progress = lambda what, finished: None,
    keep_tokens: bool = False,
) -> list[dict[str, Any]]:
    """Throughput of methods under one memory limit.

    Args:
      python: the interpreter with torch, transformers, gguf, and kvpress for presses.
      gguf_path: the model.
      methods: of different names.
      prompts: token ids, all of one length; no larger batch is tried than there are.
      new_tokens: to generate, whatever they are.
      memory_bytes: what weights, pairs and activations may take together.
      repeats: timed runs of the batch found.
      progress: told what runs.
      keep_tokens: adds `tokens`, what the batch's prompts were answered with (to be
        graded and taken out of the record).

    Returns:
      A record per method. Among its fields: `batch`, and `batch_limit`, the phase that
      needs the most memory or `prompts`; seconds as medians, and all of them in
      `*_seconds_all`; `prefill_tokens_per_s` of the prompts, `decode_tokens_per_s` of
      the `new_tokens` - 1 steps that follow (the prompt gives the first new token),
      `tokens_per_s` of all new tokens over both phases; `measured_bytes`, the peak that
      had to fit; `timed_bytes`, the peak of the timed runs; `counted_bytes`, what was
      expected; `tried`, all batches run on the way.

    Raises:
      UserError: arguments that do not fit; not even one prompt fits.
      PeerError: the other side cannot run.
    """
    _check(methods, prompts, new_tokens, repeats)
    task = _Task(prompts, new_tokens, memory_bytes, repeats)
    records = []
    with _Worker(python, gguf_path, methods, len(prompts[0])) as worker:
        for method in methods:
            say = functools.partial(_say, progress, method.name)
            record = _faster(worker, method, task, say)
            if not keep_tokens:
                del record["tokens"]
            records.append(record)
            progress(method.name, 1)
    return records


def complete(
    python: str,
    gguf_path: str | pathlib.Path,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 4,
    progress: Progress = lambda what, finished: None,
) -> list[list[list[int]]]:
    """What methods answer to prompts, for grading; nothing is timed.

    Args:
      prompts: of any lengths; those of one length share batches of up to `batch`.
      python, gguf_path, methods, new_tokens, progress: as in `measure`.

    Returns:
      Greedy tokens, EOS ignored, as `[method][prompt]`.

    Raises:
      UserError, PeerError: as `measure`.
    """
    lengths = sorted(set(map(len, prompts)))
    for length in lengths:
        alike = [prompt for prompt in prompts if len(prompt) == length]
        _check(methods, alike, new_tokens, 1)
    answers = [[[]] * len(prompts) for _ in methods]
    with _Worker(python, gguf_path, methods, lengths[-1]) as worker:
        for method, found in zip(methods, answers, strict=True):
            for rows in _batches(prompts, batch):
                progress(f"{method.name}: {len(rows)} prompts", 0)
                task = _Task([prompts[i] for i in rows], new_tokens, None, 1)
                done = worker.run(method, task, len(rows), None, None)
                if "out_of_memory" in done:
                    raise PeerError(f"{method.name}: {done['out_of_memory']}")
                for i, tokens in zip(rows, done["tokens"], strict=True):
                    found[i] = tokens
            progress(method.name, 1)
    return answers


class _Task(NamedTuple):
    prompts: Sequence[Sequence[int]]
    new: int
    limit: int | None
    repeats: int

    @property
    def length(self) -> int:
        return len(self.prompts[0])


class _Worker:
    """The worker, started again after a death."""

    def __init__(self, python, gguf_path, methods, prompt_tokens):
        self.python, self.path = python, pathlib.Path(gguf_path)
        self.methods = [m.request(prompt_tokens) for m in methods if m.policy]
        self.start()

    def start(self) -> None:
        self.peer = Peer(self.python, "-m", "peers.worker")
        try:
            self.peer.load(self.path, device="best")
            self.about = self.peer.ask({"methods": self.methods})
        except PeerError:
            self.peer.close()
            raise
        self.shape = memory.Shape(**self.about["shape"])

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_) -> None:
        self.peer.close()

    def run(
        self,
        method: Method,
        task: _Task,
        batch: int,
        chunk: int | None,
        limit: int | None,
    ) -> dict[str, Any]:
        """A rehearsal under a limit, or the timed runs; see `peers.worker`."""
        asked = {
            "chunk": chunk,
            "prompts": [list(prompt) for prompt in task.prompts[:batch]],
            "new": task.new,
            "limit": limit,
            "runs": 1 if limit is not None else task.repeats,
        }
        try:
            done = self.peer.ask(method.request(task.length) | asked)
        except PeerDied as death:
            self.peer.close()
            self.start()
            return {"out_of_memory": str(death)}
        wanted = [method.kept(task.length)]
        if done.get("kept", wanted) != wanted:
            raise PeerError(f"{method.name} kept {done['kept']} pairs, not {wanted}")
        return done


def _faster(worker: _Worker, method: Method, task: _Task, say) -> dict[str, Any]:
    """The record, in the faster of the ways to read a prompt that are worth it."""
    chunks = _chunks(worker, method, task)
    ways = [_way(worker, method, task, chunk, say) for chunk in chunks]
    record, *others = sorted(ways, key=lambda way: -way["tokens_per_s"])
    brief = ("prefill_chunk", "batch", "tokens_per_s", "measured_bytes")
    record["alternatives"] = [{key: each[key] for key in brief} for each in others]
    return record


def _chunks(worker: _Worker, method: Method, task: _Task) -> list[int | None]:
    """All at once; and in chunks, where by the count more rows fit so."""
    if method.policy or task.length <= CHUNK:
        return [None]
    whole, parts = (
        min(_room(worker, method, task, chunk), len(task.prompts))
        for chunk in (None, CHUNK)
    )
    if not whole and parts:
        return [CHUNK]
    return [None, CHUNK] if parts > whole else [None]


def _room(worker, method, task, chunk) -> int:
    free = task.limit - worker.shape.weights
    return free // max(_counted(worker, method, task, chunk).values())


def _counted(worker, method, task, chunk) -> dict[str, int]:
    work = method.work(task.length, task.new, chunk)
    return memory.row_bytes(worker.shape, work)


def _way(worker, method, task, chunk, say) -> dict[str, Any]:
    """One way's record: searches for the batch, then times it."""
    row = max(_counted(worker, method, task, chunk).values())
    weights, most = worker.shape.weights, len(task.prompts)
    trials: list[memory.Trial] = []
    while True:
        batch = memory.next_batch(row, weights, trials, task.limit, most)
        if batch is not None:
            say(f"does a batch of {batch} fit?")
            done = worker.run(method, task, batch, chunk, task.limit)
            trials.append(_trial(batch, done, task.limit))
            continue
        batch = memory.largest(trials)
        if not batch:
            raise UserError(_too_small(method, task, trials[-1]))
        say(f"timing a batch of {batch}")
        done = worker.run(method, task, batch, chunk, None)
        if "out_of_memory" not in done:
            return _record(worker, method, task, chunk, trials, done)
        trials.append(memory.Trial(batch, {}, done["out_of_memory"]))


def _trial(batch: int, done: dict[str, Any], limit: int) -> memory.Trial:
    if "out_of_memory" in done:
        return memory.Trial(batch, {}, done["out_of_memory"])
    over = [phase for phase, size in done["bytes"].items() if size > limit]
    return memory.Trial(
        batch, done["bytes"], f"{over[0]} over the limit" if over else ""
    )


def _too_small(method: Method, task: _Task, trial: memory.Trial) -> str:
    needed = f", needs {trial.peak / 1e9:.3g} GB" if trial.peak else ""
    return (
        f"memory of {task.limit / 1e9:.3g} GB is too small for one prompt of "
        f"{task.length} tokens with {method.name}: {trial.why}{needed}; give more "
        "memory or a shorter prompt"
    )


def _record(worker, method, task, chunk, trials, done) -> dict[str, Any]:
    """What one way came to; `tokens` is not for records."""
    batch = memory.largest(trials)
    (fits,) = [each for each in trials if each.batch == batch and not each.why]
    counted = _counted(worker, method, task, chunk)
    phases = fits.bytes or counted
    limit = "prompts" if batch == len(task.prompts) else max(phases, key=phases.get)
    read, written = done["seconds"]["prefill"], done["seconds"]["decode"]
    reading, writing = statistics.median(read), statistics.median(written)
    both = statistics.median(map(sum, zip(read, written, strict=True)))
    steps = batch * (task.new - 1)
    return {
        "kind": "throughput",
        "method": method.name,
        "label": method.name,
        "engine": "kvpress" if method.policy else "transformers",
        "policy": method.policy,
        "options": method.options,
        "budget": method.budget,
        "schedule": "after_prefill" if method.policy else "full",
        "batch": batch,
        "batch_limit": limit,
        "tried": [each._asdict() for each in trials],
        "prompt_tokens": task.length,
        "new_tokens": task.new,
        "prefill_chunk": chunk,
        "alternatives": [],
        "prefill_seconds": reading,
        "decode_seconds": writing,
        "seconds": both,
        "prefill_seconds_all": read,
        "decode_seconds_all": written,
        "prefill_tokens_per_s": batch * task.length / reading,
        "decode_tokens_per_s": steps / writing if steps else None,
        "tokens_per_s": batch * task.new / both,
        "measured_bytes": fits.peak,
        "timed_bytes": max(done["bytes"].values(), default=None),
        "counted_bytes": worker.shape.weights + batch * max(counted.values()),
        "memory_bytes": task.limit,
        "model": worker.path.stem,
        "attention": "eager" if method.policy in presses.EAGER else "sdpa",
        "dtype": worker.about["dtype"],
        "device": worker.about["device"],
        "threads": worker.about["threads"],
        "versions": worker.peer.versions | worker.about["versions"],
        "tokens": done["tokens"],
        **dict.fromkeys(UNGRADED),
    }


def _batches(prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Indices of prompts of one length, up to `most` at a time."""
    alike: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        alike.setdefault(len(prompt), []).append(i)
    return [
        rows[start : start + most]
        for rows in alike.values()
        for start in range(0, len(rows), most)
    ]


def _check(methods, prompts, new_tokens, repeats) -> None:
    names = [method.name for method in methods]
    if not names or len(set(names)) < len(names):
        raise UserError(f"methods {names}: give one or more, with different names")
    for method in methods:
        if method.policy and (method.budget or 0) < 1:
            raise UserError(f"budget {method.budget} of {method.name}: at least 1")
    lengths = sorted(set(map(len, prompts)))
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(f"prompts of {lengths} tokens: give prompts of one length")
    for name, count in (("new_tokens", new_tokens), ("repeats", repeats)):
        if count < 1:
            raise UserError(f"{name} {count}: at least 1")


def _say(progress: Progress, name: str, what: str) -> None:
    progress(f"{name}: {what}", 0)
