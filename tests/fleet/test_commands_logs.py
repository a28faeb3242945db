"""`warmroute logs`: the end of a log, and its new lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.commands.logs import last_lines, logs, news
from tests.fleet.scripted import Script, refusal, run

pytestmark = pytest.mark.usefixtures("noted_in")

GONE = refusal(404, "there is no replica 'demo-0'; there are none")


def test_the_log_is_printed_as_it_is(script: Script) -> None:
    script.logs = ["one\n[bold]two[/bold] ü\n"]
    ran = run(logs, "demo-0", "--lines", "7", "--fleet", script.url)
    assert ran.output == "one\n[bold]two[/bold] ü\n"
    assert script.asked[0].path == "/replicas/log?replica=demo-0&lines=7"


@pytest.mark.parametrize(("log", "output"), [("", ""), ("cut off", "cut off\n")])
def test_output_ends_with_its_last_line(script: Script, log: str, output: str) -> None:
    script.logs = [log]
    assert run(logs, "demo-0", "--fleet", script.url).output == output


def test_a_replica_that_does_not_exist_is_the_controllers_to_explain(script: Script) -> None:
    script.logs = [GONE]
    ran = run(logs, "demo-0", "--fleet", script.url)
    assert (ran.status, ran.errors) == (1, "there is no replica 'demo-0'; there are none")


def test_following_prints_what_is_new_until_the_replica_is_gone(script: Script) -> None:
    script.logs = ["1\n2\n3\n", "1\n2\n3\n", "1\n2\n3\n4\nha", "3\n4\nhalf\n5\n", GONE]
    ran = run(logs, "demo-0", "--lines", "2", "--follow", "--fleet", script.url)
    assert ran.output == "2\n3\n4\nhalf\n5\n"
    assert ran.errors == "Note: demo-0 is gone\n"


def test_following_continues_when_its_host_answers_again(script: Script) -> None:
    away = refusal(503, "its host does not answer: x")
    script.logs = ["1\n", away, away, "1\n2\n", away, "1\n2\n3\n", GONE]
    ran = run(logs, "demo-0", "--follow", "--fleet", script.url)
    assert ran.output == "1\n2\n3\n"
    assert ran.errors.count("Note: no answer (its host does not answer: x); retrying\n") == 2


def test_a_log_that_restarted_is_shown_from_its_beginning() -> None:
    assert news("a\nb\n", "x\ny\n") == "x\ny\n"
    assert news("", "x\n") == "x\n"
    assert news("a\n", "") == ""


@given(st.data())
def test_what_is_shown_piece_by_piece_is_the_log(data: st.DataObject) -> None:
    """However it was cut, as long as no more is written between two looks than is looked at."""
    lines = data.draw(st.integers(1, 6))
    words = data.draw(st.lists(st.text("ab ", max_size=4), max_size=40))
    log = "".join(f"{number} {word}\n" for number, word in enumerate(words))
    shown, seen, end = "", "", 0
    while end < len(log):
        most = log[end:].splitlines(keepends=True)[: lines - 1 or 1]
        end += data.draw(st.integers(1, max(1, len("".join(most)) - (lines == 1))))
        now = last_lines(log[:end], lines)
        if lines == 1 and "\n" in seen[-1:]:
            return  # a window of one line loses its anchor when that line is complete
        shown += news(seen, now)
        seen = now
    assert shown == log
