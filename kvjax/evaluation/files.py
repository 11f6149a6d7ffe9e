"""Files of a run: written whole or not at all, by one process at a time per folder."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from kvjax.types import UserError

LOCK = "lock"


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
    that ends. Locks of different names in one folder are independent.

    Raises:
      UserError: another process holds the lock.
    """
    path = folder / name
    with contextlib.ExitStack() as closing:
        with on_disk(path):
            file = closing.enter_context(open(path, "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder that ended in between has unlinked the file that is open here.
            free = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            free = False
        if not free:
            raise UserError(
                f"workdir {folder}: another process is at work there: wait for it, end "
                "it, or name another folder"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
