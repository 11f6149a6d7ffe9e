"""Runs the experiment of a config: `kvjax run`, beside which other libraries may run.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

--baseline_python names an interpreter with torch, transformers and kvpress, which then
run the methods that a throughput config has under `baselines`.
"""

import functools

from absl import flags
from baselines import BaselineError
from baselines.throughput import joined

from kvjax.cli import command, run

_PYTHON = flags.DEFINE_string(
    "baseline_python", None, "An interpreter with torch and kvpress: runs them too."
)


def _baselines(experiment):
    """Returns the methods of other libraries that the config names, if they can run."""
    fields = getattr(experiment, "baselines", ())
    if not fields or not _PYTHON.value:
        return {}
    return joined(_PYTHON.value, experiment.model, experiment.dtype, fields)


if __name__ == "__main__":
    run.start(_baselines, functools.partial(command.run, mistakes=(BaselineError,)))
