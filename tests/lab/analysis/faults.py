"""The faults that a search must name, each planted alone in clean traffic."""

import json
import random
from collections.abc import Callable, Iterable

from tests.lab.analysis.logs import (
    SYSTEM,
    TOOLS,
    Body,
    agents,
    chatbot,
    conversations,
    message,
    retrieval,
    with_system,
    words,
)

TIMESTAMP = "timestamp early in the prompt"
IDENTIFIER = "id early in the prompt"
USER_DATA = "user data early in the prompt"
KEY_ORDER = "JSON with its keys in another order"
TOOL_ORDER = "tools in another order"
TOOL_CHANGE = "tools that change"
HISTORY = "history changed or cut"
VARIABLE_FIRST = "variable text before constant text"
SALT = "a cache_salt for each request"

CONSTANT = words(random.Random("constant"), 150)


def clock(at: int) -> str:
    return f"{at // 3600 % 24:02}:{at // 60 % 60:02}:{at % 60:02}"


def stamped(bodies: Iterable[Body], text: str) -> list[Body]:
    """`text` may have the fields {time} and {seconds}."""
    return with_system(
        bodies, lambda at, old: text.format(time=clock(37 * at), seconds=1_750_000_000 + 37 * at) + " " + old
    )


def identified(bodies: Iterable[Body], make: Callable[[random.Random], str]) -> list[Body]:
    chance = random.Random("ids")
    return with_system(bodies, lambda _, old: f"Request {make(chance)}.\n{old}")


def personal(bodies: Iterable[Body], make: Callable[[random.Random], str]) -> list[Body]:
    chance = random.Random("people")
    return with_system(bodies, lambda _, old: f"You talk to {make(chance)}. {old}")


def salted(bodies: Iterable[Body]) -> list[Body]:
    chance = random.Random("salts")
    return [body | {"cache_salt": f"{chance.getrandbits(64):016x}"} for body in bodies]


def shuffled_json(chance: random.Random) -> str:
    fields = [("shop", "North"), ("open", "9 to 5"), ("desks", [{"number": 1, "name": "Info"}]), ("rules", SYSTEM)]
    chance.shuffle(fields)
    return json.dumps(dict(fields))


def json_in_system(bodies: Iterable[Body]) -> list[Body]:
    chance = random.Random("json")
    return with_system(bodies, lambda _, old: f"Facts: {shuffled_json(chance)}\n{old}")


def json_in_message() -> list[Body]:
    chance = random.Random("json")
    return [
        {"messages": [message("system", "Be kind."), message("user", f"{shuffled_json(chance)}\n{words(chance, 15)}")]}
        for _ in range(40)
    ]


def shuffled_tools(bodies: Iterable[Body]) -> list[Body]:
    chance = random.Random("tools")
    return [body | {"tools": chance.sample(TOOLS, len(TOOLS))} for body in bodies]


def chosen_tools(bodies: Iterable[Body]) -> list[Body]:
    chance = random.Random("tools")
    return [body | {"tools": [tool for tool in TOOLS if chance.random() < 0.6]} for body in bodies]


def windowed(bodies: Iterable[Body], last: int) -> list[Body]:
    """Only the last messages, after the system prompt."""
    return [body | {"messages": [body["messages"][0], *body["messages"][1:][-last:]]} for body in bodies]


def shortened(bodies: Iterable[Body]) -> list[Body]:
    """Answers are cut when they are no longer the last."""
    return [
        body
        | {
            "messages": [
                message("assistant", each["content"][:40])
                if each["role"] == "assistant" and at < len(body["messages"]) - 2
                else each
                for at, each in enumerate(body["messages"])
            ]
        }
        for body in bodies
    ]


def question_first() -> list[Body]:
    chance = random.Random("questions")
    return [
        {"messages": [message("system", "Be kind."), message("user", f"{words(chance, 20)}\n\n{CONSTANT}")]}
        for _ in range(40)
    ]


def question_before_and_after() -> list[Body]:
    chance = random.Random("questions")
    return [{"prompt": f"Title: {words(chance, 8)}\n\n{CONSTANT}\n\n{words(chance, 30)}"} for _ in range(40)]


def context_first() -> list[Body]:
    """Retrieval, with the instructions last."""
    return [{"messages": [message("user", f"{body['messages'][1]['content']}\n\n{SYSTEM}")]} for body in retrieval()]


FAULTS: dict[str, tuple[str, Callable[[], list[Body]]]] = {
    "ISO time, one question each": (TIMESTAMP, lambda: stamped(chatbot(), "Now: 2025-06-15T{time}Z.")),
    "ISO time, conversations": (TIMESTAMP, lambda: stamped(conversations(), "Now: 2025-06-15 {time}.")),
    "time in words": (TIMESTAMP, lambda: stamped(chatbot(), "It is Sunday, June 15, 2025, {time}.")),
    "seconds since 1970": (TIMESTAMP, lambda: stamped(chatbot(), "ts={seconds}")),
    "time at the end, conversations": (
        TIMESTAMP,
        lambda: with_system(conversations(), lambda at, old: f"{old} It is {clock(61 * at)}."),
    ),
    "hex id": (IDENTIFIER, lambda: identified(chatbot(), lambda chance: f"{chance.getrandbits(128):032x}")),
    "uuid": (IDENTIFIER, lambda: identified(conversations(), uuid)),
    "number": (IDENTIFIER, lambda: identified(chatbot(), lambda chance: str(chance.randint(10**15, 10**16)))),
    "name": (USER_DATA, lambda: personal(chatbot(), lambda chance: words(chance, 2)[:-1])),
    "name, conversations": (USER_DATA, lambda: personal(conversations(), lambda chance: words(chance, 2)[:-1])),
    "address": (USER_DATA, lambda: personal(chatbot(), lambda chance: f"{words(chance, 1)[:-1]}@example.com")),
    "JSON in the system prompt": (KEY_ORDER, lambda: json_in_system(chatbot())),
    "JSON in a message": (KEY_ORDER, json_in_message),
    "order of tools": (TOOL_ORDER, lambda: shuffled_tools(agents())),
    "some tools": (TOOL_CHANGE, lambda: chosen_tools(agents())),
    "some tools, one question each": (TOOL_CHANGE, lambda: chosen_tools(chatbot())),
    "window": (HISTORY, lambda: windowed(conversations(turns=7), 5)),
    "shortened answers": (HISTORY, lambda: shortened(conversations(turns=7))),
    "question first": (VARIABLE_FIRST, question_first),
    "question before and after": (VARIABLE_FIRST, question_before_and_after),
    "context first": (VARIABLE_FIRST, context_first),
    "salt": (SALT, lambda: salted(chatbot())),
    "salt, conversations": (SALT, lambda: salted(conversations())),
}


def uuid(chance: random.Random) -> str:
    digits = f"{chance.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
