"""Files of fleets: running ones are found, killed ones are cleaned up, and garbage does no damage."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from fleet.commands.addresses.local_fleets import (
    LocalFleet,
    Where,
    clean_up,
    find,
    is_running,
    process_started,
    record_fleet,
    remove_record,
    running_fleets,
)

pytestmark = pytest.mark.usefixtures("noted_in")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def fleet_of(pid: int | None = None, port: int = 8000, **more: Any) -> LocalFleet:
    pid = pid or os.getpid()
    started = process_started(pid)
    assert started is not None
    usual: dict[str, Any] = {"port": port, "pid": pid, "started": started, "controller": f"http://127.0.0.1:{port + 1}"}
    return LocalFleet(**(usual | more))


def killed_fleet(process: subprocess.Popen[bytes], **more: Any) -> LocalFleet:
    fleet = fleet_of(process.pid, **more)
    record_fleet(fleet)
    process.kill()
    process.wait()
    return fleet


# ---- files


def test_what_was_noted_is_known_and_can_be_forgotten(noted_in: Path) -> None:
    fleet = fleet_of(key="secret", folders=("/tmp/warmroute-x",))
    path = record_fleet(fleet)
    assert running_fleets() == [fleet]
    assert path == noted_in / f"8000-{os.getpid()}.json"
    remove_record(fleet)
    assert running_fleets() == []
    assert not noted_in.exists()


def test_only_the_owner_can_read_the_key(noted_in: Path) -> None:
    path = record_fleet(fleet_of(key="secret"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(noted_in.stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_to_is_neither_used_nor_read(noted_in: Path) -> None:
    path = record_fleet(fleet_of())
    noted_in.chmod(0o777)
    assert running_fleets() == []
    with pytest.raises(click.ClickException, match=f"cannot write '{path}': .*; set XDG_RUNTIME_DIR"):
        record_fleet(fleet_of())
    noted_in.chmod(0o700)
    noted_in.rename(noted_in.with_name("elsewhere"))
    noted_in.symlink_to(noted_in.with_name("elsewhere"))
    assert running_fleets() == []


def test_fleets_at_two_addresses_may_have_the_same_port(process: subprocess.Popen[bytes]) -> None:
    fleets = [fleet_of(controller="http://127.0.0.1:1"), fleet_of(process.pid, controller="http://127.0.0.1:2")]
    for fleet in fleets:
        record_fleet(fleet)
    assert running_fleets() == fleets
    several = "matches several fleets: port 8000 .*:1.*, port 8000 .*:2.*; name one by the URL of its controller"
    for which in ("8000", "http://localhost:8000"):
        with pytest.raises(click.ClickException, match=f"^{which} {several}"):
            find(which)
    assert [find(fleet.controller).local for fleet in fleets] == fleets
    remove_record(fleets[0])
    assert running_fleets() == fleets[1:]


def test_without_a_runtime_folder_the_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    path = record_fleet(fleet_of())
    assert path == tmp_path / "temporary" / f"warmroute-{os.geteuid()}" / f"8000-{os.getpid()}.json"


@pytest.mark.parametrize("runtime", ["", "not/absolute", "/does/not/exist"])
def test_a_runtime_folder_that_cannot_be_used_is_skipped(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert record_fleet(fleet_of()).parent.name == f"warmroute-{os.geteuid()}"


def test_a_folder_of_another_user_is_neither_trusted_nor_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    path = record_fleet(fleet_of())
    real = os.geteuid()
    path.parent.rename(path.parent.with_name(f"warmroute-{real + 1}"))
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert running_fleets() == []
    with pytest.raises(click.ClickException, match="set XDG_RUNTIME_DIR to a folder of your own"):
        record_fleet(fleet_of())


# ---- garbage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"port": 1',
        b"{}",
        b'{"port": 8000, "pid": "1", "started": 1, "controller": "http://x"}',
        b'{"port": 8000, "pid": 0, "started": 1, "controller": "http://x"}',
        b'{"port": 8000, "pid": -1, "started": 1, "controller": "http://x"}',
        b'{"port": 8000, "pid": 99, "started": 1, "controller": "file:///etc/passwd"}',
        b'{"port": 8000, "pid": 99, "started": 1, "controller": "http://x", "key": "a\\nb"}',
        b'{"port": 8000, "pid": 99, "started": 1, "controller": "http://x", "key": "a\\n"}',
    ],
)
def test_garbage_is_reported_and_passed_over(
    content: bytes, noted_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_of(port=9999)
    record_fleet(fleet)
    (noted_in / "8000.json").write_bytes(content)
    assert running_fleets() == [fleet]
    assert f"Note: {noted_in / '8000.json'} is skipped: " in capsys.readouterr().err
    assert (noted_in / "8000.json").exists()


# ---- life and death


def test_a_process_lives_until_it_ends_without_being_polled(process: subprocess.Popen[bytes]) -> None:
    fleet = fleet_of(process.pid)
    assert is_running(fleet)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert Path(f"/proc/{process.pid}/stat").exists()
    assert not is_running(fleet)
    assert process_started(process.pid) is None
    process.wait()
    assert not is_running(fleet)


def test_a_name_with_spaces_and_parentheses_confuses_nothing(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as sleeping:
        started, own = process_started(sleeping.pid), process_started(os.getpid())
        sleeping.kill()
    assert started is not None and own is not None
    assert started >= own


def test_a_pid_that_was_given_again_is_not_taken_for_the_fleet() -> None:
    assert not is_running(msgspec.structs.replace(fleet_of(), started=1))


def test_the_remains_of_a_killed_fleet_are_removed_with_a_note(
    process: subprocess.Popen[bytes], noted_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "warmroute-logs"
    folder.mkdir()
    (folder / "demo-0.log").touch()
    killed_fleet(process, folders=(str(folder), str(tmp_path / "warmroute-gone")))
    assert running_fleets() == []
    assert not folder.exists()
    assert not noted_in.exists()
    said = f"Note: the fleet of port 8000 was killed (pid {process.pid}); its remains are removed\n"
    assert capsys.readouterr().err == said
    assert running_fleets() == []
    assert capsys.readouterr().err == ""


def test_only_temporary_folders_of_ours_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removals are only recorded, so that a bug in the code deletes nothing here."""
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: removed.append(str(folder)))
    precious, ours = tmp_path / "precious", tmp_path / "warmroute-1"
    clean_up(fleet_of(folders=(str(precious), str(ours))))
    assert removed == [str(ours)]


