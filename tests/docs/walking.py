"""Runs a page's commands in a network namespace of its own, since they use fixed ports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or not all(map(shutil.which, ("unshare", "ip", "curl", "make"))),
    reason="commands use fixed ports, so a page has a network of its own; needs Linux, unshare, ip, curl and make",
)


def walked(page: str, folder: Path) -> None:
    """Run the page's commands as a reader would; raise AssertionError with the output if one fails."""
    told = subprocess.run(
        ["unshare", "--map-root-user", "--net", "--", sys.executable, "-m", "tests.docs.reader", page],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(told.stdout)
    assert told.returncode == 0, told.stdout + told.stderr
