"""`warmroute chat`, as people type into it and as scripts pipe into it, before a real router."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from events.tool.words import printable_lines
from lab.bench.client import Outcome
from lab.chat.answers import LONGEST_ANSWER, Answer, figures
from lab.chat.conversation import MAX_FILE_BYTES
from lab.commands.chat import chat
from router.tenants.keys import Key, digest_of
from tests.events.processes import DEADLINE_S
from tests.events.terminals import Terminal, terminal
from tests.router.scripted import DONE, Call, Scripted, Served, event, refused_port, served

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\rover"
FIGURES = b"to first token \xc2\xb7 4 of 9 tokens cached \xc2\xb7 r0"

BASE_INSTALL = """
import sys
for name in ("torch", "numpy", "matplotlib", "ray"): sys.modules[name] = None
from fleet.cli import main
main(["chat", *sys.argv[1:]])
"""


class Model:
    """Answers by what the question begins with, and keeps the messages of every request."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.replica = Scripted("r0", self._answer)

    @property
    def questions(self) -> list[str]:
        return [messages[-1]["content"] for messages in self.asked]

    async def _answer(self, call: Call) -> None:
        self.asked.append(call.json["messages"])
        question = self.questions[-1]
        if question.startswith("Too long"):
            call.answer(b'{"error": {"message": "send at most 4095 tokens"}}', 400)
            return
        call.begin()
        said = {"Colours": HOSTILE, "For ever": "Once upon a time"}.get(question, f"{question}? Yes,\nof course.")
        for part in said:
            call.chunk(event(json.dumps({"choices": [{"index": 0, "delta": {"content": part}}]})))
        if question == "For ever":
            await call.left()
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        call.chunk(event(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})))
        call.chunk(event(json.dumps({"choices": [], "usage": usage})) + DONE)
        call.end()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def router(model: Model) -> AsyncIterator[Served]:
    async with served(model.replica) as running:
        yield running


def typed(screen: Terminal, keys: bytes, wanted: bytes = FIGURES, then: bytes = b"> ") -> str:
    """Type a line at the prompt, and return what is shown up to the wanted text; the next prompt has come."""
    screen.written = b""
    screen.type(keys)
    screen.read_until(wanted)
    shown, _, screen.written = screen.written.partition(wanted)
    screen.read_until(then)
    return shown.decode()


async def test_a_conversation_is_typed_in_a_terminal(model: Model, router: Served, tmp_path: Path) -> None:
    guide = tmp_path / "a guide.txt"
    guide.write_text("The tower is blue.")

    def type_it(screen: Terminal) -> None:
        screen.read_until(b"> ")
        assert "Hello? Yes,\r\nof course.\r\n" in typed(screen, b"Hello\n")
        typed(screen, b"ad\x1b[D\x1b[Dgl\n")  # an arrow key moves, so this edits the line
        shown = typed(screen, b"Colours\n")
        assert r"\x1b]0;owned\x07\x1b[31mred\x9b2J\rover" in shown
        assert "owned\x07" not in shown and "\x1b[31m" not in shown
        typed(screen, b"For ever\n", b"Once upon a time", b"")
        typed(screen, b"\x03", b"stopped")
        typed(screen, b"Go on\n")
        typed(screen, b"Too long\n", b"send at most 4095 tokens; if the conversation is too long for the model, /new")
        typed(screen, b"/file " + str(guide).encode() + b"\n", b"18 characters")
        typed(screen, b"Which colour\n")
        typed(screen, b"/file nowhere\n", b"'nowhere' is not a file")
        typed(screen, b"/new\n", b"A new conversation.")
        typed(screen, b" /etc is a folder\n")
        typed(screen, b"/bye\n", b"/bye is no command; /help lists them")
        typed(screen, b"/help\n", b"/file FILE")
        screen.type(b"\x04")
        assert screen.end() == 0
        assert b"Traceback" not in screen.written

    with terminal("chat", str(router.port)) as screen:
        await asyncio.to_thread(type_it, screen)
    first, *_ = model.asked
    assert first == [{"role": "user", "content": "Hello"}]
    assert model.questions == [
        *("Hello", "glad", "Colours", "For ever", "Go on"),
        *("Too long", "Too long", "Too long"),  # with fewer fields each time
        *("Which colour", "/etc is a folder"),
    ]
    assert [message["content"] for message in model.asked[4]] == [
        *("Hello", "Hello? Yes,\nof course.", "glad", "glad? Yes,\nof course."),
        *("Colours", HOSTILE, "For ever", "Once upon a time", "Go on"),
    ]
    assert [message["role"] for message in model.asked[-2]] == ["system", "user"]
    assert "The tower is blue." in model.asked[-2][0]["content"]
    assert len(model.asked[-1]) == 1


