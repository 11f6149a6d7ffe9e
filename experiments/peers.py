r"""A PyTorch process beside JAX's, for the experiments that compare the two.

PyTorch need not live in JAX's environment: the experiment starts its own script again
under another interpreter, with `--worker`, and the two exchange JSON lines. The worker
first says its versions, then loads a GGUF file, then answers request by request::

    peer = peers.Peer(python, __file__)            # in JAX's process
    peer.load(path_of_gguf)
    answer = peer.ask({"prompts": [[1, 2, 3]]})

    peers.serve(("torch", "transformers"), answer_to)      # in the worker
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app


class PeerError(Exception):
    """The other side cannot run; one line."""


class Peer:
    """The worker's process, as JAX's process sees it.

    Args:
      python: an interpreter with the packages that the script serves, and with gguf
        and absl-py.
      script: what it runs, with `--worker`.

    Attributes:
      versions: of the packages that the worker named.

    Raises:
      PeerError: here and in every method, when the other side cannot run.
    """

    def __init__(self, python: str, script: str):
        self.python = python
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        try:
            self.process = subprocess.Popen(
                [python, script, "--worker"], env=env, text=True, **pipes
            )
        except OSError as error:
            raise PeerError(f"--peer_python: {error}") from None
        self.versions = self._answer()

    def load(self, path: pathlib.Path, attention: str = "sdpa") -> None:
        """Has the worker load a GGUF file; `attention` is transformers' name of it."""
        source = {"folder": str(path.parent), "file": path.name, "attention": attention}
        self.ask(source)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # its last line says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self):
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the worker died, see above"}
        if "error" in answer:
            raise PeerError(f"{self.python}: {answer['error']}")
        return answer


def serve(
    packages: Sequence[str], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> None:
    """Answers each line on stdin by one line on stdout, until stdin ends.

    Args:
      packages: to import first; their versions are the first answer.
      answer: (the loaded model, a request) -> what to say.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def say(content):
        print(json.dumps(content), file=lines, flush=True)

    try:
        for name in packages:
            importlib.import_module(name)
        say({name: importlib.metadata.version(name) for name in packages})
        import torch

        with torch.inference_mode():
            model = _load(**json.loads(sys.stdin.readline()))
            say({})
            for line in sys.stdin:
                say(answer(model, json.loads(line)))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def run(main: Callable) -> None:
    """`app.run`, with one line and exit code 2 where the other side cannot run."""
    try:
        app.run(main)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _load(folder, file, attention):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation=attention
    )
    model.generation_config.eos_token_id = None  # decode to the end
    return model
