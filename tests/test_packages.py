"""The packages that are published: the same bytes from the same files, and nothing in them that users do not need."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.fleet.test_up import starting

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel

build_wheel(sys.argv[1])
build_sdist(sys.argv[1])
"""
NEEDED = ("api/py.typed", "router/dashboard/static/index.html", "replica/model/demo_files/tokenizer.json")
PACKAGES = {"api", "engines", "events", "fleet", "kernels", "lab", "replica", "router"}


def built(tree: Path, out: Path) -> dict[str, Path]:
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=tree, check=True, capture_output=True)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both, built from a copy of the tracked files."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return built(tree, out)


def test_the_sdist_alone_builds_both_again_to_the_byte(packages: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the times of its files are."""
    with tarfile.open(packages[".gz"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    (tree / "PKG-INFO").unlink()  # hatchling adds it again
    for file in tree.rglob("*"):
        os.utime(file, (1e9, 1e9))
    again = built(tree, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in again.values()} == {
        path.name: path.read_bytes() for path in packages.values()
    }


def test_the_wheel_holds_our_packages_and_their_files(packages: dict[str, Path]) -> None:
    with zipfile.ZipFile(packages[".whl"]) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert set(NEEDED) <= set(names)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_base_install_serves_a_simulated_fleet_and_says_what_a_real_one_needs(
    packages: dict[str, Path], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q", "--no-compile")
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", packages[".whl"]], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "PYTHON"))}
    for command, flag in (("up", "--simulated"), ("replica --model demo", "--model demo --engine simulated")):
        refused = subprocess.run(
            [programs / "warmroute", *command.split()], env=environment, capture_output=True, text=True, check=False
        )
        name = command.partition(" ")[0]
        assert refused.stderr.splitlines()[-2:] == [
            f"warmroute {name} needs torch, which is not installed. Install it with: pip install 'warmroute[replica]'",
            f"Or make up the text of answers, without a model: warmroute {name} {flag}",
        ]
    with starting("--simulated", "--port", "0", program=str(programs / "warmroute")) as running:
        running.wait_for("Ctrl-C ends everything")
        assert running.ask()[1]["choices"][0]["message"]["content"]
        assert running.end() == 0
