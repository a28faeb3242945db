"""Check the Dockerfile's text: pins, users, health checks and copies of existing files only."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from fleet.cli import warmroute
from qualification.images import context
from qualification.images.dockerfile import DOCKERFILE, ROOT, Instruction, health_check, read

DOCKER = read()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
TARGETS = ("router", "replica-cpu", "replica-gpu")
INSTALL = re.compile(r"-m pip (--python \S+ )?install ")
SECRETS = re.compile(r"(?i)(password|passwd|secret|token|api_?key)\s*=")


def command_of(target: str) -> click.Context:
    """The image's command, as its command line is understood."""
    name, *arguments = DOCKER.last(target, "CMD").words
    _, command, _ = warmroute.resolve_command(click.Context(warmroute), [name])
    assert command is not None
    return command.make_context(name, arguments)


def runs() -> list[Instruction]:
    return [each for stage in DOCKER.stages.values() for each in stage.all("RUN")]


def test_hadolint_finds_nothing_and_podman_4_reads_all_commands() -> None:
    """Podman 4 would read the lines of a here-document as instructions."""
    assert [each.line for each in runs() if "<<" in each.value] == []
    hadolint = Path(sys.executable).with_name("hadolint")
    # With a layer for each step the next build can reuse it from its cache.
    found = subprocess.run(
        [str(hadolint), "--no-color", "--ignore", "DL3059", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_every_image_is_built_upon_one_pinned_base_with_a_python_that_is_supported() -> None:
    assert DOCKER.arguments == {"PYTHON_IMAGE": "python:3.12-slim-bookworm", "VLLM_VERSION": "0.33.0"}
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]
    bases = {stage.base for stage in DOCKER.stages.values()} - DOCKER.stages.keys()
    assert bases == {DOCKER.lineage(target)[0].base for target in TARGETS} == {"${PYTHON_IMAGE}"}


def test_vllm_is_that_which_pods_of_their_own_run() -> None:
    engines = (ROOT / "k8s" / "overlays" / "vllm" / "engines.yaml").read_text()
    assert f"image: vllm/vllm-openai:v{DOCKER.arguments['VLLM_VERSION']}\n" in engines


@pytest.fixture
def requirements(tmp_path: Path) -> dict[str, list[str]]:
    """The lists that the build's own command writes."""
    [run] = DOCKER.stages["requirements"].all("RUN")
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", run.value], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    return {file.stem: file.read_text().splitlines() for file in tmp_path.glob("*.txt")}


def test_no_list_of_requirements_names_our_own_package(requirements: dict[str, list[str]]) -> None:
    """An index may have another package of that name."""
    assert requirements.keys() == {"router", "replica", "replica-gpu"}
    assert not [line for lines in requirements.values() for line in lines if line.startswith("warmroute")]
    assert set(PROJECT["dependencies"]) <= set(requirements["replica"])
    left_out = set(PROJECT["dependencies"]) - set(requirements["router"])
    assert {line.partition(">")[0] for line in left_out} == {"numpy"}, "a router computes nothing"


def test_what_comes_beside_vllm_leaves_its_pytorch_alone(requirements: dict[str, list[str]]) -> None:
    torch = [line for line in requirements["replica"] if line not in requirements["replica-gpu"]]
    assert [line.partition(">")[0] for line in torch] == ["torch"]
    stage = DOCKER.stages["replica-gpu-packages"]
    assert stage.base == "vllm-packages"
    made, install, _ = stage.all("RUN")
    assert "vllm.pth" in made.value and "/^torch==/d" in made.value
    assert install.value.endswith("-c constraints.txt -r replica-gpu.txt")
    assert DOCKER.environment("replica-gpu")["PATH"].endswith(":/opt/vllm/bin"), "vllm is not on the PATH of the fleet"


def test_a_file_that_is_not_for_this_python_ends_no_build_of_vllm(tmp_path: Path) -> None:
    """Some dependency may hold such a file; all other files are compiled."""
    [compiling] = [each for each in DOCKER.stages["vllm-packages"].all("RUN") if "compileall" in each.value]
    (tmp_path / "template.py").write_text("print 'for another Python'\n")
    (tmp_path / "good.py").write_text("x = 1\n")
    python = Path(sys.executable)
    command = compiling.value.replace("/opt/vllm/lib", str(tmp_path)).replace("python -m", f"{python} -m")
    assert str(tmp_path) in command and str(python) in command
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert [file.name.partition(".")[0] for file in (tmp_path / "__pycache__").iterdir()] == ["good"]


def test_whatever_is_installed_is_bound_to_the_constraints() -> None:
    installs = [each for each in runs() if INSTALL.search(each.value)]
    assert len(installs) == 6
    own = [each for each in installs if each.value.endswith(" .")]
    assert [("--no-deps" in each.value) for each in own] == [True]
    for each in installs:
        pinned = "-c constraints.txt" in each.value or '"vllm==${VLLM_VERSION}"' in each.value
        assert each in own or pinned, f"line {each.line}"


def test_the_constraints_pin_all_that_is_installed(requirements: dict[str, list[str]]) -> None:
    """This covers the images' direct dependencies; the builds show their transitive dependencies."""
    names = {re.split(r"[\[<>=]", line)[0].lower() for lines in requirements.values() for line in lines}
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in constraints()}
    assert names <= pinned
    assert constraints() == sorted(constraints(), key=lambda line: line.split("==")[0].lower())


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line]


