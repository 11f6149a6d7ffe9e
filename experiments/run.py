"""Runs the experiment of a config and reports it.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

Prints the table (of a sweep, its best rows) and, as the last line on stdout, one JSON
object. Interrupted and started again with the same --workdir, it goes on where it
stopped. --help lists configs, the fields of one, policies and tasks.
"""

import json
import re
import signal
import sys
import traceback

import command_line
import run_help
from absl import app, flags, logging
from baselines.throughput import joined
from ml_collections import config_flags

from kvjax import messages
from kvjax.evaluation import report, run
from kvjax.parallel import meshes
from kvjax.types import UserError

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results go, and are resumed.")
flags.DEFINE_float("memory_gb", None, "Overrides the config's memory_gb.")
flags.DEFINE_string("haystack", None, "Overrides the config's haystack.")
flags.DEFINE_string("data_dir", None, "A folder of data sets, for the tasks.")
flags.DEFINE_string("mesh", None, "Devices to split over: data:2,model:4.")
_BASELINES = flags.DEFINE_string(
    "baseline_python", None, "An interpreter with torch and kvpress: runs them too."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0; auto where JAX can tell."
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many run together.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
_OVERRIDES = ("memory_gb", "haystack", "data_dir", "mesh")


def main(_):
    logging.set_verbosity(logging.WARNING)  # checkpoint libraries are talkative
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: name the folder for the results")
    if _COORDINATOR.value is not None or _PROCESSES.value is not None:
        meshes.start(_COORDINATOR.value or "", _PROCESSES.value, _PROCESS.value)
    asked = run.from_config(_config(), {name: FLAGS[name].value for name in _OVERRIDES})
    baselines = _baselines(asked)
    units = asked.units_per_method * (len(asked.methods) + len(baselines))
    with messages.progress(units, unit="unit") as progress:
        records = run.run(asked, _WORKDIR.value, progress, baselines)
    path = report.write_report(records, _WORKDIR.value)
    print(report.overview(records, report.terminal_width()))
    print(f"\n{path}\n")
    print(json.dumps(report.summary(records, path)))


def _baselines(asked):
    """Other libraries' methods that a throughput config names, if they can run."""
    fields = getattr(asked, "baselines", ())
    if not fields or not _BASELINES.value:
        return {}
    return joined(_BASELINES.value, asked.model, asked.dtype, fields)


def _config():
    """The config file's fields; a file that does not load fails at its first use."""
    if not FLAGS["config"].present:
        raise UserError("--config is missing: name one of configs/*.py")
    try:
        return _CONFIG.value.to_dict()
    except AttributeError:
        raise UserError("--config: its get_config has to return a ConfigDict") from None
    except OSError as error:
        raise UserError(f"--config: {str(error).splitlines()[-1].strip()}") from None


def _parse(argv):
    """Flags that do not parse are the user's mistake, like any other."""
    try:
        if {"--help", "-help", "-h"} & set(argv):
            more = run_help.text(_config_told(argv))
            app.usage(shorthelp=True, writeto_stdout=True, detailed_error=more)
            sys.exit(0)
        return FLAGS(argv)
    except Exception as error:  # a config file may raise anything
        raise UserError(_raised(error, argv) or f"flags: {_line(error)}") from None


def _line(error):
    """What flags that do not parse say of themselves."""
    if isinstance(error, AttributeError | LookupError):  # as config_flags has it
        return f"the config has no such field: {error.args[0]} (see --help)"
    if name := re.match("Could not parse '(.*?)': SyntaxError", str(error)):
        return f"no field is written {name[1]} (see --help, as in methods[0].policy)"
    lines = str(error).splitlines()
    return lines[-1] if "Traceback" in str(error) else lines[0]


def _raised(error, argv):
    """What a config file raised, with file and line; None if it is not to blame."""
    config = (_config_told(argv) or "").partition(":")[0]
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename != "<unknown>":  # a file
            return f"{error.filename}, line {error.lineno}: {error.msg}"
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == config:
                return f"{config}, line {frame.lineno}: {what}"
        error = error.__context__
    return None


def _config_told(argv):
    """What --config says, as config_flags is not asked before all flags are parsed."""
    told = re.search(r"\0--?config[=\0]([^\0]*)", "\0" + "\0".join(argv))
    return told[1] if told else None


if __name__ == "__main__":
    again = "interrupted: run it again to go on from here"
    command_line.run(main, parse=_parse, interrupted=again)
