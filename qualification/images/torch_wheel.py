"""PyTorch's CPU build from a folder of wheels (`PIP_FIND_LINKS`), where its index cannot be reached."""

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from qualification.images import base
from qualification.images.dockerfile import ROOT
from qualification.images.podman import BASE

INDEX, WHEELS = "/torch-index", "/torch-wheels"  # in the build


def wheel(environment: Mapping[str, str]) -> Path | None:
    """The pinned version's, for this machine; None if there is no such folder, or nothing in it."""
    [version] = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    folders = environment.get("PIP_FIND_LINKS", "").split()
    found = (each for folder in folders for each in Path(folder).glob(f"torch-{version}+cpu-*{platform.machine()}.whl"))
    return next(found, None)


def base_for(found: Path | None) -> str:
    """The base that has the Python which the wheel is for."""
    tag = re.search(r"-cp3(\d+)-", found.name) if found else None
    return base.image(f"3.{tag[1]}") if tag else BASE


def build_options(found: Path | None, folder: Path) -> list[str]:
    """For `podman build`: an index with this wheel alone, in place of PyTorch's own."""
    if found is None:
        return []
    page = folder / "torch" / "index.html"
    page.parent.mkdir()
    page.write_text(f'<a href="file://{WHEELS}/{quote(found.name)}">{found.name}</a>\n')
    folders = [f"--volume={folder}:{INDEX}:ro", f"--volume={found.parent}:{WHEELS}:ro"]
    return [*folders, f"--build-arg=TORCH_INDEX=file://{INDEX}"]
