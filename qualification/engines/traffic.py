"""Requests as real applications send them: conversations that grow, fork and share their beginnings."""

import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CONVERSATIONS = 12
TURNS = 8  # then a conversation ends, and another begins
FORKED = 0.2  # of the turns go back to an earlier message
TEXT = """the cache of a replica holds blocks for every prompt that it has seen lately
def class return import yield self None True False lambda with open print range
naïve café 東京 👩‍👧 12345 3.14159 https://example.com/a?b=c {'key': [1, 2]} <b>bold</b>"""
WORDS = TEXT.split()
Message = dict[str, Any]
QUESTION = "What is this a picture of, if of anything, and what else could it show?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "the word"}, "most": {"type": "integer"}},
            "required": ["word"],
        },
    },
}


class Asked(NamedTuple):
    """A request; `remember` gets the answer's text."""

    path: str
    body: dict[str, Any]
    remember: Callable[[str], None]


class Conversation:
    def __init__(self, rng: random.Random, system: str) -> None:
        self._rng = rng
        self.messages: list[Message] = [{"role": "system", "content": system}]

    def ask(self) -> None:
        if len(self.messages) > 3 and self._rng.random() < FORKED:
            del self.messages[self._rng.randrange(2, len(self.messages)) :]
            if self.messages[-1]["role"] != "assistant":
                self.messages.pop()
        self.messages.append({"role": "user", "content": words(self._rng, 10, 120)})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    @property
    def is_over(self) -> bool:
        return len(self.messages) > 2 * TURNS


def words(rng: random.Random, fewest: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


def conversations(seed: int) -> Iterator[Conversation]:
    """The conversations whose turn it is, without end."""
    rng = random.Random(seed)
    systems = [f"You are assistant {number}. {words(rng, 40, 160)}" for number in range(4)]
    running: list[Conversation] = []
    while True:
        running = [one for one in running if not one.is_over]
        while len(running) < CONVERSATIONS:
            running.append(Conversation(rng, rng.choice(systems)))
        chosen = rng.choice(running)
        chosen.ask()
        yield chosen


def requests(seed: int, change: Callable[[dict[str, Any], random.Random], Asked]) -> Iterator[Asked]:
    """Chat requests, each changed into that of a row."""
    rng = random.Random(seed + 1)
    for conversation in conversations(seed):
        body = {
            "model": "m",
            "messages": list(conversation.messages),
            "max_tokens": rng.randint(1, 40),
            "temperature": 0,
        }
        asked = change(body, rng)
        yield asked._replace(remember=conversation.answered)


def unremembered(_text: str) -> None:
    """Keep nothing of an answer; `requests` puts its own in place."""


def chat(body: dict[str, Any], _rng: random.Random) -> Asked:
    return Asked("/v1/chat/completions", body, unremembered)


def completion(body: dict[str, Any], rng: random.Random) -> Asked:
    prompt = "\n".join(str(message["content"]) for message in body.pop("messages"))
    return Asked("/v1/completions", {**body, "prompt": prompt, "echo": rng.random() < 0.1}, unremembered)


def salted(body: dict[str, Any], rng: random.Random) -> Asked:
    return chat({**body, "cache_salt": rng.choice(("red", "blue", "green"))}, rng)


def adapted(body: dict[str, Any], rng: random.Random) -> Asked:
    return chat({**body, "model": rng.choice(("m", "a1", "a2"))}, rng)


def with_tools(body: dict[str, Any], rng: random.Random) -> Asked:
    """Tools of every shape: without a description, without parameters, called, answered, refused."""
    bare = {"type": "function", "function": {"name": "now"}}
    described = {"type": "function", "function": {"name": "stop", "description": "Stop."}}
    strict = {"type": "function", "function": {**TOOL["function"], "name": "strict_one", "strict": True}}
    tools = [[TOOL], [bare], [described, bare], [TOOL, bare, strict]][len(body["messages"][0]["content"]) % 4]
    if len(body["messages"]) > 3:
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"word": "café", "most": 3}'},
        }
        made = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        made.append({"role": "tool", "tool_call_id": "c1", "content": "a place"})
        body["messages"] = [*body["messages"][:3], *made, *body["messages"][3:]]
    return chat({**body, "tools": tools, "tool_choice": rng.choice(("none", "none", "auto"))}, rng)


def as_json(body: dict[str, Any], rng: random.Random) -> Asked:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": named},
        {"structured_outputs": {"regex": "[a-c]{2,5}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ]
    return chat({**body, **rng.choice(kinds)}, rng)


def with_flags(body: dict[str, Any], rng: random.Random) -> Asked:
    """Parts of content, arguments of the template, other roles, and fields that change no prompt."""
    extra: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"stop": ["\n\n"], "seed": 7, "user": "somebody"},
        {"frequency_penalty": 0.5, "ignore_eos": True, "priority": 0},
    ]
    if rng.random() < 0.3:
        body["messages"] = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in body["messages"]]
    return chat({**body, **rng.choice(extra)}, rng)


def picture(number: int) -> Message:
    """A grey picture of its own size and shade."""
    width, height = 64 + 48 * (number % 7), 64 + 40 * (number % 5)
    pixels = b64encode(b"P5 %d %d 255 " % (width, height) + bytes([number]) * width * height).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/x-portable-graymap;base64,{pixels}"}}


def with_images(body: dict[str, Any], _rng: random.Random) -> Asked:
    """Half of the users' messages show one or two pictures of 24, before or after their words.

    All conversations begin with the same question about one of four pictures, or about none.
    """
    shown = []
    for place, one in enumerate(body["messages"]):
        rng = random.Random(one["content"])  # a message shows the same ones in each turn
        parts: list[Message] = [{"type": "text", "text": QUESTION if place == 1 else one["content"]}]
        if one["role"] == "user":
            count = rng.choice((0, 1) if place == 1 else (0, 0, 1, 2))
            pictures = [picture(rng.randrange(4 if place == 1 else 24)) for _ in range(count)]
            parts = parts + pictures if rng.random() < 0.5 else pictures + parts
        shown.append({**one, "content": parts})
    return chat({**body, "messages": shown}, _rng)


def message(body: dict[str, Any], _rng: random.Random) -> Asked:
    """A request of Anthropic's API, with a line that the engine strips."""
    system = body["messages"].pop(0)["content"]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}
    fields = {"system": [billing, {"type": "text", "text": system}], "max_tokens": body["max_tokens"]}
    return Asked("/v1/messages", {"model": "m", "messages": body["messages"], **fields}, unremembered)


def response(body: dict[str, Any], _rng: random.Random) -> Asked:
    system = body["messages"].pop(0)["content"]
    fields = {
        "instructions": system,
        "input": body["messages"],
        "max_output_tokens": body["max_tokens"],
        "store": False,
    }
    return Asked("/v1/responses", {"model": "m", "temperature": 0, **fields}, unremembered)


def reported_in_full(body: dict[str, Any], rng: random.Random) -> Asked:
    if rng.random() < 0.5:
        body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
    return chat(body, rng)


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The words of an answer."""
    if path == "/v1/chat/completions":
        return answer["choices"][0]["message"]["content"] or ""
    if path == "/v1/completions":
        return str(answer["choices"][0]["text"])
    if path == "/v1/messages":
        return "".join(block.get("text", "") for block in answer["content"])
    return "".join(part.get("text", "") for item in answer["output"] for part in item.get("content") or ())
