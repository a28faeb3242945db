"""A log's prompts as pieces of text, in the order in which a chat template writes them, and what they share."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from api.prompts.billing import BILLING_HEADER
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
            if text.startswith(BILLING_HEADER):  # engines leave Claude Code's line out, or doctor names them
                text = text.partition("\n")[2]
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
        )


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    both = zip(texts, content, strict=True)
    return "\n".join(text if isinstance(text, str) else msgspec.json.encode(part).decode() for text, part in both)


STRIDE = 512  # letters compared at once
BEFORE = 40  # letters shown before a difference
AFTER = 40


class Example(Struct, frozen=True):
    """Two texts where they part."""

    before: str
    one: str
    other: str


def example_of(one: str, other: str) -> Example:
    at = common(one, other)
    return Example(one[max(0, at - BEFORE) : at], one[at : at + AFTER], other[at : at + AFTER])


def common(one: str, other: str) -> int:
    """Letters that both begin with."""
    shorter, at = min(len(one), len(other)), 0
    while at < shorter and one[at : at + STRIDE] == other[at : at + STRIDE]:
        at += STRIDE
    if at >= shorter:
        return shorter
    step = STRIDE
    while step:
        if one[at : at + step] == other[at : at + step]:
            at += step
        step //= 2
    return min(at, shorter)


def computed_letters(prompts: Iterable[Prompt]) -> int:
    """Letters computed for these prompts by a cache without an end: the size of the tree of their beginnings."""
    groups: defaultdict[tuple[str, str | None], set[tuple[Piece, ...]]] = defaultdict(set)
    for prompt in prompts:
        groups[prompt.model, prompt.salt].add(prompt.pieces)
    total = 0
    for texts in groups.values():
        before: tuple[Piece, ...] = ()  # sorted, each shares with it all that it shares with any that comes earlier
        for pieces in sorted(texts):
            total += sum(len(piece.text) for piece in pieces) - shared_letters(before, pieces)
            before = pieces
    return total


def shared_letters(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    letters = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            return letters + (common(mine.text, yours.text) if mine.role == yours.role else 0)
        letters += len(mine.text)
    return letters


class Fault(Struct, frozen=True):
    name: str
    advice: str  # one sentence


class Finding(Struct, frozen=True):
    name: str
    requests: int
    lost_tokens: int
    example: Example
    request_ids: tuple[str, str]
    advice: str


class Loss(Struct, frozen=True):
    """Before tokens are known: letters that would not have to be computed."""

    fault: Fault
    requests: int
    letters: int
    example: Example
    request_ids: tuple[str, str]
