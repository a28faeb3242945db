"""Sessions of ended launchers are cleared, and sessions that reuse their numbers are not."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.on_ray.cleanup import clear_orphans, processes
from fleet.up.launching import OnRay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
ORPHANING = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & :"]


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    """Another program's session."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def living(session: int) -> list[int]:
    return [each.pid for each in processes() if each.session == session and each.state != "Z"]


def test_the_session_of_another_that_has_the_number_now_is_left_alone(other: "subprocess.Popen[bytes]") -> None:
    clear_orphans(other.pid)
    assert other.poll() is None


def test_what_a_launcher_has_left_behind_is_killed() -> None:
    with subprocess.Popen(ORPHANING, start_new_session=True) as launcher:
        launcher.wait()
        assert living(launcher.pid)
        clear_orphans(launcher.pid)
        assert not living(launcher.pid)


async def test_a_launcher_that_was_cleared_is_cleared_no_more(tmp_path: Path) -> None:
    launcher = OnRay(tmp_path, None, "n", 0, "key")
    launcher._child = await asyncio.create_subprocess_exec(
        *ORPHANING[:2], f"{ORPHANING[2]} exec sleep 60", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    session = launcher._child.pid
    began_s = time.monotonic()
    await launcher.close()
    assert time.monotonic() - began_s < 10
    assert not living(session)
    assert launcher._child is None
