"""Another user of the machine: what can he write, replace, read or connect to of what a fleet makes?"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from fleet.host import child
from fleet.host.child import Log
from fleet.on_ray.launch import private_folder
from fleet.plan import NO_MODELS
from fleet.up.launching import LOG, OnRay
from fleet.up.watching import CannotStart
from replica.disk.file import DiskFile, open_disk_file
from tests.chaos.ray_here import Victims
from tests.fleet.test_up import Up, starting
from tests.fleet.test_up_on_ray import RAY_STARTS_S, listening
from tests.hostile.nobody import NOBODY, Target, attempts
from tests.processes import family, of_process, opened

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

SECRETS = {"WARMROUTE_API_KEY": "secret-of-clients", "WARMROUTE_KV_SECRET": "secret-of-all-the-blocks"}
SHARED = 0o1777  # as /tmp has it


@contextmanager
def fleet(*options: str) -> Iterator[Up]:
    """Start one below a folder for temporary files that all users share, as /tmp is."""
    with starting("--port", "0", "--replicas", "1", *options, **SECRETS) as running:
        running.folder.chmod(SHARED)
        running.wait_for("Ctrl-C ends everything", within_s=RAY_STARTS_S)
        yield running


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that every user can write to; pytest's own lie in one that others cannot enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="o-") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def target_of(running: Up, began_s: float) -> Target:
    pids = family(running.process.pid)
    named = {
        path for path in set().union(*map(opened, pids)) if path.startswith("/") and not path.endswith(" (deleted)")
    }
    files = {path for path in named if not path.startswith(("/dev/", "/proc/"))}
    [file] = (running.folder / f"warmroute-{os.geteuid()}").glob("*.json")
    environments = [of_process(pid, "environ").decode(errors="replace") for pid in pids]
    tokens = {found for each in environments for found in re.findall(r"RAY_AUTH_TOKEN=(\w+)", each)}
    return Target(
        owner=os.geteuid(),
        since_s=began_s,
        folders=[str(running.folder), "/dev/shm"],
        paths=[*files, *{os.path.dirname(path) for path in files}],
        sockets=sorted(unix_sockets(pids)),
        pids=pids,
        ports=sorted(int(address.rpartition(":")[2], 16) for address in listening(pids).values()),
        secrets=[*SECRETS.values(), json.loads(file.read_bytes())["key"], *tokens],
    )


def unix_sockets(pids: list[int]) -> set[str]:
    links = set().union(*map(opened, pids))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in links}


def is_refused_without_a_token(running: Up) -> bool:
    """Ask Ray's GCS, where the plan and the fleet's key are, as somebody who does not know its token."""
    gcs = Victims(running).one("gcs/gcs_server ")
    [port] = [int(address.rpartition(":")[2], 16) for address in listening([gcs]).values()]
    asking = f"from ray._raylet import GcsClient; GcsClient(address='127.0.0.1:{port}').internal_kv_keys(b'', None)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", asking],
        env=environment | {"RAY_AUTH_MODE": "disabled"},
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stderr is not None
        try:
            return any("Unauthenticated" in line for line in client.stderr)
        finally:
            client.kill()


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_another_user_can_neither_write_nor_read_what_a_fleet_on_ray_makes() -> None:
    pytest.importorskip("ray")
    began_s = time.time()
    with fleet("--model", "demo") as running:
        target = target_of(running, began_s)
        assert len(target.secrets) == 4 and len(target.sockets) >= 3 and len(target.ports) > 8
        assert attempts(target) == []
        assert is_refused_without_a_token(running)

        [folder] = running.folder.glob("warmroute-??????*")
        folder.chmod(0o777)  # the control: this he notices
        assert f"plant a link in {folder}/s" in attempts(msgspec.structs.replace(target, ports=[], pids=[]))


def test_ray_gets_a_part_of_a_folder_that_others_can_enter_in_which_they_cannot(shared: Path) -> None:
    assert private_folder(shared / "new") == shared / "new"
    private = private_folder(shared)
    assert private == shared / "ray" and private_folder(shared) == private
    (private / "s").mkdir()
    (private / "s").chmod(0o777)  # as Ray does
    assert attempts(Target(os.geteuid(), 0.0, [str(shared)], [str(private / "s")], [], [], [])) == []
    os.chown(private, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="is no folder of this user; remove it, or choose another --log-dir"):
        private_folder(shared)


def planted(path: Path, what: str, victim: Path) -> None:
    if what == "a link":
        path.symlink_to(victim)
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text("as it was")
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("what", ["a link", "a pipe", "another user's file"])
def test_a_log_that_another_user_has_put_there_is_not_written_to(
    shared: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, victim = shared, tmp_path / "victim"
    victim.write_text("as it was")
    planted(logs / "demo-0.log", what, victim)
    with pytest.raises(OSError, match=r"demo-0\.log"):
        Log(logs / "demo-0.log")

    monkeypatch.setattr(child, "LONGEST_LOG_BYTES", 1)
    planted(logs / "demo-1.log.1", what, victim)
    log = Log(logs / "demo-1.log")
    os.write(log.descriptor, b"what a replica says")
    log.shorten()
    log.close()

    planted(logs / LOG, what, victim)
    launcher = OnRay(logs, None, "warmroute", 0, "a-key")
    with pytest.raises(CannotStart, match=r"launcher\.log.*choose another --log-dir"):
        asyncio.run(launcher.start(NO_MODELS))
    asyncio.run(launcher.close())
    assert victim.read_text() == "as it was"
    if what == "another user's file":
        assert {path.read_text() for path in logs.iterdir()} == {"as it was", ""}


def test_a_disk_file_of_the_folders_owner_is_not_used(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(shared, NOBODY, NOBODY)
    with disk_file(shared) as ours:
        theirs = ours.path
    with disk_file(shared) as again:  # the control
        assert again.path == theirs
    os.chown(theirs, NOBODY, NOBODY)
    with disk_file(shared) as other:
        assert other.path != theirs
    assert f"{theirs} is left alone" in caplog.text


def disk_file(folder: Path) -> DiskFile:
    return open_disk_file(folder, kv_layout="x", block_size=4, payload_bytes=4096, num_slots=4)
