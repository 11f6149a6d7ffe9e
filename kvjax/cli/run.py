"""Runs the experiment of a config and reports it.

    kvjax run --config=quickstart --workdir=runs/quickstart

--config is the name of a config that comes with kvjax, or a file of your own;
NAME:ARGUMENT passes an argument to its get_config. Prints the table (of a sweep, its
best rows) and, as the last line on stdout, one JSON object. A run that was interrupted
continues if it is started again with the same --workdir. --help lists the configs, the
fields of one, policies and tasks.
"""

import json
import re
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from kvjax import messages
from kvjax.cli import command, configs, help
from kvjax.evaluation import report, run
from kvjax.evaluation.config import Experiment
from kvjax.evaluation.setting import Baseline
from kvjax.parallel import meshes
from kvjax.types import UserError

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results, and of resume.")
flags.DEFINE_float("memory_gb", None, "Overrides the config's memory_gb.")
flags.DEFINE_string("haystack", None, "Overrides the config's haystack.")
flags.DEFINE_string("data_dir", None, "A folder of data sets, for the tasks.")
flags.DEFINE_string("mesh", None, "Devices to split over: data:2,model:4.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0; auto where JAX can tell."
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
_OVERRIDES = ("memory_gb", "haystack", "data_dir", "mesh")

Baselines = Callable[[Experiment], Mapping[str, Baseline]]


def start(
    baselines: Baselines = lambda experiment: {},
    run_command: Callable[..., None] = command.run,
) -> None:
    """Runs the command with the flags of `sys.argv`.

    Args:
      baselines: returns methods of other libraries to run beside an experiment's own.
      run_command: `kvjax.cli.command.run`, or one that knows more mistakes.
    """
    run_command(
        lambda argv: _main(baselines),
        parse=_parse,
        interrupted="interrupted: run it again to go on from here",
    )


def _main(baselines: Baselines) -> None:
    logging.set_verbosity(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: name the folder for the results")
    if _COORDINATOR.value is not None or _PROCESSES.value is not None:
        meshes.start(_COORDINATOR.value or "", _PROCESSES.value, _PROCESS.value)
    overrides = {name: FLAGS[name].value for name in _OVERRIDES}
    experiment = run.from_config(_config(), overrides)
    others = baselines(experiment)
    units = experiment.units_per_method * (len(experiment.methods) + len(others))
    with messages.progress(units, unit="unit") as progress:
        records = run.run(experiment, _WORKDIR.value, progress, others)
    path = report.write_report(records, _WORKDIR.value)
    print(report.overview(records, report.terminal_width()))
    print(f"\n{path}\n")
    print(json.dumps(report.summary(records, path)))


def _config() -> dict[str, Any]:
    """Returns the fields of --config, whose file is loaded at its first use."""
    if not FLAGS["config"].present:
        raise UserError("--config is missing: name one that --help lists, or a file")
    try:
        return _CONFIG.value.to_dict()
    except AttributeError:
        raise UserError("--config: its get_config has to return a ConfigDict") from None
    except OSError as error:
        raise UserError(f"--config: {str(error).splitlines()[-1].strip()}") from None


def _parse(argv: list[str]) -> list[str]:
    """Parses flags; whatever a config file raises becomes a UserError."""
    argv = [configs.with_path(argument) for argument in argv]
    try:
        return _parse_flags(argv)
    except BrokenPipeError:  # of --help into a pipe
        raise
    except Exception as error:
        raise UserError(_raised(error, argv) or f"flags: {_line(error)}") from None


_parse_flags = command.parser(
    __name__, pages=lambda argv: help.text(configs.of_arguments(argv))
)


def _line(error: Exception) -> str:
    """Returns the line for flags that do not parse."""
    if isinstance(error, AttributeError | LookupError):  # as config_flags has it
        return f"the config has no such field: {error.args[0]} (see --help)"
    if name := re.match("Could not parse '(.*?)': SyntaxError", str(error)):
        return f"no field is written {name[1]} (see --help, as in methods[0].policy)"
    lines = str(error).splitlines()
    return lines[-1] if "Traceback" in str(error) else lines[0]


def _raised(error: BaseException | None, argv: list[str]) -> str | None:
    """Returns what the config file raised, with file and line; None if nothing."""
    config = (configs.of_arguments(argv) or "").partition(":")[0]
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename != "<unknown>":  # a file
            return f"{error.filename}, line {error.lineno}: {error.msg}"
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == config:
                return f"{config}, line {frame.lineno}: {what}"
        error = error.__context__
    return None
