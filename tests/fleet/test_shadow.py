"""The start-up check, against real folders with a foreign `events` package in them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.shadow import OUR_ROOT, PACKAGES, find_conflicts


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder as pip leaves it after installing a distribution that brings a package named `events`."""
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "__init__.py").write_text("")
    info = tmp_path / "other_events-0.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-events\nVersion: 0.5\n")
    (info / "top_level.txt").write_text("events\n")
    return tmp_path


def dispatch(*search_path: Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """Run `warmroute --version` with these folders as the whole front of sys.path."""
    front = [str(folder) for folder in search_path]
    code = f"import sys\nfrom fleet import cli\nsys.path[:] = {front!r} + sys.path\n{setup}\ncli.main(['--version'])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


def test_a_clean_environment_has_no_conflict() -> None:
    assert find_conflicts(sys.path) == []


def test_theirs_before_ours_is_an_error_that_names_the_distribution(foreign: Path) -> None:
    finished = dispatch(foreign)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr.startswith(f"Error: warmroute's events is hidden by events in {foreign} ")
    assert "(installed by other-events)" in finished.stderr
    assert "environment of its own" in finished.stderr


def test_ours_before_theirs_is_a_warning(foreign: Path) -> None:
    finished = dispatch(OUR_ROOT, foreign)
    assert finished.returncode == 0
    assert finished.stdout.startswith("warmroute ")
    assert finished.stderr.startswith(f"Warning: warmroute's events hides events in {foreign} ")
    assert "(installed by other-events)" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_folder_without_metadata_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text("")
    finished = dispatch(tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"Error: warmroute's lab is hidden by lab in {tmp_path}. ")


def test_a_folder_that_is_no_package_is_no_conflict(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "router.txt").write_text("")
    assert find_conflicts([str(tmp_path), str(OUR_ROOT)]) == []


def test_another_complete_copy_of_warmroute_is_no_conflict(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "fleet" / "shadow.py").write_text("")
    assert find_conflicts([str(tmp_path), str(OUR_ROOT)]) == []


def test_two_distributions_in_one_folder_are_found(foreign: Path) -> None:
    (foreign / "other_events-0.5.dist-info").rename(foreign / "events-0.5.dist-info")
    [conflict] = find_conflicts([str(foreign)], our_root=foreign.resolve())
    assert conflict.ours_wins
    line = conflict.describe(["events"], foreign.resolve())
    assert line.startswith("warmroute's events and that of events lie mixed")


def test_metadata_is_read_only_when_there_is_a_conflict(foreign: Path) -> None:
    forbid = "import importlib.metadata as m\nm.packages_distributions = lambda: sys.exit('scanned')"
    assert "scanned" not in dispatch(setup=forbid).stderr
    assert "scanned" in dispatch(foreign, setup=forbid).stderr


def test_the_check_is_cheap() -> None:
    fastest_s = min(_time_s() for _ in range(10))
    assert fastest_s < 0.005


def _time_s() -> float:
    started = time.perf_counter()
    find_conflicts(sys.path)
    return time.perf_counter() - started
