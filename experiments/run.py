"""Runs the experiment of a config and reports it.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

Prints the table (of a sweep, its best rows) and, as the last line on stdout, one JSON
object. Interrupted and started again with the same --workdir, it goes on where it
stopped.
"""

import contextlib
import functools
import json
import sys

from absl import app, flags, logging
from ml_collections import config_flags
from peers.throughput import joined
from tqdm import tqdm

from kvjax.evaluation import config, quality, throughput
from kvjax.evaluation.report import run_report
from kvjax.parallel import meshes
from kvjax.types import UserError

_KINDS = {  # a config's `kind`: how it is read, and run
    "quality": (config.from_config, quality.run),
    "throughput": (throughput.from_config, throughput.run),
}
FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results go, and are resumed.")
_MEMORY = flags.DEFINE_float("memory_gb", None, "Overrides the config's memory_gb.")
_HAYSTACK = flags.DEFINE_string("haystack", None, "Overrides the config's haystack.")
_DATA = flags.DEFINE_string("data_dir", None, "A folder of data sets, for the tasks.")
_PEERS = flags.DEFINE_string(
    "peer_python", None, "An interpreter with torch and kvpress: runs the peers too."
)
_DISTRIBUTED = flags.DEFINE_string(
    "distributed", None, "Join other processes: auto, or HOST:PORT/N/I."
)
_MESH = flags.DEFINE_string("mesh", None, "Devices to split over: data:2,model:4.")


def main(_):
    logging.set_verbosity(logging.WARNING)  # checkpoint libraries are talkative
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: name the folder for the results")
    if _DISTRIBUTED.value:
        meshes.start(_DISTRIBUTED.value)
    fields = _config()
    kind = fields.pop("kind", "quality")
    if kind not in _KINDS:
        raise UserError(f"kind {kind!r} is unknown: use one of {', '.join(_KINDS)}")
    from_config, run = _KINDS[kind]
    peers = _peers(fields)
    if peers:
        run = functools.partial(run, peers=peers)
    asked = from_config(
        fields,
        {
            "memory_gb": _MEMORY.value,
            "haystack": _HAYSTACK.value,
            "data_dir": _DATA.value,
            "mesh": _MESH.value,
        },
    )
    units = asked.units + sum(len(asked.max_new_tokens) for _ in peers)
    with tqdm(total=units, unit="unit", smoothing=0) as bar:

        def progress(what, units):
            bar.set_description(what)
            bar.update(units)

        records = run(asked, _WORKDIR.value, progress)
    path = run_report.write_report(records, _WORKDIR.value)
    print(run_report.overview(records), f"\n{path}\n", sep="\n")
    print(json.dumps(run_report.summary(records)))


def _peers(fields):
    """The methods of other engines that a throughput config names, if they can run."""
    asked = fields.pop("peers", ())
    if not asked or not _PEERS.value:
        return {}
    return joined(_PEERS.value, fields["model"], fields["dtype"], asked)


def _config():
    """The config file's fields; a file that does not load fails at its first use."""
    if not FLAGS["config"].present:
        raise UserError("--config is missing: name one of configs/*.py")
    try:
        return _CONFIG.value.to_dict()
    except OSError as error:
        raise UserError(f"--config: {str(error).splitlines()[-1].strip()}") from None


def _parse(argv):
    """Flags that do not parse are the user's mistake, like any other."""
    try:
        return FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as e:
        lines = f"flags: {e}".splitlines()
        raised = any(line.startswith("Traceback") for line in lines)
        raise UserError(lines[-1] if raised else lines[0]) from None


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            app.run(main, flags_parser=_parse)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("\ninterrupted: run it again to go on from here", file=sys.stderr)
            sys.exit(130)
