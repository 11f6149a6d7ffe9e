"""Ends every script of this folder as `kvjax.cli.command` does.

Some scripts start themselves again under an interpreter without kvjax: its folder is
found beside this one, and `kvjax.cli.command` needs absl alone.
"""

import functools
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from baselines import BaselineError

from kvjax.cli import command

run = functools.partial(command.run, mistakes=(BaselineError,))
