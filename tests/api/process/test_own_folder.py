"""A folder goes with its process, or with the next one; nobody else's is touched."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import TypeAlias

import pytest

from api.process.own_folder import LOCK, OwnFolder
from tests.chaos.replicas import wait_gone
from tests.events.processes import DEADLINE_S

Hold: TypeAlias = Callable[[str], tuple[subprocess.Popen[str], int, Path]]

# Says where its folder is, and waits; after a fork two processes hold it.
HOLDER = """
import os, signal, sys
from api.process.own_folder import OwnFolder

folder = OwnFolder("own-")
if sys.argv[1] == "forks" and (child := os.fork()):
    print(child, folder.path, flush=True)
elif sys.argv[1] != "forks":
    print(os.getpid(), folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, also of other processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder() -> Iterator[Hold]:
    """Starts a process that has a folder; returns it, the pid of the last one that holds it, and the folder."""
    begun: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], int, Path]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, how], stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout is not None
        pid, path = process.stdout.readline().split()
        return process, int(pid), Path(path)

    yield start
    for process in begun:
        with process:
            process.kill()


def test_it_is_for_this_user_alone_and_goes_when_it_is_closed() -> None:
    folder = OwnFolder("own-")
    assert folder.path.is_dir() and folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_one_whose_process_was_killed_goes_when_the_next_is_made(
    holder: Hold,
) -> None:
    living, _, kept = holder("alone")
    killed, _, left = holder("alone")
    killed.kill()
    killed.wait(DEADLINE_S)
    assert left.is_dir()
    OwnFolder("other-").close()
    assert left.is_dir()
    OwnFolder("own-").close()
    assert not left.exists() and kept.is_dir() and living.poll() is None


def test_it_lasts_as_long_as_a_fork_lives(holder: Hold) -> None:
    parent, child, path = holder("forks")
    parent.kill()
    parent.wait(DEADLINE_S)
    OwnFolder("own-").close()
    assert path.is_dir()
    os.kill(child, signal.SIGKILL)
    wait_gone(child)
    OwnFolder("own-").close()
    assert not path.exists()


def test_what_looks_like_one_is_left_alone(there: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (there / "own-unlocked").mkdir()  # as it is while another process makes it
    (there / "own-file").touch()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK).write_text(gethostname())
    (there / "own-link").symlink_to(elsewhere)
    (there / "own-another-machines").mkdir()
    (there / "own-another-machines" / LOCK).write_text("another one")
    (there / "own-lock-link").mkdir()
    (there / "own-lock-link" / LOCK).symlink_to(elsewhere / LOCK)
    before = set(there.iterdir())
    OwnFolder("own-").close()
    assert set(there.iterdir()) == before and (elsewhere / LOCK).exists()


def test_folders_of_other_users_are_left_alone(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (there / "own-others").mkdir()
    (there / "own-others" / LOCK).write_text(gethostname())
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: there.stat().st_uid + 1)
        OwnFolder("own-").close()
    assert (there / "own-others" / LOCK).exists()
    OwnFolder("own-").close()
    assert not list(there.iterdir()), "with its own user it goes"
