"""Environments of clients in Python: one for each, made by uv from a file of pinned versions."""

import re
import subprocess
import sys
from pathlib import Path

from qualification.clients.rows import Client
from qualification.engines.setup import uv

PROGRAMS = Path(__file__).with_name("python")
RUNNER = "pytest"  # in each environment, as the reporter
TORCH = "torch==2.13.0"  # named exactly, because an index may have builds of gigabytes for newer ones
OLDEST_PYTHON = "3.11"
PYTEST = (
    *("-c", "/dev/null", "--rootdir", PROGRAMS, "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("--tb=short", "-q", "-o", "junit_family=xunit2"),
)


def requirements(name: str) -> Path:
    """Return the file with the pinned versions of a client and all that it needs."""
    return PROGRAMS / f"{name}.txt"


def version(name: str, client: Client) -> str:
    """Return the client's pinned version."""
    package = client.packages[0].partition("[")[0]
    found = re.search(rf"^{re.escape(package)}(?:\[.*\])?==(\S+)", requirements(name).read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(
            f"{requirements(name)} does not pin {package}; run `python -m qualification.clients DIR --update {name}`"
        )
    return found[1]


def update(folder: Path, name: str, client: Client) -> None:
    """Pin the newest versions that fit together."""
    command, environment = uv(folder / "uv")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    asked = "".join(f"{package}\n" for package in (*client.packages, RUNNER))
    options = ("--constraint", constraints, "--python-version", OLDEST_PYTHON, "--no-annotate", "--no-header")
    told = ("pip", "compile", "-q", "--upgrade", "-", "-o", requirements(name), *options)
    subprocess.run((*command, *told), env=environment, input=asked, text=True, check=True)


def is_installed(folder: Path, name: str) -> bool:
    done = folder / name / ".installed"
    return done.exists() and done.read_text() == requirements(name).read_text()


def install(folder: Path, name: str) -> None:
    """Make the environment anew."""
    command, environment = uv(folder / "uv")
    python = folder / name / "bin/python"
    subprocess.run((*command, "venv", "-q", "--clear", "--python", sys.executable, folder / name), check=True)
    told = ("pip", "install", "-q", "--python", python, "-r", requirements(name))
    subprocess.run((*command, *told), env=environment, check=True)
    (folder / name / ".installed").write_text(requirements(name).read_text())


def command(folder: Path, name: str, report: Path) -> list[str]:
    """Return the command that runs the client's program."""
    program = PROGRAMS / f"with_{name.replace('-', '_')}.py"
    return [
        str(part) for part in (folder / name / "bin/python", "-m", RUNNER, *PYTEST, f"--junit-xml={report}", program)
    ]
