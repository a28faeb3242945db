"""The prompts of a log as pieces of text, in the order in which a chat template would write them."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from router.log_lines import LogLine

LEADING_ROLES = ("system", "developer")


class Piece(NamedTuple):
    role: str  # "prompt" for one without roles
    text: str

    @property
    def is_leading(self) -> bool:
        return self.role in LEADING_ROLES


class Prompt(NamedTuple):
    request_id: str
    model: str
    session: str | None
    salt: str | None
    leading: tuple[Piece, ...]  # system messages, as far as they come first
    tools: tuple[str, ...]  # each as the client wrote it
    rest: tuple[Piece, ...]
    tokens: int
    moved: tuple[str, ...] = ()  # to the end, by a repair
    cached_tokens: int | None = None  # as the replica reported

    @property
    def pieces(self) -> tuple[Piece, ...]:
        tools = (Piece("tools", "\n".join(self.tools)),) if self.tools else ()
        moved = (Piece("moved", " ".join(self.moved)),) if self.moved else ()
        return (*self.leading, *tools, *self.rest, *moved)


class Message(Struct):
    role: str = ""
    content: Any = None
    tool_calls: list[Raw] | None = None


class Body(Struct):
    messages: list[Message] | None = None
    prompt: Any = None
    tools: list[Raw] | None = None
    cache_salt: str | None = None


class Read(NamedTuple):
    prompts: list[Prompt]
    requests: int
    without_body: int
    without_text: int  # token ids, or nothing that can be read


_body = msgspec.json.Decoder(Body)


def read_prompts(lines: Iterable[LogLine]) -> Read:
    """Requests in order of arrival."""
    prompts: list[tuple[float, Prompt]] = []
    known: dict[str, str] = {}  # one copy of each text, as conversations repeat all of theirs
    requests = without_body = without_text = 0
    for line in lines:
        requests += 1
        body = bytes(line.body or b"")
        if not body:
            without_body += 1
            continue
        found = list(_prompts(line, body, known))
        without_text += not found
        prompts += [(line.ts, prompt) for prompt in found]
    prompts.sort(key=lambda each: each[0])
    return Read([prompt for _, prompt in prompts], requests, without_body, without_text)


def _prompts(line: LogLine, packed: bytes, known: dict[str, str]) -> Iterator[Prompt]:
    try:
        body = _body.decode(packed)
    except msgspec.DecodeError:
        return
    several = []
    if body.messages:
        pieces = []
        for message in body.messages:
            text = "\n".join([_content(message.content), *(bytes(call).decode() for call in message.tool_calls or ())])
            pieces.append(Piece(message.role, known.setdefault(text, text)))
        several.append(pieces)
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]  # token ids are no text
    several += [[Piece("prompt", known.setdefault(text, text))] for text in texts if isinstance(text, str)]
    tools = [bytes(tool).decode() for tool in body.tools or ()]
    for pieces in several:
        leading = next((at for at, piece in enumerate(pieces) if not piece.is_leading), len(pieces))
        yield Prompt(
            line.request_id,
            line.model,
            line.session,
            body.cache_salt,
            tuple(pieces[:leading]),
            tuple(known.setdefault(tool, tool) for tool in tools),
            tuple(pieces[leading:]),
            line.prompt_tokens // len(several),
            cached_tokens=line.cached_tokens if len(several) == 1 else None,
        )


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    both = zip(texts, content, strict=True)
    return "\n".join(text if isinstance(text, str) else msgspec.json.encode(part).decode() for text, part in both)
