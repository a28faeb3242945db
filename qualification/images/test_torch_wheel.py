"""A wheel of PyTorch in a folder takes the place of its index."""

import platform
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from qualification.images.dockerfile import ROOT
from qualification.images.podman import BASE
from qualification.images.torch_wheel import base_for, build_options, wheel

[VERSION] = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
NAME = f"torch-{VERSION}+cpu-cp311-cp311-manylinux_2_28_{platform.machine()}.whl"


@pytest.mark.parametrize("name", [NAME, NAME.replace(VERSION, "1.0"), NAME.replace("+cpu", "")])
def test_only_the_pinned_cpu_build_is_taken(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert wheel({"PIP_FIND_LINKS": f"/nowhere {tmp_path}"}) == (tmp_path / name if name == NAME else None)
    assert wheel({}) is None


def test_its_python_decides_on_the_base(tmp_path: Path) -> None:
    assert base_for(tmp_path / NAME) == "localhost/python:3.11-slim-bookworm"
    assert base_for(None) == BASE


def test_the_index_leads_to_the_wheel(tmp_path: Path) -> None:
    options = build_options(tmp_path / NAME, tmp_path)
    assert "--build-arg=TORCH_INDEX=file:///torch-index" in options
    assert f"--volume={tmp_path}:/torch-wheels:ro" in options
    [link] = re.findall('href="([^"]+)"', (tmp_path / "torch" / "index.html").read_text())
    assert unquote(link) == f"file:///torch-wheels/{NAME}"
    assert build_options(None, tmp_path) == []
