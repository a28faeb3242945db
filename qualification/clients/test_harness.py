"""The runner of clients, as far as it needs none of them."""

import json
import sys
from pathlib import Path

import pytest

from qualification.clients import running
from qualification.clients.rows import CLIENTS
from qualification.clients.scripted import hits
from qualification.clients.serving import Serving
from qualification.clients.verdicts import RESULTS, Check, Verdict, read

REPORT = """<testsuites><testsuite name="pytest">
<testcase name="test_chat"/>
<testcase name="test_a_stream"><failure message="assert 1 == 2">long</failure></testcase>
<testcase name="test_tools"><error message="failed on setup">long</error></testcase>
<testcase name="test_images"><skipped message="no model"/></testcase>
</testsuite></testsuites>"""
PROGRAM = """
import os

def test_address():
    assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"

def test_secrets():
    assert "OPENAI_ORG_ID" not in os.environ
"""


class Nobody(Serving):
    """Servers that are not there, with a log of their own."""

    def __init__(self, *faults: str) -> None:
        self.model, self.url, self.faults = Path("model"), "http://127.0.0.1:1", [*faults]

    def new_faults(self) -> list[str]:
        return self.faults


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this Python is the environment of the client openai, whose program is another one."""
    (tmp_path / "with_openai.py").write_text(PROGRAM)
    (tmp_path / "openai.txt").write_text("openai==1.2.3\n")
    (tmp_path / "openai/bin").mkdir(parents=True)
    (tmp_path / "openai/bin/python").symlink_to(sys.executable)
    monkeypatch.setattr("qualification.clients.python_clients.PROGRAMS", tmp_path)
    monkeypatch.setenv("OPENAI_ORG_ID", "mine")
    return tmp_path


def test_a_report_is_read(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    checks = read(tmp_path / "report.xml")
    assert checks == (
        Check("chat"),
        Check("a stream", error="assert 1 == 2"),
        Check("tools", error="failed on setup"),
        Check("images", skipped="no model"),
    )
    verdict = Verdict("openai", "1.2.3", checks, 4.4)
    assert [*verdict.lines] == [
        "openai               1.2.3             1      4   (4 s)",
        "    a stream: assert 1 == 2",
        "    tools: failed on setup",
        "    images: skipped: no model",
    ]


def test_a_hit_has_to_be_as_long_as_predicted_and_a_later_turn_has_to_have_one() -> None:
    first: dict[str, int] = {"prompt_tokens": 100}
    second = {"prompt_tokens": 120, "predicted_tokens": 96, "cached_tokens": 96}
    found = hits([first, second])
    assert (found.error, found.found) == (None, "0 predicted, 0 found of 100; 96 predicted, 96 found of 120")
    assert hits([first, second | {"cached_tokens": 80}]).error
    assert hits([first, first]).error


def test_a_program_runs_with_the_routers_address_and_without_the_users_settings(here: Path) -> None:
    verdict = running.run("openai", here, Nobody())
    assert verdict.version == "1.2.3"
    assert verdict.checks == (Check("address"), Check("secrets"))


def test_a_fault_in_a_servers_log_is_a_failed_check(here: Path) -> None:
    [check] = running.run("openai", here, Nobody("Traceback (most recent call last):\n")).failed
    assert check.name == "logs of the servers"


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_has_a_program_and_a_pinned_version(name: str) -> None:
    client = CLIENTS[name]
    kit = running.LANGUAGES[client.language]
    assert kit.version(name, client)
    assert Path(kit.command(Path("there"), name, Path("report.xml"))[-1]).is_file()


def test_the_results_are_those_of_the_pinned_versions() -> None:
    for row in json.loads(RESULTS.read_text()):
        client = CLIENTS[row["client"]]
        assert row["version"] == running.LANGUAGES[client.language].version(row["client"], client), row["client"]
