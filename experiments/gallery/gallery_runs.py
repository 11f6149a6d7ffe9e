"""Runs each policy on one prompt and records what it keeps, for docs/policies.md."""

import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gallery_pictures import SCHEDULES, Data, pack
from gallery_words import Shape
from tqdm import tqdm

from kvjax import cache, policies
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, make_spec
from kvjax.engine import jobs, runner, tokenization
from kvjax.engine.prefill_cache import PrefillCache
from kvjax.evaluation.tasks import needle
from kvjax.evaluation.tasks.text import haystack
from kvjax.types import UserError

BUDGET, BLOCK, LENGTH, DEPTH, NEW = 384, 64, 1000, 0.3, 8
OPTIONS = {  # where the defaults are meant for longer prompts
    "fastgen": {"heavy": 96, "local": 96, "punctuation": ".,;:!?\n"},
    "simlayerkv": {"recent": 128},
    "sliding_window": {"window": BUDGET},
}
NOTHING: Data = {"setting": {}, "policies": {}}


def options_of(name: str, tokenizer: Any) -> dict[str, Any]:
    """Returns the options of a policy here, with punctuation as token ids."""
    options = dict(OPTIONS.get(name, {}))
    if "punctuation" in options:
        ids = [tokenizer(c, add_special_tokens=False) for c in options["punctuation"]]
        options["punctuation"] = tuple(each["input_ids"][0] for each in ids)
    return options


def call_of(name: str, options: dict[str, Any]) -> str:
    """Returns the Python expression that makes the policy."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"


def spans(example: needle.Example, tokenizer: Any) -> dict[str, tuple[int, int]]:
    """Returns the token ranges [first, last + 1) of needle and question."""
    prompt = example.prompt
    sentence = next(p for p in prompt.split("\n\n") if example.answer in p)
    start = prompt.index(sentence)
    asked = prompt.rindex("\n\n") + 2
    return {
        "needle": _tokens(tokenizer, prompt, start, start + len(sentence)),
        "question": _tokens(tokenizer, prompt, asked, prompt.index("?", asked) + 1),
    }


def _tokens(tokenizer: Any, prompt: str, start: int, end: int) -> tuple[int, int]:
    """Returns the range of tokens that overlap the characters [start, end)."""
    places = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(places) if a < end and b > start]
    return inside[0], inside[-1] + 1


def setting(model: Any, example: needle.Example) -> Data:
    """Returns the setting that all pictures share."""
    spec = model.spec
    layers = (1, spec.num_layers // 2, spec.num_layers)
    return {
        "model": spec.name,
        "shape": {key: getattr(spec, key) for key in Shape._fields},
        "num_layers": spec.num_layers,
        "layers": list(layers),
        "budget": BUDGET,
        "block": BLOCK,
        "tokens": len(example.tokens),
        "answer": example.answer,
        **{key: list(at) for key, at in spans(example, model.tokenizer).items()},
    }


def readings_of(
    model: Any, members: Sequence[policies.Policy], tokens: Sequence[int]
) -> Iterable[dict[str, tuple[list[list[np.ndarray]], list[int]]]]:
    """Yields for each policy, by schedule, its kept positions and the new tokens."""
    configs = [
        [make_spec(model.spec, policy, BUDGET, schedule) for schedule in _schedules()]
        for policy in members
    ]
    readings = PrefillCache(model, [each for pair in configs for each in pair])
    for pair in configs:
        yield {
            config.schedule.phases: _outcome(readings, config, tokens)
            for config in pair
        }


def full_cache(model: Any, tokens: Sequence[int]) -> list[int]:
    """Returns the new tokens with the full cache."""
    config = make_spec(model.spec, None, None, Schedule("none", BLOCK))
    return _outcome(PrefillCache(model, [config]), config, tokens)[1]


def _schedules() -> list[Schedule]:
    return [Schedule(phases, BLOCK, BLOCK) for phases in SCHEDULES]


def _outcome(readings: PrefillCache, config: CacheSpec, tokens: Sequence[int]):
    """Returns the prompt's kept positions, by layer and head, and the new tokens."""
    ends, model = tokenization.end_tokens(readings.model), readings.model
    job = jobs.job_of(model, config, len(tokens), NEW, eos=ends)
    run = readings.runner(job)
    state = runner.prefill_batch(run, [tokens], [0])
    kept = cache.kept_positions(state.cache)[0]
    return kept, runner.decode_batch(run, state, [tokens])[1][0]


def record(
    kept: list[list[np.ndarray]], text: str, example: needle.Example, shared: Data
) -> Data:
    """Returns the data of one run."""
    count = shared["tokens"]
    held = np.array([[np.isin(np.arange(count), h) for h in layer] for layer in kept])
    start, end = shared["needle"]
    return {
        "found": bool(needle.grade(example, text)),
        "text": text,
        "pairs": round(float(held.sum(axis=-1).mean()), 1),
        "needle": round(float(held[..., start:end].mean()), 4),
        "density": [round(100 * x) for x in _binned(held.mean(axis=(0, 1)))],
        "kept": [[pack(h) for h in held[layer - 1]] for layer in shared["layers"]],
    }


def _binned(x: np.ndarray, size: int = 10) -> list[float]:
    return [float(x[i : i + size].mean()) for i in range(0, len(x), size)]


def run(model: Any, names: Sequence[str], data: Data, path: pathlib.Path) -> Data:
    """Runs policies under both schedules, and saves the data after each policy."""
    (example,) = needle.examples(model.tokenizer, 1, LENGTH, (DEPTH,), 0, haystack())
    shared = setting(model, example)
    if data["policies"] and data["setting"] != shared:
        raise UserError(f"{path} comes from another prompt: run without --only")
    data = {"setting": shared, "policies": dict(data["policies"])}
    calls = {name: options_of(name, model.tokenizer) for name in names}
    made = [policies.make(name, **calls[name]) for name in names]
    say = functools.partial(model.tokenizer.decode, skip_special_tokens=True)
    full = say(full_cache(model, example.tokens))
    data["full"] = {"found": bool(needle.grade(example, full)), "text": full}
    every = readings_of(model, made, example.tokens)
    for name, found in zip(names, tqdm(every, total=len(names)), strict=True):
        runs = {
            phases: record(kept, say(new), example, shared)
            for phases, (kept, new) in found.items()
        }
        data["policies"][name] = {"call": call_of(name, calls[name]), "runs": runs}
        save(data, path)
    return data


def read(path: pathlib.Path) -> Data:
    """Returns the data of earlier runs, or `NOTHING`."""
    return json.loads(path.read_text()) if path.exists() else NOTHING


def save(data: Data, path: pathlib.Path) -> None:
    """Writes JSON with a line per policy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(data['policies'][name])}"
        for name in sorted(data["policies"])
    )
    rest = {key: value for key, value in data.items() if key != "policies"}
    head = json.dumps(rest)[1:-1]
    path.write_text(f'{{{head}, "policies": {{\n{lines}\n}}}}\n')
