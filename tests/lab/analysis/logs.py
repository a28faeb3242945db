"""Request logs with bodies, as services write them: clean ones, and the same with one fault."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from events.blocks import extend_keys, root_key
from router.log_lines import NO_BODY, LogLine

Body: TypeAlias = dict[str, Any]

BLOCK_TOKENS = 16
FIRST, LAST = "ba ke li mo nu ra se ti vo zu", "den gar lim pos tuk"
WORDS = [f"{first}{last}" for first in FIRST.split() for last in LAST.split()]


def words(chance: random.Random, count: int) -> str:
    """Sentences of a made-up language."""
    found = [chance.choice(WORDS) for _ in range(count)]
    for at in range(0, count, 9):
        found[at] = found[at].capitalize()
        if at:
            found[at - 1] += "."
    return " ".join(found) + "."


SYSTEM = "You are the assistant of a shop. " + words(random.Random("system"), 300)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{word}",
            "description": words(random.Random(word), 30),
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
    for word in ("search", "order", "refund", "track", "cancel", "invoice")
]


def message(role: str, content: str) -> Body:
    return {"role": role, "content": content}


def chatbot(requests: int = 60) -> list[Body]:
    """One system prompt, one question each."""
    chance = random.Random("chatbot")
    return [
        {"messages": [message("system", SYSTEM), message("user", words(chance, chance.randint(5, 40)))]}
        for _ in range(requests)
    ]


def conversations(talks: int = 20, turns: int = 5, system: str | None = SYSTEM) -> list[Body]:
    """Side by side, each with all of its history in every turn."""
    chance = random.Random("conversations")
    histories: list[list[Body]] = [[message("system", system)] if system else [] for _ in range(talks)]
    bodies = []
    for _ in range(turns):
        for at in chance.sample(range(talks), talks):
            history = histories[at]
            history.append(message("user", words(chance, chance.randint(8, 40))))
            bodies.append({"messages": list(history), "user": f"talk {at}"})
            history.append(message("assistant", words(chance, chance.randint(20, 80))))
    return bodies


def retrieval(requests: int = 80, documents: int = 30, *, as_completion: bool = False) -> list[Body]:
    """Instructions, some of a few documents, and a question that others ask too."""
    chance = random.Random("retrieval")
    texts = [words(chance, 60) for _ in range(documents)]
    questions = [words(chance, 12) for _ in range(requests // 4)]
    bodies: list[Body] = []
    for _ in range(requests):
        context = "\n\n".join(chance.sample(texts, 4))
        asked = f"Context:\n{context}\n\nAnswer only from the context above.\nQuestion: {chance.choice(questions)}"
        if as_completion:
            bodies.append({"prompt": f"{SYSTEM}\n{asked}\nAnswer:"})
        else:
            bodies.append({"messages": [message("system", SYSTEM), message("user", asked)]})
    return bodies


def agents(talks: int = 12, turns: int = 5) -> list[Body]:
    return [body | {"tools": TOOLS} for body in conversations(talks, turns)]


CLEAN: dict[str, Callable[[], list[Body]]] = {
    "chatbot": chatbot,
    "conversations": conversations,
    "conversations without a system prompt": lambda: conversations(system=None),
    "retrieval": retrieval,
    "retrieval by completions": lambda: retrieval(as_completion=True),
    "agents": agents,
    "all of them": lambda: [*chatbot(), *conversations(), *retrieval(), *agents()],
}


def with_system(bodies: Iterable[Body], change: Callable[[int, str], str]) -> list[Body]:
    """Another system prompt in each."""
    return [
        body | {"messages": [message("system", change(at, body["messages"][0]["content"])), *body["messages"][1:]]}
        for at, body in enumerate(bodies)
    ]


def text_of(body: Body) -> str:
    parts = [f"{each['role']}\n{each['content']}\n" for each in body.get("messages", ())]
    tools = [json.dumps(tool) + "\n" for tool in body.get("tools", ())]
    return "".join([*parts[:1], *tools, *parts[1:], body.get("prompt", "")])


def logged(bodies: Iterable[Body], *, sessions: bool = False, bare: bool = False) -> Iterator[LogLine]:
    """One token for four letters."""
    for at, body in enumerate(bodies):
        text = text_of(body).encode("utf-32-le")
        tokens = max(1, len(text) // 16)
        root = root_key("shop", None, body.get("cache_salt"), BLOCK_TOKENS)
        keys = extend_keys(root, memoryview(text)[: tokens * 16][::4].tobytes(), BLOCK_TOKENS)
        yield LogLine(
            ts=1_750_000_000.0 + at,
            request_id=f"request-{at}",
            model="shop",
            prompt_tokens=tokens,
            output_tokens=20,
            block_tokens=BLOCK_TOKENS,
            blocks=list(keys),
            session=body.get("user") if sessions else None,
            raw_body=NO_BODY if bare else Raw(json.dumps(body).encode()),
        )


def write_log(path: Path, lines: Iterable[LogLine]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path
