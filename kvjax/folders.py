"""Names the folder in which kvjax keeps files between runs."""

import os
import pathlib


def cache_dir() -> pathlib.Path:
    """Returns $KVJAX_CACHE, else `kvjax` in $XDG_CACHE_HOME, else `~/.cache/kvjax`."""
    if own := os.environ.get("KVJAX_CACHE"):
        return pathlib.Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "kvjax"
