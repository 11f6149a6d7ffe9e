"""Files of a run: whole or not there, and one process at a time in their folder."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import IO

from kvjax.types import UserError

LOCK = "lock"
_UNKNOWN = "an unknown host"


@contextlib.contextmanager
def written(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Lends a path to write to; what lies there becomes `path` when the block ends.

    After an error or an interruption nothing is left of it, and `path` is as it was.

    Raises:
      UserError: the disk is full, or does not take it for another reason.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f"{path.stem}.part{path.suffix}")
    with on_disk(path):
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def on_disk(path: str | os.PathLike) -> Iterator[None]:
    """Makes a UserError of what the disk says to writing `path` in the block."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}; make "
            "room or name another folder, and run it again to go on from here"
        ) from error


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Keeps other processes out of a folder by a file in it, gone at the end.

    The kernel holds the lock and lets go of it when its process ends, however that
    ends; the file says which process on which host it is. Where a folder holds several
    things to keep apart, each has a lock of its own name.

    Raises:
      UserError: a process of this host is at work there, or the file is of another
        host, of whose processes nothing is known here.
    """
    path = folder / name
    with _opened(path) as file:
        with on_disk(path):
            _take(file, path)
        try:
            with on_disk(path):
                file.truncate(0)
                told = {"pid": os.getpid(), "host": socket.gethostname()}
                file.write(json.dumps(told).encode())
            yield
        finally:
            path.unlink(missing_ok=True)


def _opened(path: pathlib.Path) -> IO[bytes]:
    """Without a buffer: what a full disk does not take is not tried again later."""
    with on_disk(path):
        return open(path, "ab+", buffering=0)


def _take(file: IO[bytes], path: pathlib.Path) -> None:
    """Locks the open file, which is then this process's."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):  # held, or let go of just now
        free = False
    host, pid = _holder(file) if free else _holder_in_time(file)
    if not free:
        raise UserError(
            f"workdir {path.parent}: process {pid} on {host} is at work there: wait "
            "for it, end it, or name another folder"
        )
    if host not in (socket.gethostname(), _UNKNOWN):
        raise UserError(
            f"workdir {path.parent} is locked by process {pid} on another host, {host}"
            f": if nothing runs there any more, delete {path} and run it again"
        )


def _holder_in_time(file: IO[bytes]) -> tuple[str, int | str]:
    """Also of a process that has the lock and is about to write its name."""
    for _ in range(20):
        host, pid = _holder(file)
        if host != _UNKNOWN:
            break
        time.sleep(0.05)
    return host, pid


def _holder(file: IO[bytes]) -> tuple[str, int | str]:
    """The host and the process that the file names; one cut short names nobody."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        told = json.loads(file.read())
        return told["host"], told["pid"]
    return _UNKNOWN, "of unknown number"
