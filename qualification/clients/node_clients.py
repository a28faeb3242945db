"""Environments of clients in Node: one folder of packages for each, made by npm from a file of exact versions."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from qualification.clients.rows import Client

PROGRAMS = Path(__file__).with_name("node")
REPORTER = ("--test", "--test-concurrency=1", "--test-reporter=junit")
QUIET = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")


def requirements(name: str) -> Path:
    """Return the file with the exact versions of a client and what its program uses."""
    return PROGRAMS / f"{name}.json"


def version(name: str, client: Client) -> str:
    """Return the client's pinned version."""
    pinned: Any = json.loads(requirements(name).read_text())["dependencies"]
    return str(pinned[client.packages[0]])


def update(folder: Path, name: str, client: Client) -> None:
    """Pin the newest versions."""
    versions: dict[str, str] = {}
    for package in client.packages:
        asked = ("npm", "view", "--json", f"{package}@latest", "version")
        told = subprocess.run(asked, check=True, capture_output=True, cwd=folder)
        versions[package] = json.loads(told.stdout)
    requirements(name).write_text(json.dumps({"private": True, "dependencies": versions}, indent=1) + "\n")


def is_installed(folder: Path, name: str) -> bool:
    done = folder / name / ".installed"
    return done.exists() and done.read_text() == requirements(name).read_text()


def install(folder: Path, name: str) -> None:
    """Put the packages into the client's folder."""
    pinned = requirements(name).read_text()
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "package.json").write_text(pinned)
    # Some packages try themselves when they are installed, and make folders where their settings would be.
    home = folder / name / "home"
    home.mkdir(exist_ok=True)
    homes = dict.fromkeys(("TMPDIR", *(f"XDG_{kind}_HOME" for kind in ("CACHE", "CONFIG", "DATA", "STATE"))), str(home))
    subprocess.run(("npm", "install", *QUIET), cwd=folder / name, env=os.environ | homes, check=True)
    (folder / name / ".installed").write_text(pinned)


def command(folder: Path, name: str, report: Path) -> list[str]:
    """Return the command that runs the client's program."""
    packages, program = folder / name / "node_modules", PROGRAMS / f"with_{name.replace('-', '_')}.cjs"
    told = ("env", f"NODE_PATH={packages}", "node", *REPORTER, f"--test-reporter-destination={report}", program)
    return [str(part) for part in told]
