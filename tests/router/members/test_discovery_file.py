"""The file of replicas: its format, changes and mistakes."""

import logging
import os
from pathlib import Path

import pytest

from router.members.discovery.desired import Desired
from router.members.discovery.file import FileDiscovery, parse_replicas
from router.members.spec import parse_replica
from tests.router.kubernetes_api import following
from tests.router.loopback import until

GOOD = """
[[replicas]]
url = "http://h:1"
name = "a"
engine = "vllm"
events = "tcp://h:2"

[[replicas]]
url = "http://h:3"
"""


def wanted(*texts: str) -> Desired:
    return {spec.name: spec for spec in map(parse_replica, texts)}


def test_each_table_is_a_replica() -> None:
    expected = wanted("http://h:1,name=a,engine=vllm,events=tcp://h:2", "http://h:3")
    assert parse_replicas("f.toml", GOOD) == expected
    assert parse_replicas("f.toml", "replicas = [{url = 'http://h:3'}]") == wanted("http://h:3")
    assert parse_replicas("f.toml", "") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "f.toml is not TOML: Invalid value (at"),
        ("replica = 1", "f.toml: 'replica' is not known here; write one [[replicas]] for each replica"),
        ("replicas = 1", "f.toml: replicas is not a list; write [[replicas]]"),
        ("[replicas]\nurl = 'http://h:1'", "f.toml: replicas is not a list"),
        (f"{GOOD}\n[[replicas]]\nurl = 'h'", "f.toml, line 11: url is 'h'"),
        (f"{GOOD}\n[[replicas]]\nurl = 'http://h:3'", "f.toml, line 11: another replica is named 'h:3';"),
        (
            "\n [[ replicas ]]\nevent = 'x'",
            "f.toml, line 2: 'event' in 'the replica' is not a key of a replica; did you",
        ),
        ("replicas = [{url = 'h'}]", "f.toml, replica 1: url is 'h'"),
        ("replicas = ['http://h:1']", "f.toml, replica 1: 'http://h:1' is not a table"),
    ],
)
def test_an_error_names_file_and_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_replicas("f.toml", text)
    assert str(caught.value).startswith(said)


def test_a_broken_file_keeps_the_last_good_list_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "replicas.toml"
    path.write_text(GOOD)
    file = FileDiscovery(str(path))
    assert file.read_if_changed() == parse_replicas("f", GOOD)
    assert file.read_if_changed() is None
    path.write_text("broken = ")
    assert [file.read_if_changed() for _ in range(3)] == [None] * 3
    problems = [file.problem]
    path.unlink()
    assert [file.read_if_changed() for _ in range(3)] == [None] * 3
    problems.append(file.problem)
    path.write_text(GOOD)
    assert [file.read_if_changed() for _ in range(2)] == [None, parse_replicas("f", GOOD)]
    problems.append(file.problem)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "is not TOML" in (problems[0] or "")
    assert problems[1:] == [f"cannot read {str(path)!r}: No such file or directory", None]
    assert said[0].endswith("keeping what it named before") and said[2].endswith("can be read again")


def test_a_file_of_the_same_length_and_time_is_seen_when_it_was_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "replicas.toml", tmp_path / "other"
    path.write_text("[[replicas]]\nurl = 'http://h:1'")
    other.write_text("[[replicas]]\nurl = 'http://h:2'")
    os.utime(path, ns=(5, 5))
    os.utime(other, ns=(5, 5))
    file = FileDiscovery(str(path))
    assert file.read_if_changed() == wanted("http://h:1")
    other.replace(path)
    assert [file.read_if_changed() for _ in range(2)] == [None, wanted("http://h:2")]


async def test_a_change_is_told(tmp_path: Path) -> None:
    path = tmp_path / "replicas.toml"
    path.write_text(GOOD)
    async with following(FileDiscovery(str(path), interval_s=0.01)) as said:
        await until(lambda: said, "it is read")
        path.write_text("[[replicas]]\nurl = 'http://h:5'")
        await until(lambda: len(said) == 2, "it is read again")
        assert said[-1] == wanted("http://h:5")
