"""`warmroute router` and `warmroute explain`: refusals, and explain's view of a router's answer."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fleet.commands.router import explain
from tests.router.console.test_explain import ANSWER
from tests.router.loopback import Handler, Reply, Request, serving

DEADLINE_S = 50.0


def run(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "fleet", *arguments]
    env = os.environ | environment
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_setting_that_cannot_be_used_loads_no_web_framework() -> None:
    code = (
        "import atexit, sys\n"
        "names = ('fastapi', 'httpx2', 'rich', 'torch', 'ray')\n"
        "atexit.register(lambda: print(*(name in sys.modules for name in names)))\n"
        "from fleet.cli import main\nmain(['router', '--replica', 'h:1'])"
    )
    finished = run(code=code)
    assert (finished.returncode, finished.stdout) == (2, "False False False False False\n")
    assert finished.stderr == (
        "Error: --replica: 'h:1' in 'h:1' is not key=value; write http://HOST:PORT, or url=http://HOST:PORT,key=value\n"
    )


def test_a_parent_that_is_gone_is_missed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    finished = run("router", "--port", "0", "--set=die_with_parent=true", WARMROUTE_PARENT_PID=str(gone.pid))
    assert (finished.returncode, finished.stdout) == (1, "")


# ---- explain


class FakeRouter:
    def __init__(self, status: int = 200, answer: Any = ANSWER, models: tuple[str, ...] = ("demo",)) -> None:
        self.status = status
        self.answer = answer
        self.models = models
        self.asked: list[Request] = []

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request)
        if request.path == "/v1/models":
            await reply.whole(200, {"object": "list", "data": [{"id": name} for name in self.models]})
        else:
            await reply.whole(self.status, self.answer)

    @property
    def body(self) -> Any:
        return json.loads(self.asked[-1].body)


async def explained(handle: Handler, *arguments: str, stdin: str = "", **environment: str) -> Result:
    async with serving(handle) as url:
        return await asyncio.to_thread(
            CliRunner().invoke, explain, [*arguments, "--router", url], input=stdin, env=environment
        )


async def test_a_prompt_is_explained_for_the_only_model() -> None:
    router = FakeRouter()
    result = await explained(router.handle, "Once upon a time")
    assert result.exit_code == 0, result.output
    assert "It goes to replica-1 (policy cost)" in result.stdout
    assert router.body == {"model": "demo", "prompt": "Once upon a time"}
    assert [request.path for request in router.asked] == ["/v1/models", "/explain"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"role": "user", "content": "é"}], {"messages": [{"role": "user", "content": "é"}]}),
        ({"messages": [], "model": "m", "tools": []}, {"messages": [], "model": "m", "tools": []}),
    ],
)
async def test_a_chat_comes_from_a_file_or_stdin(content: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(content))
    for arguments, stdin in ((["--chat", str(path)], ""), (["--chat", "-"], json.dumps(content))):
        router = FakeRouter()
        result = await explained(router.handle, *arguments, stdin=stdin)
        assert result.exit_code == 0, result.output
        assert router.body == {"model": "demo"} | expected


async def test_the_model_can_be_named_and_the_answer_be_had_as_it_is() -> None:
    router = FakeRouter(answer=b'{"anything": 1}')
    result = await explained(router.handle, "x", "--model", "m", "--json")
    assert result.stdout == '{"anything": 1}\n'
    assert router.body == {"model": "m", "prompt": "x"}


async def test_the_admin_key_comes_from_the_environment() -> None:
    router = FakeRouter()
    await explained(router.handle, "x", WARMROUTE_ADMIN_KEY="root")
    assert {request.headers["authorization"] for request in router.asked} == {"Bearer root"}


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (FakeRouter(401, {"error": {"message": "no key"}}), "the router says: no key; see --admin-key"),
        (FakeRouter(403, {"error": {"message": "not yours"}}), "the router says: not yours; see --admin-key"),
        (FakeRouter(404, {"error": {"message": "no such model"}}), "the router says: no such model"),
        (FakeRouter(404, b"<html>"), "is not a router: status 404 for /explain"),
        (FakeRouter(200, b"<html>"), "the router's answer cannot be read: JSON is malformed"),
        (FakeRouter(models=("a", "b")), "serves a, b; name one with --model"),
        (FakeRouter(models=()), "serves no model yet; name one with --model"),
    ],
)
async def test_errors_are_reported_in_one_line(router: FakeRouter, said: str) -> None:
    result = await explained(router.handle, "x")
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


async def test_a_connection_that_ends_early_is_reported_in_one_line() -> None:
    async def drop(_: Request, reply: Reply) -> None:
        reply.drop()

    result = await explained(drop, "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no router answers at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([], "", "give either a PROMPT or --chat FILE"),
        (["x", "--chat", "-"], "[]", "give either a PROMPT or --chat FILE"),
        (["--chat", "nowhere.json"], "", "nowhere.json"),
        (["--chat", "-"], "{", "--chat: <stdin> is not JSON: "),
        (["--chat", "-"], "{}", '--chat: <stdin> is not a chat request; write {"messages": [...]}'),
        (["--chat", "-"], '{"messages": 5}', "is not a chat request"),
        (["x", "--router", "here"], "", "'here' is not an address; write 8000, HOST:8000 or http://HOST:8000."),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: list[str], stdin: str, said: str) -> None:
    result = CliRunner().invoke(explain, arguments, input=stdin)
    assert result.exit_code == 2
    assert said in result.stderr
