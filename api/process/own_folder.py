"""A folder for sockets and the like, which goes with its process; if that was killed, when another one is made."""

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

LOCK = "lock"  # says whose machine it is: not every shared file system tells others of locks
MAX_BYTES = 1024


class OwnFolder:
    """Only this user may enter it. Its lock is held by this process and its forks, until the last of them has ended."""

    def __init__(self, prefix: str) -> None:
        """Remove those of this prefix whose processes were killed, and make one. OSError: none can be made."""
        with suppress(OSError), os.scandir(gettempdir()) as entries:
            for entry in entries:
                if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
                    continue
                with suppress(OSError):  # one without a lock is being made, or not ours
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_free(Path(entry, LOCK)):
                        shutil.rmtree(entry, ignore_errors=True)
        self.path = Path(mkdtemp(prefix=prefix))
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove it; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int | None:
    """Lock it; None where files cannot be locked: then only its own process removes it."""
    unnamed = folder / f".{LOCK}"
    with suppress(OSError):
        descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _here())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            unnamed.rename(folder / LOCK)  # whoever sees it finds it locked
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def _is_free(lock: Path) -> bool:
    """Return whether no process of this machine holds the lock. OSError: it cannot be opened."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(descriptor, MAX_BYTES) == _here()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _here() -> bytes:
    return os.fsencode(socket.gethostname())
