"""Allowed imports between packages; the table is the one in docs/architecture.md."""

import re
from pathlib import Path

import pytest

from tests.conftest import NOWHERE, runs_nowhere
from tests.house import ROOT, files, read

ALLOWED = {
    "events": set[str](),
    "api": set[str](),
    "engines": {"events", "api"},
    "kernels": set[str](),
    "replica": {"events", "api", "engines", "kernels"},
    "router": {"events", "api", "engines"},
    "fleet": {"events", "api", "engines", "kernels", "replica", "router"},
    "lab": {"events", "api", "engines", "kernels", "replica", "router", "fleet"},
}
LAZY = {"fleet": {"lab"}}  # only inside functions
FORBIDDEN = {
    "events": {"torch", "ray", "transformers"},
    "api": {"torch", "ray", "transformers"},
    "engines": {"torch", "ray", "transformers"},
    "kernels": {"ray", "transformers"},
    "replica": {"ray", "transformers"},
    "router": {"torch", "ray", "transformers"},
}


def violations(root: Path) -> list[str]:
    """Say which imports under this root go against the table."""
    return [
        f"{path.relative_to(root)}:{found.line} imports {found.module}"
        for path, file in files(root)
        for found in file.imports
        if not _permitted(path.relative_to(root).parts[0], found.module.partition(".")[0], found.inside_function)
    ]


def _permitted(package: str, imported: str, inside_function: bool) -> bool:
    if imported in LAZY.get(package, ()):
        return inside_function
    if imported in ALLOWED or imported in {"tests", "qualification"}:
        return imported == package or imported in ALLOWED[package]
    return imported not in FORBIDDEN.get(package, ())


def test_every_package_imports_only_what_the_table_allows() -> None:
    assert violations(ROOT) == []


def test_every_package_exists_and_is_typed() -> None:
    for package in ALLOWED:
        assert (ROOT / package / "__init__.py").is_file()
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("events/stream.py", "from router.placement.index import match"),
        ("api/prompts/prompts.py", "import events.blocks"),
        ("engines/vllm.py", "import router.members"),
        ("router/app.py", "def load():\n    import torch.nn"),
        ("router/members/feeds.py", "from ray import init"),
        ("router/deep/er.py", "import importlib\nimportlib.import_module('replica.engine')"),
        ("replica/engine.py", "if True:\n    from transformers import AutoModel"),
        ("fleet/cli.py", "import lab.bench"),
        ("lab/bench.py", "import tests.oracle"),
        ("lab/bench.py", "import qualification.engines"),
    ],
)
def test_a_violation_is_caught(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    [message] = violations(tmp_path)
    assert message.startswith(file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fleet/cli.py", "def bench():\n    import lab.bench"),
        ("router/app.py", "import events.blocks, api, msgspec\nfrom . import index"),
        ("lab/bench.py", "import fleet.cli, torch, ray"),
    ],
)
def test_what_the_table_allows_is_not_caught(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


# ---- only the runner differs between engines

RUNNERS = {"replica.runners.simulated"}
RUNNERS_MAY_IMPORT = {
    "replica.runners.runner",
    "replica.runners.clock",
    "replica.config",
    "replica.grammar.matcher",
    "replica.messages",
    "replica.runners.request",
}


def runner_violations(root: Path) -> list[str]:
    """Say where a runner is known by name, except where it is picked, and where a runner knows more than it may."""
    found = []
    ours = {
        ".".join(path.relative_to(root).with_suffix("").parts): (path, file)
        for path, file in files(root)
        if path.is_relative_to(root / "replica")
    }
    for name, (path, file) in ours.items():
        for imported in file.imports:
            for module in imported.modules:
                picks = name == "replica.process" and imported.inside_function
                known = module in RUNNERS and not picks
                too_much = name in RUNNERS and module in ours and module not in RUNNERS_MAY_IMPORT
                if known or too_much:
                    found.append(f"{path.relative_to(root)}:{imported.line} imports {module}")
    return found


def test_only_the_runner_differs_between_engines() -> None:
    """Scheduler, pool and server know no runner; the simulated one is picked in one place, and only if wanted."""
    assert runner_violations(ROOT) == []
    picked = {module for found in read(ROOT / "replica" / "process.py").imports for module in found.modules}
    assert picked >= RUNNERS


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/scheduler.py", "from replica.runners.simulated import SimulatedRunner"),
        ("engine/engine.py", "def pick():\n    import replica.runners.simulated"),
        ("server.py", "from replica.runners import simulated"),
        ("process.py", "from replica.runners.simulated import SimulatedRunner"),
        ("runners/simulated.py", "from replica.engine.scheduler import Scheduler"),
    ],
)
def test_an_engine_that_knows_its_runner_is_caught(tmp_path: Path, file: str, source: str) -> None:
    for name in ("engine/scheduler.py", "runners/simulated.py", file):
        (tmp_path / "replica" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "replica" / name).touch()
    (tmp_path / "replica" / file).write_text(source)
    [message] = runner_violations(tmp_path)
    assert message.startswith(f"replica/{file}:")


# ---- the tests


def test_no_test_needs_what_qualifies() -> None:
    needs = re.compile(r"^\s*(from|import) qualification\b", re.MULTILINE)  # parsing them all takes ten seconds
    assert [path for path in (ROOT / "tests").rglob("*.py") if needs.search(path.read_text())] == []


def test_every_test_that_is_collected_here_is_run_by_the_makefile(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[NOWHERE] == [], "see SLOW_FILES and PROPERTIES in the Makefile"


@pytest.mark.parametrize(
    ("folder", "marks", "text", "expected"),
    [
        ("chaos", {"chaos"}, "pytestmark = pytest.mark.chaos", False),
        ("chaos", set[str](), "", True),
        ("fleet", {"chaos"}, "pytestmark = imported", True),
        ("fleet", {"grid"}, "marks=pytest.mark.grid", False),
        ("fleet", {"hypothesis"}, "@given_by_others", True),
        ("fleet", {"hypothesis"}, "from hypothesis import given", False),
        ("fleet", set[str](), "", False),
    ],
)
def test_a_test_that_the_makefile_would_not_find_is_noticed(
    folder: str, marks: set[str], text: str, expected: bool
) -> None:
    assert runs_nowhere(ROOT / "tests" / folder, marks, text) == expected
