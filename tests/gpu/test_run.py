"""The check for a GPU runs to its end without one, and reports faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu.kit import ROOT
from tests.gpu.report import Report, Row, Section, Table, markdown, read
from tests.gpu.run import NAMES
from tests.gpu.throughput import LONGEST, REQUESTS, requests

SCRIPT = ("-m", "tests.gpu.run")
QUICK = ("--quick", "--device", "cpu")
# A kernel that is wrong.
WRONG = """
from kernels.plain import PlainAttention
attend = PlainAttention.attend
PlainAttention.attend = lambda own, q, cache, step: attend(own, q, cache, step) if step.prefilling else q.clone()
from tests.gpu.run import main
main()
"""


class Ran(NamedTuple):
    status: int
    said: str
    results: Any
    markdown: str

    def section(self, name: str) -> Any:
        return next(section for section in self.results["sections"] if section["name"] == name)


def run(out: Path, *arguments: str, script: tuple[str, ...] = SCRIPT) -> Ran:
    command = [sys.executable, *script, "--out", str(out), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=560)
    assert (out / "results.json").is_file(), ended.stderr
    return Ran(ended.returncode, ended.stdout + ended.stderr, read(out), (out / "results.md").read_text())


@pytest.mark.timeout(300)
@pytest.mark.grid
def test_all_of_it_runs_to_the_end_without_a_gpu(tmp_path: Path) -> None:
    ran = run(tmp_path / "made" / "here", *QUICK)
    sections = ran.results["sections"]
    assert [(one["name"], one["status"], one["error"]) for one in sections] == [(name, "passed", "") for name in NAMES]
    assert ran.status == 0 and ran.results["failed"] is False, ran.said
    assert all(len(one["rows"]) > 1 and one["seconds"] < 200 for one in sections)
    rows = [row for one in sections for row in one["rows"]]
    assert all(row["met"] for row in rows if row["must"]) and sum(row["must"] for row in rows) > 20
    assert not any(row["met"] is False for row in rows), "a CPU's figures were compared with a GPU's targets"
    assert ran.markdown.count("| measured | target |") == len(NAMES) and "(not met)" not in ran.markdown
    assert "device CPU" in ran.markdown and {"torch", "date", "Python"} <= ran.results["header"].keys()


@pytest.mark.timeout(120)
@pytest.mark.grid
def test_wrong_kernels_fail_and_the_next_section_continues(tmp_path: Path) -> None:
    ran = run(tmp_path, *QUICK, "--only", "golden", "--only", "throughput", script=("-c", WRONG))
    failed = {row["what"] for row in ran.section("golden")["rows"] if row["must"] and not row["met"]}
    assert ran.status == 1 and ran.results["failed"] is True
    assert "qwen3, float32: as it is" in failed and "qwen3, float32: CPU and transformers" not in failed
    assert ran.section("golden")["status"] == "failed" and ran.section("throughput")["status"] == "passed"
    assert "**FAILED**" in ran.markdown and "golden: failed" in ran.markdown


@pytest.mark.timeout(120)
def test_what_does_not_fit_into_the_budget_is_left_out(tmp_path: Path) -> None:
    ran = run(tmp_path, *QUICK, "--budget", "0")
    assert {section["status"] for section in ran.results["sections"]} == {"skipped"} and ran.status == 0
    assert "kernels: skipped: " in ran.markdown


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--device", "cpu"], "add --quick"), (["--only", "speed"], "'speed' is not one of")]
)
def test_what_makes_no_sense_is_refused(arguments: list[str], expected: str, tmp_path: Path) -> None:
    command = [sys.executable, *SCRIPT, "--out", str(tmp_path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2 and expected in " ".join(ended.stderr.split())


def test_without_a_gpu_it_says_so_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, *SCRIPT, "--out", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ended.returncode == 1 and "torch sees no GPU; use --device cpu --quick" in ended.stderr
    assert read(tmp_path)["header"]["error"] == "torch sees no GPU"


@pytest.mark.gpu
@pytest.mark.timeout(560)
def test_all_is_as_it_must_be_on_a_gpu(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.status == 0, ran.said
    assert all(section["status"] == "passed" for section in ran.results["sections"]), ran.said


# ---- parts of it


def test_the_benchmark_asks_for_what_nano_vllm_asks_for() -> None:
    """133,966 tokens, as its README says."""
    asked = requests(REQUESTS, LONGEST)
    assert sum(one.sampling.max_tokens for one in asked) == 133_966
    assert {len(one.prompt) for one in asked} <= set(range(100, 1025))


def test_a_figure_is_held_against_its_target() -> None:
    rows: list[Row] = []
    for judges in (True, False):
        table = Table(rows.append, judges=judges)
        table.figure("speed", [1.0, 3.0, 2.0], "m/s", least=2.5)
        table.figure("time", [12345.6], "s", "by hand", most=20_000)
    assert [(row.measured, row.target, row.met) for row in rows] == [
        ("**2** m/s (1 to 3)", ">= 2.5", False),
        ("**12,346** s; by hand", "< 20,000", True),
        ("**2** m/s (1 to 3)", "", None),
        ("**12,346** s; by hand", "", None),
    ]
    assert not any(row.failed for row in rows), "a missed target is not a failure"


def test_results_are_whole_whatever_has_run(tmp_path: Path) -> None:
    sections = [
        Section("one", "first", "failed", 1.0, "Traceback\nValueError: broken", [Row("a", "7", "8", False, True)]),
        Section("two", "second"),
    ]
    Report(tmp_path, {"device": "none"}, sections).write()
    assert read(tmp_path)["failed"] is True and [one.name for one in tmp_path.iterdir() if one.suffix == ".part"] == []
    assert (tmp_path / "results.md").read_text() == (
        "device none.\n\n| first | measured | target |\n| --- | --- | --- |\n| a | **FAILED** 7 | 8 |\n\n"
        "one: failed: ValueError: broken\n\ntwo: not run\n"
    )
    assert markdown(Section("x", "y", "passed", rows=[Row("a", "7")]))[-1] == "| a | 7 |  |"
    assert json.loads((tmp_path / "results.json").read_text())["header"] == {"device": "none"}
