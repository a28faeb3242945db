"""Podman's command line: images and containers of a test."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qualification.images.dockerfile import ROOT, read

BASE = os.environ.get("WARMROUTE_PYTHON_IMAGE") or read().arguments["PYTHON_IMAGE"]
CERTIFICATES = Path("/etc/ssl/certs")
PIP = Path("/etc/pip.conf")
MAKE_BASE = "python3.12 -m qualification.images.base"


def why_not() -> str | None:
    """Reason why no container can run here, or None."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "containers with addresses of their own need root on Linux"
    if absent := [name for name in ("podman", "kubectl", "nft") if shutil.which(name) is None]:
        return f"there is no {absent[0]}"
    return None if is_there(BASE) else f"there is no image {BASE}: `podman pull {BASE}`, or `{MAKE_BASE}`"


def is_there(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout


def succeeds(container: str, script: str) -> bool:
    done = subprocess.run(["podman", "exec", container, "sh", "-euc", script], capture_output=True, check=False)
    return done.returncode == 0


def build(file: Path, target: str, tag: str, base: str = BASE, more: Sequence[str] = ()) -> str:
    """Build with this machine's pip settings and certificates, which the image does not keep."""
    where = ["--network=host", f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"]
    where += [f"--secret=id=pip,src={PIP}"] if PIP.exists() else []
    # Images of the format OCI have no health checks.
    what = ("--format=docker", "--pull=never", f"--build-arg=PYTHON_IMAGE={base}", f"--target={target}")
    podman("build", "--quiet", *what, *where, *more, f"--file={file}", f"--tag={tag}", str(ROOT))
    return tag


def inspect(kind: str, name: str) -> dict[str, Any]:
    [found] = json.loads(podman(kind, "inspect", name))
    return dict(found)
