"""Files that are read by a given name: pipes, devices, and files that are only half there."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.process.settings import FILE
from fleet.cli import warmroute
from replica.settings.options import TABLE as REPLICA
from router.members.spec import parse_replicas
from router.members.watched_file import LastGood, WatchedFile
from router.process.settings import TABLE as ROUTER
from router.prompts.model_rewrites import parse_rewrites

TWO = """
[[replicas]]
url = "http://127.0.0.1:1"

[[replicas]]
url = "http://127.0.0.1:2"
"""
HALF = TWO[: TWO.rindex("[[")]
FILES = [
    (command, setting.option)
    for command, table in (("router", ROUTER), ("replica", REPLICA))
    for setting in table.all.values()
    if setting.type is FILE
]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(("command", "option"), [*FILES, *((each, "--config") for each in ("up", "router", "replica"))])
def test_a_pipe_is_refused_where_a_file_is_named(command: str, option: str, pipe: Path) -> None:
    answer = CliRunner().invoke(warmroute, [command, option, str(pipe)])
    assert answer.exit_code == 2
    assert f"{str(pipe)!r} is not a regular file" in answer.output or f"{pipe} is not a regular file" in answer.output


def test_the_files_that_a_router_reads_are_among_them() -> None:
    assert {("router", each) for each in ("--api-keys", "--replicas-file", "--model-rewrites", "--tls-key")} <= set(
        FILES
    )


def test_a_watched_file_that_becomes_a_pipe_or_a_device_holds_nobody_up(tmp_path: Path, pipe: Path) -> None:
    name, caught = tmp_path / "rewrites.toml", []
    name.write_text("")
    watched = LastGood(str(name), parse_rewrites, "rewrites")
    assert watched.look() is not None
    for other in (pipe, Path("/dev/zero")):
        name.unlink()
        name.symlink_to(other)
        caught += [watched.look(), watched.look()]
        assert watched.problem is not None and "is not a regular file" in watched.problem
    assert caught == [None] * 4


def test_a_replicas_file_that_is_being_written_removes_nobody(tmp_path: Path) -> None:
    path = tmp_path / "replicas.toml"
    path.write_text(TWO)
    watched = LastGood(str(path), parse_replicas, "replicas")

    def names(looks: int = 1) -> list[int | None]:
        return [None if found is None else len(found) for found in (watched.look() for _ in range(looks))]

    assert names() == [2]
    with path.open("w") as file:  # which truncates it
        assert names(5) == [None] * 5
        file.write(HALF)
        file.flush()
        assert names() == [None]
        file.write(TWO[len(HALF) :])
    assert names(3) == [None, 2, None]

    new = tmp_path / "new"
    new.write_text(HALF)
    new.replace(path)
    assert names(3) == [None, 1, None]
    path.write_text("# nobody is meant")
    assert names(3) == [None, 0, None]


def test_a_file_that_was_away_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    watched = WatchedFile(str(path))
    assert watched.read_if_changed() == "one"
    path.unlink()
    with pytest.raises(ValueError, match="cannot read"):
        watched.read_if_changed()
    path.write_text("t")
    assert watched.read_if_changed() is None
    path.write_text("two")
    assert [watched.read_if_changed() for _ in range(3)] == [None, "two", None]
