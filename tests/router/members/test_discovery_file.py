"""The file of replicas: its format, changes and mistakes."""

import os
from pathlib import Path

import pytest

from router.members.spec import Desired, parse_replica, parse_replicas
from router.members.watched_file import LastGood

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


def watched(path: Path) -> LastGood[Desired]:
    return LastGood(str(path), parse_replicas, "replicas")


def test_a_broken_file_keeps_the_last_good_list_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replicas.toml"
    path.write_text(GOOD)
    file = watched(path)
    assert [file.look(), file.look()] == [parse_replicas("f", GOOD), None]
    path.write_text("broken = ")
    assert [file.look() for _ in range(3)] == [None] * 3
    problems = [file.problem]
    path.unlink()
    assert [file.look() for _ in range(3)] == [None] * 3
    problems.append(file.problem)
    path.write_text(GOOD)
    assert [file.look(), file.look()] == [None, parse_replicas("f", GOOD)]
    assert "is not TOML" in (problems[0] or "")
    assert [*problems[1:], file.problem] == [f"cannot read {str(path)!r}: No such file or directory", None]
    first, _, last = caplog.messages
    assert first.endswith("keeping the previous replicas") and last.endswith("can be used again")


def test_a_file_of_the_same_length_and_time_is_seen_when_it_was_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "replicas.toml", tmp_path / "other"
    path.write_text("[[replicas]]\nurl = 'http://h:1'")
    other.write_text("[[replicas]]\nurl = 'http://h:2'")
    os.utime(path, ns=(5, 5))
    os.utime(other, ns=(5, 5))
    file = watched(path)
    assert file.look() == wanted("http://h:1")
    other.replace(path)
    assert [file.look(), file.look()] == [None, wanted("http://h:2")]
