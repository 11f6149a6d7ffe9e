"""Files of a run: written whole or not at all, by one process at a time per folder."""

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
    """Yields a temporary path, which replaces `path` when the block ends.

    After an error or an interruption the temporary file is removed, and `path` is
    unchanged.

    Raises:
      UserError: the disk is full, or writing fails for another reason.
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
    """Turns an OSError from writing `path` in the block into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}; make "
            "room or name another folder, and run it again to go on from here"
        ) from error


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Locks a folder against other processes, by a file that is removed at the end.

    The kernel holds the lock (`flock`) and releases it when its process ends, however
    that ends; the file names the process and its host. Locks of different names in one
    folder are independent.

    Raises:
      UserError: a process of this host holds the lock, or the file is of another host,
        whose processes cannot be checked from here.
    """
    path = folder / name
    with _opened(path) as file:
        with on_disk(path):
            _take(file, path)
        try:
            with on_disk(path):
                file.truncate(0)
                holder = {"pid": os.getpid(), "host": socket.gethostname()}
                file.write(json.dumps(holder).encode())
            yield
        finally:
            path.unlink(missing_ok=True)


def _opened(path: pathlib.Path) -> IO[bytes]:
    """Opens without a buffer: closing must not retry what a full disk refused."""
    with on_disk(path):
        return open(path, "ab+", buffering=0)


def _take(file: IO[bytes], path: pathlib.Path) -> None:
    """Locks the open file for this process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder that ended in between has unlinked the file that is open here.
        free = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        free = False
    host, pid = _holder(file)
    for _ in range(0 if free else 20):  # a new holder writes its name only now
        if host != _UNKNOWN:
            break
        time.sleep(0.05)
        host, pid = _holder(file)
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


def _holder(file: IO[bytes]) -> tuple[str, int | str]:
    """Returns host and process in the file; a file that was cut short names neither."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        holder = json.loads(file.read())
        return holder["host"], holder["pid"]
    return _UNKNOWN, "of unknown number"
