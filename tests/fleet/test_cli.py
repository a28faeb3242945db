"""The dispatcher, run as users run it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.cli import COMMANDS, warmroute

DISPATCH = """
import sys
from events.lazy import LazyCommand
from fleet import cli
cli.warmroute.add_command(LazyCommand("probe", "probe_cli:probe", "A command that only this test has."))
cli.main()
"""

PROBE = """
import click

@click.group()
def probe() -> None: ...

@probe.command()
def tree() -> None:
    {body}
"""


def run_probe(folder: Path, body: str, *arguments: str, heading: str = "") -> subprocess.CompletedProcess[str]:
    """Run `warmroute probe tree`, a command made of this body."""
    (folder / "probe_cli.py").write_text(heading + PROBE.format(body=body))
    return run("-c", DISPATCH, *(arguments or ("probe", "tree")), folder=folder)


def run(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, with the folder first on its search path."""
    env = os.environ | environment | ({"PYTHONPATH": str(folder)} if folder else {})
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=30)


def test_help_lists_every_command_of_the_table() -> None:
    output = CliRunner().invoke(warmroute, ["--help"], terminal_width=100).output
    for name, (_, short_help) in COMMANDS.items():
        assert f"{name} " in output
        assert short_help in output


def test_version_is_the_installed_distribution() -> None:
    finished = run("-m", "fleet", "--version")
    assert finished.stdout == f"warmroute {version('warmroute')}\n"
    assert finished.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_top_level_options_import_no_sub_command(arguments: list[str]) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        f"from fleet.cli import main\nmain({arguments!r})"
    )
    finished = run("-c", code)
    assert finished.returncode == 0
    loaded = set(json.loads(finished.stderr))
    assert "fleet.cli" in loaded
    assert loaded.isdisjoint(
        {"zmq", "rich", "msgspec", "xxhash", "fastapi", "numpy", "events.cli", "events.messages", "lab"}
    )


HEAVY = {"fastapi", "httpx2", "jinja2", "prometheus_client", "ray", "rich", "starlette", "torch", "uvloop"}


@pytest.mark.parametrize(
    "arguments", [["up", "--help"], ["up", "--follow"], ["router", "--help"], ["replica", "--help"]]
)
def test_help_and_refusals_of_servers_import_no_server(arguments: list[str]) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        f"from fleet.cli import main\nmain({arguments!r})"
    )
    imported = json.loads(run("-c", code).stderr.splitlines()[-1])
    assert "click" in imported
    assert {name.partition(".")[0] for name in imported} & HEAVY == set()
    assert "router.core" not in imported
    assert "fleet.control.controller" not in imported


def test_a_sub_command_runs_and_its_int_is_the_exit_status(tmp_path: Path) -> None:
    finished = run_probe(tmp_path, "click.echo('ran'); return 3")
    assert (finished.returncode, finished.stdout) == (3, "ran\n")


def test_completing_a_command_name_imports_no_sub_command(tmp_path: Path) -> None:
    (tmp_path / "probe_cli.py").write_text("raise RuntimeError('imported')")
    environment = {"_WARMROUTE_COMPLETE": "bash_complete", "COMP_WORDS": "warmroute prob", "COMP_CWORD": "1"}
    finished = run("-c", DISPATCH, folder=tmp_path, **environment)
    assert finished.stdout == "plain,probe\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    finished = run("-m", "fleet", "evnets")
    assert finished.returncode == 2
    assert "No such command 'evnets'. Did you mean 'events'?" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_missing_extra_is_named_with_its_install_command(tmp_path: Path) -> None:
    block = "import sys; sys.modules['safetensors'] = None\n"
    finished = run_probe(tmp_path, "import safetensors", heading=block)
    assert finished.returncode == 1
    assert finished.stderr == (
        "warmroute probe needs safetensors, which is not installed. Install it with: pip install 'warmroute[replica]'\n"
    )


def test_a_broken_extra_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise ImportError('libfoo.so: not found', name='safetensors._rust')")
    finished = run_probe(tmp_path, "import safetensors")
    assert finished.returncode == 1
    assert finished.stderr == (
        "warmroute probe needs safetensors, which is broken: libfoo.so: not found. "
        "Install it with: pip install 'warmroute[replica]'\n"
    )


@pytest.mark.parametrize("name", ["events", "lab"])
def test_a_foreign_package_is_named_instead_of_a_strange_import_error(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    finished = run("-P", "-m", "fleet", "--version", folder=tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"Error: warmroute's {name} is hidden by {tmp_path}/{name}.py. Install")
    assert finished.stderr.count("\n") == 1


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    assert run("-P", "-m", "fleet", "--version", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "bug",
    [
        "import numqy",
        "from fleet import nothing_of_this_name",
        "import rich; rich.call_back(lambda: __import__('fleet.nothing'))",
    ],
)
def test_an_import_error_of_our_own_keeps_its_traceback(tmp_path: Path, bug: str) -> None:
    (tmp_path / "rich.py").write_text("def call_back(ours): ours()")
    finished = run_probe(tmp_path, bug)
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert "Install it with" not in finished.stderr


def test_ctrl_c_exits_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "probe_cli.py").write_text(
        PROBE.format(body="import signal; print('ready', flush=True); signal.pause()")
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", DISPATCH, "probe", "tree"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("body", ["print('x')", "[click.echo('x' * 9999) for _ in range(99)]"])
def test_a_closed_pipe_is_quiet(tmp_path: Path, body: str) -> None:
    (tmp_path / "probe_cli.py").write_text(PROBE.format(body=body))
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""}  # the first body is flushed last
    command = [sys.executable, "-c", DISPATCH, "probe", "tree"]
    finished = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30)
    os.close(writer)
    assert finished.returncode == 1
    assert finished.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_to_fail(closed: str) -> None:
    command = f'exec "$0" -m fleet --version {closed}'
    finished = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=30)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_reported_in_one_line(unbuffered: str) -> None:
    command = [sys.executable, "-m", "fleet", "--help"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        finished = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert (finished.returncode, finished.stderr) == (1, "Error: cannot write the output: No space left on device\n")