async def test_ctrl_c_between_answers_leaves(router: Served) -> None:
    def type_it(screen: Terminal) -> None:
        screen.read_until(b"> ")
        typed(screen, b"Hello\n")
        screen.type(b"\x03")
        try:
            screen.process.wait(5)
        except subprocess.TimeoutExpired:  # readline, whose prompt was there, did not wait for a signal yet
            screen.type(b"\x03")
        assert screen.end() == 0
        assert b"Traceback" not in screen.written

    with terminal("chat", str(router.port)) as screen:
        await asyncio.to_thread(type_it, screen)


async def piped(text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BASE_INSTALL, *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, input=text, capture_output=True, text=True, timeout=DEADLINE_S
    )


async def test_a_pipe_gets_answers_alone(model: Model, router: Served) -> None:
    finished = await piped("Hello\n\nColours\n", f"http://127.0.0.1:{router.port}/v1", "--model", "m")
    assert finished.stdout == f"Hello? Yes,\nof course.\n{HOSTILE.encode('unicode_escape').decode()}\n"
    assert (finished.stderr, finished.returncode) == ("", 0)
    assert len(model.asked[1]) == 3


async def test_a_pipe_ends_with_the_first_question_that_is_refused(model: Model, router: Served) -> None:
    finished = await piped("Too long\nHello\n", str(router.port))
    assert finished.returncode == 1
    assert finished.stderr == (f"Error: http://127.0.0.1:{router.port}: status 400: send at most 4095 tokens\n")
    assert "Hello" not in model.questions


def asked(*arguments: str, text: str = "", **environment: str) -> Result:
    return CliRunner().invoke(chat, arguments, input=text, env=environment)


def test_a_port_where_nobody_listens_is_named() -> None:
    port = refused_port()
    for arguments, environment in (([str(port)], {}), ([], {"WARMROUTE_ROUTER": f"127.0.0.1:{port}"})):
        result = asked(*arguments, **environment)
        assert result.exit_code == 1
        assert f"http://127.0.0.1:{port} does not answer: no connection" in result.stderr


async def test_the_key_is_sent(model: Model) -> None:
    async with served(model.replica, keys=(Key(name="a", digest=digest_of("secret")),), demand_key=True) as running:
        finished = await asyncio.to_thread(asked, str(running.port), text="Hello\n")
        assert "give --api-key" in finished.stderr
        finished = await asyncio.to_thread(asked, str(running.port), text="Hello\n", WARMROUTE_API_KEY="secret")
        assert finished.stdout == "Hello? Yes,\nof course.\n"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("é\u00a0: «\u202f1\u202f»\t👩\u200d🚀\n", "é\u00a0: «\u202f1\u202f»\t👩\u200d🚀\n"),
        ("a\x1b]52;c;eA==\x07", r"a\x1b]52;c;eA==\x07"),
        ("a\rb\x08c\x7f\x85d\u2028", r"a\rb\x08c\x7f\x85d\u2028"),
        ("\u202egnp.exe", r"\u202egnp.exe"),  # it turns the direction of what follows
    ],
)
def test_answers_keep_their_letters_and_lose_what_controls_a_terminal(said: str, shown: str) -> None:
    assert printable_lines(said) == shown


def test_what_an_endpoint_does_not_tell_is_left_out() -> None:
    whole: dict[str, Any] = {"first_s": 0.058, "end_s": 1.058, "prompt_tokens": 1234, "cached_tokens": 1090}
    outcome = Outcome("", 0, False, 0.0, **whole, replica="r\x1b1", output_tokens=28)
    assert figures(Answer(outcome)) == r"58 ms to first token · 1,090 of 1,234 tokens cached · r\x1b1 · 27 tok/s"
    assert figures(Answer(Outcome("", 0, False, 0.0, first_s=2.0, end_s=3.0, events=3))) == (
        "2.0 s to first token · 2 tok/s"
    )
    assert figures(Answer(Outcome("", 0, False, 0.0), stopped=True)) == "stopped"
    cut = Outcome("", 0, False, 0.0, first_s=0.0, end_s=0.0, output_tokens=LONGEST_ANSWER)
    assert figures(Answer(cut)) == f"0 ms to first token · cut at {LONGEST_ANSWER} tokens"


@pytest.mark.parametrize("kind", ["large", "binary", "pipe", "folder", "nothing"])
async def test_files_that_are_no_document_are_refused(kind: str, router: Served, tmp_path: Path) -> None:
    path, why = tmp_path / "file", "is not a file"
    if kind == "large":
        path.write_bytes(b"a" * (MAX_FILE_BYTES + 1))
        why = "is larger than 1,048,576 bytes"
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
        why = "is not text in UTF-8"
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    name = "" if kind == "nothing" else str(path)
    why = "/file needs a name" if kind == "nothing" else why
    result = await asyncio.to_thread(asked, str(router.port), text=f"/file {name}\n")
    assert why in result.stderr and result.exit_code == 1
