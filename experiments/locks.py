"""One process at a time: a lock on a file that is held open. The system takes it away when its
process ends, however it ends; the file itself says nothing but who made or took it."""

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)


class Lock(NamedTuple):
    path: Path
    file: int  # descriptor; closed by `release`, or by the end of the process


def acquire(path: Path, *, wait: bool) -> Lock | None:
    """Lock a file, which is made where it is not there.

    A file system without locks is told of in the log; what is asked for then goes on without one.

    Returns:
        None where another holds the lock and `wait` is false.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            log.warning("no lock on %s (%s): start one command there at a time", path, error)
            return Lock(path, file)
        except BaseException:  # interrupted while it waited
            os.close(file)
            raise
        if _is_at(path, file):
            os.ftruncate(file, 0)
            os.write(file, this_process().encode())
            return Lock(path, file)
        os.close(file)  # whoever held it has taken the file away


def release(lock: Lock) -> None:
    """Let the next one in, and take the file away."""
    if _is_at(lock.path, lock.file):
        with suppress(OSError):  # the lock goes all the same
            lock.path.unlink()
    os.close(lock.file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def held(path: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold a file's lock, once it is free.

    Args:
        tell: called with the holder's name before there is anything to wait for.
    """
    lock = acquire(path, wait=False)
    if lock is None:
        tell(holder(path))
        lock = acquire(path, wait=True)
    assert lock is not None
    try:
        yield
    finally:
        release(lock)


def holder(path: Path) -> str:
    """Who holds a file's lock, in words."""
    try:
        host, _, number = path.read_text(encoding="utf-8").rpartition("/")
    except OSError:
        number = ""
    if not number:
        return "another process"
    return f"process {number}" + ("" if host == socket.gethostname() else f" of {host}")


def this_process() -> str:
    return f"{socket.gethostname()}/{os.getpid()}"


def is_alive(process: str) -> bool:
    """Whether the process that a status names still runs; True for another machine's."""
    host, _, number = process.rpartition("/")
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
