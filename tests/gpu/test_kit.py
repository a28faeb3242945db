"""Missing packages come from wheels; present ones stay as they are."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu import kit
from tests.gpu.kit import Wanted, installed, provide, unpack, wanted

NOBODY = "nobody_has_this"


def wheel(folder: Path, name: str, of: str, *files: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{of}-py3-none-any.whl", "w") as archive:
        for file in files:
            archive.writestr(file, "VALUE = 7\n")
        archive.writestr(f"{name}-{of}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {of}\n")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def test_a_replica_wants_what_the_project_names() -> None:
    names = {one.name for one in wanted()}
    assert names >= {"click", "msgspec", "pyzmq", "torch"} and names >= kit.EXPECTED
    assert not any(one.is_missing for one in wanted())
    assert Wanted(NOBODY, (1,)).is_missing and Wanted("click", (10**6,)).is_missing


def test_only_what_is_missing_or_older_is_unpacked(tmp_path: Path) -> None:
    wheel(tmp_path / "kit", NOBODY, "1.0", f"{NOBODY}.py")
    wheel(tmp_path / "kit", "click", "1.0", "click/older.py")
    wheel(tmp_path / "kit", "pytest", "999", "pytest/newer.py")
    assert unpack(tmp_path / "out", tmp_path / "kit") == [f"{NOBODY} 1.0", "pytest 999"]
    assert (tmp_path / "out" / f"{NOBODY}.py").is_file() and (tmp_path / "out/pytest/newer.py").is_file()
    assert not (tmp_path / "out/click").exists()


def test_libraries_in_a_wheels_data_are_unpacked_and_scripts_are_not(tmp_path: Path) -> None:
    data = f"{NOBODY}-1.0.data"
    wheel(tmp_path / "kit", NOBODY, "1.0", f"{data}/platlib/{NOBODY}.py", f"{data}/scripts/tool")
    unpack(tmp_path / "out", tmp_path / "kit")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{NOBODY}-1.0.dist-info", f"{NOBODY}.py"]


def test_what_was_missing_can_be_imported_by_this_process_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "wanted", lambda: [Wanted(NOBODY, (1, 0))])
    wheel(tmp_path / "kit", NOBODY, "1.0", f"{NOBODY}.py")
    assert provide(tmp_path / "out", tmp_path / "kit") == f"{NOBODY} 1.0"
    assert installed(NOBODY) == (1, 0) and sys.path[0] == str(tmp_path / "out")
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "out"), str(kit.ROOT)]


@pytest.mark.parametrize("there", [True, False])
def test_without_it_what_is_missing_is_named_and_how_to_get_it(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "wanted", lambda: [Wanted("click", (1,)), Wanted(NOBODY, (1, 2))])
    if there:
        wheel(tmp_path / "kit", NOBODY, "1.0", f"{NOBODY}.py")
    why = "it does not have them" if there else "it is not here"
    with pytest.raises(SystemExit, match=rf"missing: {NOBODY}>=1\.2; .* make gpu-kit .*\({why}\)"):
        provide(tmp_path / "out", tmp_path / "kit")


def test_one_file_has_all_and_runs_from_any_folder(tmp_path: Path) -> None:
    file, here = tmp_path / "kit.pyz", tmp_path / "elsewhere"
    wheel(tmp_path / "kit", NOBODY, "1.0", f"{NOBODY}.py")
    kit.pack(tmp_path / "kit", file)
    with zipfile.ZipFile(file) as archive:
        assert {f"build/gpu-kit/{NOBODY}-1.0-py3-none-any.whl", "kernels/backends.py"} <= set(archive.namelist())
        assert archive.read("COMMIT")
    here.mkdir()
    command = [sys.executable, str(file), "--out", "results", "--device", "cpu"]
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "add --quick" in ended.stderr, ended.stderr
    assert list(here.iterdir()) == []
