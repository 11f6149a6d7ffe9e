"""Kills a small sweep at random moments and looks whether its records suffer.

    python tests/faults/kill_runs.py --times=100

The records have to be those of a run that nobody killed, but for times, and every batch
has to be written down once. About five seconds a kill on two CPU cores.
"""

import pathlib
import sys
import tempfile

from absl import app, flags

sys.path[:0] = map(str, (pathlib.Path(__file__).parents[1], pathlib.Path.cwd()))

from testing import small_runs  # noqa: E402

_TIMES = flags.DEFINE_integer("times", 100, "How often.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")


def main(_):
    with tempfile.TemporaryDirectory() as folder:
        runs = small_runs.prepared(pathlib.Path(folder))
        print(f"a run takes {runs.seconds:.1f} s", flush=True)
        finished = small_runs.kill(runs, _TIMES.value, _SEED.value)
    print(f"{_TIMES.value} kills, {finished} runs finished, all as the one not killed")


if __name__ == "__main__":
    app.run(main)
