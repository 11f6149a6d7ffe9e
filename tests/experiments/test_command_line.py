"""How commands end: which line they say, and with which exit code."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
SCRIPT = """\
import sys
from absl import flags
from baselines import BaselineError

from kvjax.cli import command

flags.DEFINE_integer("count", 0, "how many")
STAND_IN = type(sys)("kvjax.types")  # the package's own takes seconds to import
STAND_IN.UserError = type("UserError", (ValueError,), {{}})


def main(argv):
    {body}


command.run(main, mistakes=(BaselineError,){more})
"""
ENDS = [  # body of main, more arguments of run, flags, exit code, stderr
    ("print(argv[1:])", "", ["a"], 0, ""),
    ("pass", "", ["--count=x"], 2, "error: flags: flag --count=x: invalid literal"),
    ("pass", "", ["--counts=1"], 2, "error: flags: Unknown command line flag"),
    ("raise BaselineError('no torch')", "", [], 2, "error: no torch\n"),
    ("raise KeyboardInterrupt", "", [], 130, "\ninterrupted\n"),
    ("raise KeyboardInterrupt", ", interrupted='go on'", [], 130, "\ngo on\n"),
    ("raise BrokenPipeError", "", [], 0, ""),
    (
        "sys.modules['kvjax.types'] = STAND_IN; raise STAND_IN.UserError('size 0')",
        *("", [], 2, "error: size 0\n"),
    ),
]


def ended(folder, body, more, arguments):
    """A script with this body of `main`, when it has ended."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(body=body, more=more))
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"PYTHONPATH": f"{EXPERIMENTS}:{EXPERIMENTS.parent}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("body", "more", "arguments", "code", "told"), ENDS)
def test_ends(tmp_path, body, more, arguments, code, told):
    done = ended(tmp_path, body, more, arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(told) and bool(told) == bool(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_fault_of_the_program_is_a_traceback(tmp_path):
    """Whether kvjax is imported or not."""
    for before in ("", "sys.modules['kvjax.types'] = STAND_IN; "):
        done = ended(tmp_path, f"{before}raise ValueError('a fault')", "", [])
        assert done.returncode == 1 and "Traceback" in done.stderr


def test_every_command_ends_so():
    scripts = {path: path.read_text() for path in EXPERIMENTS.rglob("*.py")}
    workers = EXPERIMENTS / "baselines"  # started by others, which end so
    commands = [p for p, text in scripts.items() if '__name__ == "__main__"' in text]
    commands = [path for path in commands if workers not in path.parents]
    assert len(commands) > 8
    ends = re.compile(r"\n    (command\.run|(run|report|calibrate)\.start)\(")
    assert not [path for path in commands if not ends.search(scripts[path])]
