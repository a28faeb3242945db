"""The router's image holds all that it needs: it works as process 1, as its user, on a read-only system.

Its stages run over this machine's file system (`qualification.images.building`): the image itself is not built.
"""

import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qualification.images.base import PYTHON
from qualification.images.building import Builder, Container, why_not
from qualification.images.dockerfile import ROOT, read
from qualification.images.figures import PLACE, mebibytes, packages, site_packages
from qualification.images.trying import health_check
from tests.events.processes import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

DOCKER = read()
OF_ENGINES = {"torch", "ray", "numpy", "llguidance", "safetensors", "transformers"}
OF_INSTALLING = {"pip", "setuptools", "wheel", "hatchling", "virtualenv"}
STARTS_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    builder = Builder(DOCKER, tmp_path_factory.mktemp("build"), {})
    layer = builder.layer("router")
    assert builder.left_out == []
    return layer


@pytest.fixture
def started(layer: Path) -> Iterator[Callable[..., Container]]:
    """The image with these arguments, or with its own command."""
    containers: list[Container] = []

    def start(*arguments: str) -> Container:
        containers.append(Container(DOCKER, "router", layer, arguments or None))
        return containers[-1]

    yield start
    for container in containers:
        container.close()


def answers(container: Container) -> bool:
    assert container.running, container.wait(1)
    return container.execute(*health_check(DOCKER, "router")).returncode == 0


def test_it_holds_the_pinned_packages_and_nothing_that_it_does_not_need(layer: Path) -> None:
    there = packages(layer)
    assert not (OF_ENGINES | OF_INSTALLING) & there.keys()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert there.pop("warmroute") == project["version"]
    assert {name: version for name, version in there.items() if pinned.get(name) != version.lower()} == {}
    assert {"fastapi", "huggingface-hub", "opentelemetry-sdk", "tokenizers", "uvloop"} <= there.keys()


def test_the_page_says_how_large_it_is(layer: Path) -> None:
    """About: versions of Python differ by a little."""
    [(count, size)] = re.findall(
        r"\| `router` \|.*\| (\d+) packages, (\d+) MiB \|", (ROOT / "docs/images.md").read_text()
    )
    assert abs(len(packages(layer)) - int(count)) <= 1
    assert abs(mebibytes(layer / PLACE) / int(size) - 1) < 0.05


def test_it_has_no_pip(layer: Path, started: Callable[..., Container]) -> None:
    library = layer / "usr/local/lib" / PYTHON
    assert library.is_dir()
    assert not [path for path in library.rglob("*") if re.fullmatch(r"(ensure)?pip(-.*)?", path.name)]
    container = started()
    wait_until(lambda: answers(container), "it serves")
    assert container.execute("python", "-m", "pip").stderr.endswith("No module named pip\n")


def test_all_code_is_compiled(layer: Path) -> None:
    """On a read-only file system it never would be, and every start would take seconds more."""
    sources = list(site_packages(layer).rglob("*.py"))
    assert len(sources) > 1000
    cached = {file.name.partition(".")[0] for file in site_packages(layer).rglob("*.pyc")}
    assert [file for file in sources if file.stem not in cached] == []


def test_everything_belongs_to_root(layer: Path) -> None:
    """The server's user cannot change the code that it runs."""
    assert {path.stat(follow_symlinks=False).st_uid for path in (layer / PLACE).rglob("*")} == {0}


def test_it_says_its_version_and_its_help(started: Callable[..., Container]) -> None:
    status, said = started("--version").wait(STARTS_WITHIN_S)
    assert (status, said.startswith("warmroute ")) == (0, True)
    status, said = started("router", "--help").wait(STARTS_WITHIN_S)
    assert (status, "--kubernetes-pods" in said) == (0, True)


def test_its_own_command_serves_as_an_ordinary_user_where_nothing_can_be_written(
    started: Callable[..., Container],
) -> None:
    container = started()
    wait_until(lambda: answers(container), "it serves")
    assert container.execute("id", "-u").stdout == "10001\n"
    written = container.execute("touch", "/opt/warmroute/x")
    assert (written.returncode, "Read-only file system" in written.stderr) == (1, True)
    assert re.fullmatch(r"/tmp/warmroute-router-\w+/lock\n", container.execute("find", "/tmp", "-type", "f").stdout)
    wrong_port = [word.replace("8000", "8001") for word in health_check(DOCKER, "router")]
    assert container.execute(*wrong_port).returncode == 1


def test_as_process_1_it_ends_when_it_is_told_to(started: Callable[..., Container]) -> None:
    """The kernel drops signals that process 1 has no handler for, so without one this took until SIGKILL."""
    container = started()
    wait_until(lambda: answers(container), "it serves")
    container.signal(signal.SIGTERM)
    status, said = container.wait(10)
    assert (status, "router on http://0.0.0.0:8000\n" in said) == (0, True)


def test_it_fetches_a_tokenizer_without_root(started: Callable[..., Container]) -> None:
    status, said = started("fetch", "demo", "/models/demo", "--tokenizer-only").wait(STARTS_WITHIN_S)
    assert (status, "'/models/demo' holds demo-1: 5 files" in said) == (0, True), said
    status, said = started("fetch", "demo", "/data/demo", "--tokenizer-only").wait(STARTS_WITHIN_S)
    assert status == 1
    assert "cannot put files into '/data/demo': Read-only file system" in said
