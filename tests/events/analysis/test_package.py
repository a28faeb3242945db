"""`kv-events-conform` as its own package has it: built, alone beside its three dependencies, before real sockets."""

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from events.analysis.points import POINTS
from tests.docs.pages import ROOT
from tests.events.analysis.test_conformance import ALSO, LIVE_VIOLATIONS, STREAM
from tests.events.tool.test_conform import engine

pytestmark = pytest.mark.chaos

BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
RUN = "import sys; from events.analysis.grading import main; sys.argv[0] = 'kv-events-conform'; main()"
DEPENDENCIES = ("msgspec", "zmq", "pyzmq.libs", "xxhash")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT / "conformance", check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
        [entry] = [name for name in opened.namelist() if name.endswith("entry_points.txt")]
        assert b"kv-events-conform = events.analysis.grading:main" in opened.read(entry)
    spec = find_spec("msgspec")
    assert spec is not None and spec.origin is not None
    packages = Path(spec.origin).parent.parent
    for name in DEPENDENCIES:
        if (packages / name).exists():
            (folder / name).symlink_to(packages / name)
    return folder


def conform(alone: Path, *arguments: str) -> tuple[int, dict[str, str], str]:
    """The status, what failed with its example, and all that was said."""
    environment = {"PYTHONPATH": str(alone), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", RUN, *arguments, "--for", "1", "--json"]
    done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    failed = {line["point"]: line["example"] for line in lines if line.get("state") == "fail"}
    return done.returncode, failed, done.stdout + done.stderr


def test_a_good_stream_passes(alone: Path) -> None:
    with engine(STREAM) as arguments:
        status, failed, said = conform(alone, *arguments)
    assert (status, failed) == (0, {}), said


def test_planted_faults_are_named(alone: Path) -> None:
    def found(name: str) -> tuple[int, dict[str, str], str]:
        with engine(LIVE_VIOLATIONS[name][0]) as arguments:
            return conform(alone, *arguments)

    with ThreadPoolExecutor(4) as pool:
        each = dict(zip(LIVE_VIOLATIONS, pool.map(found, LIVE_VIOLATIONS), strict=True))
    for name, (status, failed, said) in each.items():
        assert (status, failed.keys() - ALSO.get(name, set())) == (1, {name}), said
        assert LIVE_VIOLATIONS[name][1] in failed[name]


def test_nothing_to_grade_and_bad_addresses_have_a_status_of_their_own(alone: Path) -> None:
    status, _, said = conform(alone, "tcp://127.0.0.1:1")
    assert status == 2 and "no message came; nothing answers at tcp://127.0.0.1:1" in said
    status, _, said = conform(alone, "127.0.0.1:5557")
    assert status == 2 and "write tcp://HOST:PORT" in said


def test_the_page_names_every_point() -> None:
    page = " ".join((ROOT / "docs" / "kv-events-spec.md").read_text().split())
    assert [point.name for point in POINTS if f"`{point.name}`" not in page] == []
