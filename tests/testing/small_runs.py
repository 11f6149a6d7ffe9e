"""Runs of experiments/run.py on a tiny model, to be ended before they are done."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from kvjax.evaluation.report.records import Record, read_records
from testing import checkpoints, prose

ROOT = pathlib.Path(__file__).parents[2]
_OF_TIME = ("tokens_per_s", "seconds", "measured_bytes", "probe", "provenance")
_CONFIG = """\
from ml_collections import ConfigDict


def get_config():
    return ConfigDict(
        {
            "model": "model",
            "dtype": "float32",
            "memory_gb": 0.0006,
            "layerwise": True,
            "seed": 0,
            "haystack": "texts",
            "budget": 32,
            "prefill_chunk": 16,
            "methods": (
                {"name": "Full cache"},
                {"name": "KeyDiff", "policy": "key_diff"},
            ),
            "num_examples": 5,
            "prompt_tokens": 80,
            "max_new_tokens": 4,
            "tasks": ({"name": "needle", "options": {"depths": (0.2, 0.8)}},),
            "fidelity": {
                "num_windows": 2,
                "prompt_tokens": 48,
                "continuation_tokens": 4,
            },
        }
    )
"""


@dataclasses.dataclass
class Runs:
    """A folder with a model, texts and a config, and the runs in it.

    Attributes:
      folder: where they lie.
      whole: records and batches of a run that nobody ended, and its seconds.
    """

    folder: pathlib.Path
    whole: tuple[list[Record], list[Record]] = ((), ())
    seconds: float = 0.0

    def start(
        self, name: str, *more: str, before: str = "", **environment: str
    ) -> subprocess.Popen:
        """A process of the run `name`, which does `before` in bash first."""
        flags = "--config=small.py", f"--workdir={name}", *more
        command = [sys.executable, str(ROOT / "experiments/run.py"), *flags]
        own = {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(self.folder / "cache")}
        return subprocess.Popen(
            ["bash", "-c", f'{before}\nexec "$@"', "bash", *command],
            cwd=self.folder,
            env=os.environ | own | {"JAX_PLATFORMS": "cpu"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, name: str, *more: str, **started: str) -> subprocess.CompletedProcess:
        """The run `name` from where it is to its end."""
        process = self.start(name, *more, **started)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def told(self, name: str) -> tuple[list[Record], list[Record]]:
        """Its records and batches, without what no two runs share."""
        folder = self.folder / name
        return tuple(
            [_without_times(line) for line in read_records(folder / f"{file}.jsonl")]
            for file in ("records", "batches")
        )

    def check(self, name: str) -> None:
        """It is as the run that nobody ended; no batch was written down twice."""
        assert self.told(name) == self.whole
        names = {path.name for path in (self.folder / name).iterdir()}
        left = {n for n in names if ".part" in n or n == "lock"}
        assert not left, f"{left} is left over"
        assert {"report.md", "experiment.json", "reference.npy"} <= names


def prepared(folder: pathlib.Path) -> Runs:
    """The folder filled, and the run that nobody ends done."""
    tokenizer = prose.make_tokenizer()
    shape = {"vocab_size": 1024, "max_position_embeddings": 256}
    assert len(tokenizer) <= shape["vocab_size"]
    weights = checkpoints.tensors(**shape)
    tokenizer.save_pretrained(
        checkpoints.write_folder(folder / "model", weights, **shape)
    )
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(prose.HAYSTACK)
    (folder / "small.py").write_text(_CONFIG)
    runs = Runs(folder)
    compiling = runs.end("first")  # fills the cache of programs
    assert compiling.returncode == 0, compiling.stderr
    began = time.perf_counter()
    runs.end("whole")
    runs.seconds = time.perf_counter() - began
    runs.whole = runs.told("whole")
    return runs


def kill(runs: Runs, times: int, seed: int = 0) -> int:
    """Kills runs at so many random moments; how many of them came to their end.

    A run that was killed is started again, and killed again, until it is done.
    """
    rng, killed, finished = np.random.default_rng(seed), 0, 0
    while killed < times:
        name = f"killed_{seed}_{finished}"
        process = runs.start(name)
        try:
            process.communicate(timeout=rng.uniform(0, runs.seconds))
            assert process.returncode == 0, f"{name} stopped by itself"
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
        if process.returncode == 0 or killed == times:
            assert runs.end(name).returncode == 0
            runs.check(name)
            finished += 1
    return finished


def _without_times(line: Record) -> Record:
    return {k: v for k, v in line.items() if not any(word in k for word in _OF_TIME)}
