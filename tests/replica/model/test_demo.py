"""The demo model: the same everywhere, and made once."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replica.model import demo
from replica.model.demo import demo_folder
from tests.events.processes import wait_until

# Whoever changes these must raise VERSION, so that machines that have the old files make the new ones.
DIGESTS = {
    "chat_template.jinja": "b8f630393fa642fe",
    "config.json": "5ef5afcc6260c8c1",
    "generation_config.json": "14592b2116d94eec",
    "model.safetensors": "015c5af02b23ce53",
    "tokenizer.json": "f5b515a244f049ee",
    "tokenizer_config.json": "156f8f815b5cec45",
}
LARGEST_BYTES = 20e6


@pytest.fixture(scope="module")
def folder(demo_cache: Path) -> Path:
    return demo_cache / f"demo-{demo.VERSION}"


def demo_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the demo model in a cache at `folder`."""
    monkeypatch.setenv("WARMROUTE_CACHE_DIR", str(folder))
    return folder / f"demo-{demo.VERSION}"


def test_the_files_are_the_same_on_every_machine(folder: Path) -> None:
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in sorted(folder.iterdir())}
    assert digests == DIGESTS
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == demo.SIZES
    assert sum(file.stat().st_size for file in folder.iterdir()) < LARGEST_BYTES


def test_it_lies_in_the_users_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = tmp_path / "warmroute" / f"demo-{demo.VERSION}"
    expected.parent.mkdir()
    expected.symlink_to(folder)  # so that it need not be made
    assert demo_folder() == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").symlink_to(tmp_path)
    assert demo_folder() == tmp_path / ".cache" / "warmroute" / f"demo-{demo.VERSION}"


def test_two_processes_that_make_it_at_once_both_get_it(tmp_path: Path) -> None:
    """Neither sees an incomplete folder."""
    script = "from replica.model.demo import demo_folder; print(demo_folder())"
    command = [sys.executable, "-c", script]
    environment = os.environ | {"WARMROUTE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    makers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    expected = tmp_path / f"demo-{demo.VERSION}"
    wait_until(expected.is_dir, "one of them has made it")
    assert {file.name for file in expected.iterdir()} == set(DIGESTS)
    assert [maker.communicate(timeout=40)[0].strip() for maker in makers] == [str(expected)] * 2
    assert [maker.returncode for maker in makers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [expected.name]


def test_a_cache_without_a_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE_DIR", "~no such user/x")
    with pytest.raises(ValueError, match="'~no such user/x' has no home folder; set WARMROUTE_CACHE_DIR to a"):
        demo_folder()


def test_a_place_that_cannot_be_written_to_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    demo_in(tmp_path / "file" / "cache", monkeypatch)
    with pytest.raises(OSError, match=r"Not a directory.*; set WARMROUTE_CACHE_DIR to a folder that can be written to"):
        demo_folder()
