"""The table of profiles, and who outside of it may name an engine: another file only if it cannot be helped."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from engines import PROFILES, SERVERS, Launched
from tests.test_layout import ALLOWED

ROOT = Path(__file__).resolve().parents[2]
# Code names these; prose writes vLLM and SGLang. A comparison with one of the last ones asks for the engine, too.
NAMES = ("vllm", "sglang", "trtllm", "tensorrt")
COMPARED = {"warmroute", "openai"}
# Take a file away once it names none; add none.
NAMING = {
    "events/cache/hash_chain.py",  # the word that an algorithm begins with
    "kernels/backends.py",  # libraries of kernels
    "kernels/gpu/flash.py",
    "lab/simulation/arena/rules.py",  # rules of routers that are named after engines
}


def named(tree: ast.AST) -> Iterator[str]:
    """Yield what names an engine in a module's code; docstrings are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            values = {
                getattr(part, "value", None) for side in (node.left, *node.comparators) for part in ast.walk(side)
            }
            yield from COMPARED & {value for value in values if isinstance(value, str)}
        if isinstance(node, ast.Constant):
            said = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            words = [said] if isinstance(said, str) and id(node) not in prose else []
        else:
            fields = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module"))
            words = [word.lower() for word in fields if isinstance(word, str)]
        yield from (word for word in words if any(name in word for name in NAMES))


def test_hardly_a_file_outside_of_engines_names_an_engine() -> None:
    found = set()
    for package in ALLOWED.keys() - {"engines"}:
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            if any(name in source.lower() for name in (*NAMES, *COMPARED)) and any(named(ast.parse(source))):
                found.add(str(path.relative_to(ROOT)))
    assert found == NAMING


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('"""A replica of vllm."""  # or sglang', False),
        ('message = "vLLM and SGLang have it"', False),
        ('product = "warmroute"', False),
        ('is_ours = engine == "warmroute"', True),
        ('salted = engine in ("openai", x)', True),
        ('port = {"vllm": 1}', True),
        ("def read_vllm(): pass", True),
        ("from x.sglang import y", True),
        ("TRTLLM = 1", True),
        ('line = b"vllm:steps"', True),
    ],
)
def test_a_name_in_code_is_found(source: str, names: bool) -> None:
    assert any(named(ast.parse(source))) is names


def test_a_profile_stands_under_its_name_and_its_owner_is_its_own() -> None:
    assert all(name == profile.name for name, profile in PROFILES.items())
    owners = [profile.owner for profile in PROFILES.values() if profile.owner is not None]
    assert len(set(owners)) == len(owners)


def test_fleets_start_what_has_a_server() -> None:
    assert set(get_args(Launched)) == set(SERVERS)


def test_the_table_is_light() -> None:
    code = "import sys, engines; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "zmq", "jinja2", "tokenizers", "router", "events.blocks"}.isdisjoint(loaded)