def test_every_copy_has_a_source_that_the_build_gets_to_see() -> None:
    seen = list(context.files())
    for stage in DOCKER.stages.values():
        for each in stage.all("COPY"):
            *sources, _ = each.words
            origin = each.flag("from")
            if origin is not None:
                assert origin in DOCKER.stages, f"line {each.line}"
            else:
                for source in sources:
                    assert any(f"{name}/".startswith(f"{source}/") for name in seen), f"line {each.line}: {source}"


def test_all_that_the_build_gets_to_see_is_copied_and_all_packages_are() -> None:
    copies = [each for stage in DOCKER.stages.values() for each in stage.all("COPY") if each.flag("from") is None]
    sources = {source for each in copies for source in each.words[:-1]}
    assert {name.partition("/")[0] for name in context.files()} == sources
    copied = {source for each in DOCKER.stages["code"].all("COPY") for source in each.words[:-1]}
    assert set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_an_ordinary_user(target: str) -> None:
    """The user is given by number: Kubernetes' runAsNonRoot cannot look names up."""
    assert DOCKER.last(target, "USER").value == "10001:10001"
    last = DOCKER.lineage(target)[-1].instructions
    after = [each.keyword for each in last[[each.keyword for each in last].index("USER") :]]
    assert not {"RUN", "COPY", "ADD"}.intersection(after)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_takes_its_packages_from_stages_that_it_does_not_keep(target: str) -> None:
    """Else pip, its cache and its build tools would be in the image."""
    names = [stage.name for stage in DOCKER.lineage(target)]
    for stage in DOCKER.lineage(target):
        assert not any(INSTALL.search(each.value) for each in stage.all("RUN"))
    vllm = [["/opt/vllm", "/opt/vllm"]] if target == "replica-gpu" else []
    assert [each.words for each in DOCKER.stages[target].all("COPY")] == [
        *vllm,
        ["/opt/warmroute", "/opt/warmroute"],
        ["/code", "/opt/warmroute"],
    ]
    assert not {each.flag("from") for each in DOCKER.stages[target].all("COPY")}.intersection(names)


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_is_one_that_warmroute_has_and_is_ended_by_the_signal_that_drains(target: str) -> None:
    assert DOCKER.last(target, "ENTRYPOINT").words == ["warmroute"]
    assert command_of(target).params["host"] == "0.0.0.0"
    assert DOCKER.last(target, "STOPSIGNAL").value == "SIGTERM"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_goes_to_the_temporary_folder_and_the_volume(target: str) -> None:
    environment = DOCKER.environment(target)
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["HOME"] == "/tmp"
    assert environment["HF_HOME"].startswith("/models/") and environment["WARMROUTE_CACHE_DIR"].startswith("/models/")


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_asks_at_the_port_that_is_served(target: str) -> None:
    port = command_of(target).params["port"]
    assert f"'127.0.0.1', {port}," in health_check(DOCKER, target)[-1]
    assert "'GET', '/health'" in health_check(DOCKER, target)[-1]
    assert str(port) in DOCKER.last(target, "EXPOSE").words


@pytest.mark.parametrize("target", ["replica-cpu", "replica-gpu"])
def test_the_ports_of_a_replicas_events_are_exposed_and_open(target: str) -> None:
    """Events, replay, status and snapshot."""
    given = command_of(target).params
    events = [given["events_port"] + i for i in range(4)]
    assert DOCKER.last(target, "EXPOSE").words == [str(port) for port in (given["port"], *events)]
    assert given["events_host"] == "*"


def test_no_secret_is_left_in_a_layer() -> None:
    for stage in DOCKER.stages.values():
        for each in stage.instructions:
            assert each.keyword in {"RUN", "COPY"} or not SECRETS.search(f"{each.value}="), f"line {each.line}"
            assert each.keyword != "ADD"
    mounts = {value for each in runs() for name, value in each.flags if name == "mount" and "secret" in value}
    assert mounts == {"type=secret,id=pip,target=/etc/pip.conf"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_label_says_our_version_and_comes_last(target: str) -> None:
    """A changed label invalidates the cache of all later layers."""
    version, revision, label = DOCKER.stages[target].instructions[-3:]
    assert (version.keyword, version.value) == ("ARG", f"VERSION={PROJECT['version']}")
    assert (revision.keyword, label.keyword) == ("ARG", "LABEL")
    assert "image.version=" in label.value and "image.revision=" in label.value


def test_images_for_ray_have_what_kuberay_asks_for(requirements: dict[str, list[str]]) -> None:
    """KubeRay's probes ask Ray's dashboard agent, which plain Ray lacks; older versions use wget for it."""
    extras = PROJECT["optional-dependencies"]
    assert extras["kuberay"][0].startswith("ray[default]")
    assert any("wget" in each.value for each in DOCKER.stages["replica"].all("RUN"))
    assert extras["kuberay"][0] in requirements["replica"]


RULES = ["*", "!README.md", "!api", "**/__pycache__", "**/*.py[co]", "api/secret*"]


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("Makefile", True),
        (".git/config", True),
        ("README.md", False),
        ("api/README.md", False),
        ("docs/README.md", True),
        ("api/http/server.py", False),
        ("api/http/server.pyc", True),
        ("api/__pycache__/server.py", True),
        ("api/http/__pycache__/server.py", True),
        ("api/secrets.toml", True),
        ("apiary/x.py", True),
    ],
)
def test_the_rules_of_dockerignore(path: str, ignored: bool) -> None:
    assert context.is_ignored(path, RULES) == ignored


def test_nothing_but_sources_gets_into_the_context() -> None:
    strange = [name for name in context.files() if Path(name).suffix in {".pyc", ".so", ".key", ".pem", ".env", ".log"}]
    assert strange == []
    assert not any(name.startswith((".", "tests/", "docs/", "k8s/")) for name in context.files())
