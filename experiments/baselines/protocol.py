r"""Starts a PyTorch process beside JAX's, for experiments that compare the two.

PyTorch need not be installed in JAX's environment: the experiment starts a worker under
another interpreter, often its own script again, and the two exchange JSON lines. The
worker first sends its versions, then loads a GGUF file or makes a model with random
weights, then answers one request at a time::

    # In JAX's process:
    with baselines.Baseline(python, __file__, "--worker") as baseline:
        baseline.load(path_of_gguf)
        answer = baseline.ask({"prompts": [[1, 2, 3]]})

    # In the worker:
    baselines.serve(("torch", "transformers"), answer_to)
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]


class BaselineError(Exception):
    """The worker cannot run; the message is one line."""


class BaselineDied(BaselineError):
    """The worker died without an answer, as when the system kills it for memory."""


class Baseline:
    """The worker process, seen from JAX's process; a context manager that ends it.

    Args:
      python: an interpreter with the packages that the worker serves, and with gguf.
      arguments: of the interpreter; its path includes `baselines`.

    Attributes:
      versions: of the packages that the worker named.

    Raises:
      BaselineError: here and in every method, if the worker cannot run.
    """

    def __init__(self, python: str, *arguments: str):
        self.python = python
        folders = [str(EXPERIMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        env["PYTHONPATH"] = os.pathsep.join(folders)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        try:
            self.process = subprocess.Popen(
                [python, *arguments], env=env, text=True, **pipes
            )
        except OSError as error:
            raise BaselineError(f"--baseline_python: {error}") from None
        try:
            self.versions = self._answer()
        except BaselineError:
            self.close()
            raise

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def load(
        self,
        source: pathlib.Path | Mapping[str, Any],
        device: str = "cpu",
    ) -> None:
        """Makes the worker load a GGUF file, or create a model with random weights.

        Args:
          source: the file; or the fields of a config.json.
          device: `cpu`, in float32; or `best`: a GPU, in bfloat16, where there is one.
        """
        asked: dict[str, Any] = {"device": device}
        if isinstance(source, pathlib.Path):
            asked |= {"folder": str(source.parent), "file": source.name}
        else:
            asked["config"] = dict(source)
        self.ask(asked)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # its last line says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise BaselineDied(f"{self.python}: the worker died ({code}), see above")
        try:
            answer = json.loads(line)
        except ValueError:
            raise BaselineError(f"{self.python}: no worker: {line.strip()!r}") from None
        if "error" in answer:
            raise BaselineError(f"{self.python}: {answer['error']}")
        return answer


def serve(
    packages: Sequence[str], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> None:
    """Answers each line of stdin with a line on stdout, and exits when stdin ends.

    Args:
      packages: to import first; their versions are the first answer.
      answer: maps the loaded model and a request to the answer.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries must not mix with the answers

    def say(content):
        print(json.dumps(content), file=lines, flush=True)

    try:
        for name in packages:
            importlib.import_module(name)
        say({name: importlib.metadata.version(name) for name in packages})
        import torch

        with torch.inference_mode():
            asked = requests()
            model = _load(**next(asked))
            say({})
            for request in asked:
                say(answer(model, request))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def requests() -> Iterator[dict[str, Any]]:
    """Yields the requests on stdin; at its end, exits the process at once.

    The parent process has ended by then, perhaps killed; a worker that continued for
    minutes would disturb the next run.
    """
    waiting = queue.SimpleQueue()

    def read():
        for line in sys.stdin:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def _load(device, config=None, folder=None, file=None):
    import torch
    import transformers

    gpu = device == "best" and torch.cuda.is_available()
    dtype = torch.bfloat16 if gpu else torch.float32
    if config:
        made_for = getattr(transformers, config["architectures"][0])
        shape = made_for.config_class(**config)
        with torch.device("cuda" if gpu else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(
                shape, dtype=dtype, attn_implementation="sdpa"
            ).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=dtype, attn_implementation="sdpa"
        )
    model.generation_config.eos_token_id = None  # decode to the end
    return model.to("cuda") if gpu else model
