"""Every field of a request that an engine reads is known to the router that may have to continue its answer."""

import ast
import os
from pathlib import Path

import pytest

from qualification.engines.engine import VARIABLE, missing
from tests.router.proxy.test_resume_fields import CLASSIFIED

pytestmark = [pytest.mark.live, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

FILES = {
    "vllm": ("vllm/entrypoints/openai/completion/protocol.py", "vllm/entrypoints/openai/chat_completion/protocol.py"),
    "sglang": ("sglang/srt/entrypoints/openai/protocol.py",),
}
REQUESTS = ("CompletionRequest", "ChatCompletionRequest")


def fields(engine: str) -> set[str]:
    """The fields of both requests, from the engine's source: importing it would take a minute."""
    [packages] = Path(os.environ[VARIABLE], "venv/lib").glob("python3*/site-packages")
    classes = [one for file in FILES[engine] for one in ast.parse((packages / file).read_text()).body]
    return {
        part.target.id
        for one in classes
        if isinstance(one, ast.ClassDef) and one.name in REQUESTS
        for part in one.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not part.target.id.startswith("_")
    }


@pytest.mark.parametrize("engine", FILES)
def test_each_field_is_known_to_what_continues_answers(engine: str) -> None:
    found = fields(engine)
    assert len(found) > 60
    assert found - CLASSIFIED == set()