def test_half_a_file_is_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of()
    path = record_fleet(fleet)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            record_fleet(msgspec.structs.replace(fleet, found=True))
    assert running_fleets() == [fleet]
    assert path.exists()


# ---- which one


def test_the_only_fleet_needs_no_name() -> None:
    fleet = fleet_of(key="secret")
    record_fleet(fleet)
    assert find(None) == Where("http://127.0.0.1:8001", "secret", fleet, ("http://127.0.0.1:8000",))


@pytest.mark.parametrize("which", ["8000", "8001", "http://127.0.0.1:8001", "http://localhost:8000"])
def test_a_fleet_is_found_by_its_routers_and_its_controllers_address(which: str) -> None:
    record_fleet(fleet_of(key="secret"))
    other = fleet_of(port=9000)
    record_fleet(other)
    assert find(which).url == "http://127.0.0.1:8001"
    assert find(which).key == "secret"


@pytest.mark.parametrize("which", ["http://10.0.0.5:8000", "http://127.0.0.1:7000", "http://127.0.0.1:99999"])
def test_an_unknown_url_is_used_as_given(which: str) -> None:
    record_fleet(fleet_of())
    assert find(which) == Where(which, None, None)


def test_errors_say_what_there_is() -> None:
    with pytest.raises(click.ClickException, match="no fleet runs on this machine; start one with `warmroute up`"):
        find(None)
    with pytest.raises(click.ClickException, match="no fleet on this machine has port 7000; running: none"):
        find("7000")
    record_fleet(fleet_of())
    record_fleet(fleet_of(port=9000))
    both = r"port 8000 \(controller http://127.0.0.1:8001\), port 9000 \(controller http://127.0.0.1:9001\)"
    with pytest.raises(click.ClickException, match=f"2 fleets run on this machine: {both}; name one: --fleet 8000"):
        find(None)
    with pytest.raises(click.ClickException, match=f"no fleet on this machine has port 7000; running: {both}"):
        find("7000")


def test_a_controllers_url_belongs_to_the_command_that_started_the_fleet(
    process: subprocess.Popen[bytes],
) -> None:
    started = fleet_of(port=9000, controller="http://10.0.0.5:8790")
    record_fleet(fleet_of(process.pid, controller="http://10.0.0.5:8790", found=True))
    record_fleet(started)
    assert find("http://10.0.0.5:8790").local == started
