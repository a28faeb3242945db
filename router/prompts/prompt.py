"""The fields that the router reads of a request, and the prompt as the index and the policy see it.

Reading refuses nothing that an engine might accept: unknown fields stay unread, and a field of an odd type is read as
by a lenient engine, or treated as absent. The client's bytes go on to the replica as they came.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_64_hexdigest

from api.errors import ApiError, invalid
from api.generation_apis import GenerationApi
from api.prompts.billing import BILLING_HEADER, without_billing
from api.reading import read
from api.retention import Retain
from events.blocks import TOKEN_BYTES, extend_keys, pack_tokens, root_key
from router.prompts.pictures import Cut, Place, extras_of

APPROXIMATE = 0  # stands for a block size: blocks of the prompt's bytes
# Smaller ones cost time at each look-up, larger ones hide more of a shared beginning (docs/benchmarks-router.md).
APPROXIMATE_BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4  # English text has this many with a usual tokenizer

ROLE_CHARACTERS = 40  # the most characters of a role, where it is shown

_NOTHING = Raw(b"")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # all that decoding raises


class PeekMessage(Struct, gc=False):
    role: Any = None
    content: Any = None
    tool_calls: Any = None


class Peek(Struct):
    """A few fields of the client's JSON; absent and unusable ones are None."""

    model: str
    messages: list[PeekMessage] | None = None
    prompt: Any = None
    tools: Raw = _NOTHING
    stream: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    n: int | None = None
    seed: int | None = None
    echo: bool | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None

    def skips_cache(self, chat: bool) -> bool:
        """Return whether an engine such as vLLM computes the whole prompt, cached or not, to score its tokens."""
        return self.prompt_logprobs is not None or (bool(self.echo) and (chat or self.logprobs is not None))


def forget_others(peek: Peek, api: GenerationApi) -> None:
    """Forget the contents of another API: no engine reads them, so they are neither matched nor counted."""
    if api.is_chat:
        peek.prompt = None
    else:
        peek.messages = None


_decode = msgspec.json.Decoder(Peek).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_FIELDS = [(field.name, field.type) for field in msgspec.structs.fields(Peek) if field.name != "model"]
_Loose = msgspec.defstruct("_Loose", [("model", str), *((name, Any, None) for name, _ in _FIELDS)])


def read_peek(body: bytes) -> Peek:
    """Parse the fields; raise ApiError 400 unless the body is a JSON object that names a model."""
    try:
        return _decode(body)
    except UNREADABLE:
        loose: Any = read(body, _Loose)
        given = ((name, type, getattr(loose, name)) for name, type in _FIELDS)
        return Peek(loose.model, **{name: lenient(value, type) for name, type, value in given if value is not None})


def lenient(value: Any, type: Any) -> Any:
    """Convert a value as pydantic does: "true", 1 and "8" are accepted. None if it does not fit."""
    if type is Raw:
        return Raw(msgspec.json.encode(value))
    try:
        return msgspec.convert(value, type, strict=False)
    except msgspec.ValidationError:
        return None


def unreadable(error: Exception) -> ApiError:
    """The ApiError for a body that cannot be parsed further than `read_peek` did."""
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deeply; flatten it")
    if isinstance(error, UnicodeDecodeError):
        return invalid(f"the body is not UTF-8 ({error.reason}); encode it as UTF-8")
    return invalid(f"the body cannot be read: {error}")


def salted(body: bytes, peek: Peek, salt: str) -> bytes:
    """The body with this cache salt and no other; raise one of UNREADABLE if it has to be parsed and cannot be."""
    if peek.cache_salt is not None:
        fields = _decode_fields(body)
        fields["cache_salt"] = Raw(msgspec.json.encode(salt))
        return msgspec.json.encode(fields)
    # It goes to the end, because parsers take the last of two fields: the client may have set an unusable salt.
    return body.rstrip()[:-1] + b',"cache_salt":' + msgspec.json.encode(salt) + b"}"


def object_salted(body: bytes, salted: Callable[[str | None], str | None]) -> bytes:
    """Apply `salted` to the cache salt (or None) of a JSON object; raise one of UNREADABLE for any other body."""
    fields = _decode_fields(body)
    given = fields.get("cache_salt")
    salt = salted(None if given is None else lenient(msgspec.json.decode(given), str))
    fields["cache_salt"] = Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


@lru_cache
def _unsalted_root(model: str, lora: str | None, block_size: int) -> int:
    """The root key without a salt. It is cached: unlike salts, which clients choose, models are few."""
    return root_key(model, lora, None, block_size)


class Prompt(Struct):
    """A request's prompts as the index and the policy see them. The keys are those of the first prompt."""

    model: str  # the name in the root of block keys
    tokens: int  # tokens of the first prompt; estimated where it is not exact
    packed: list[bytes]  # token ids of each prompt; empty where it is not exact
    exact: bool  # made with the model's own tokenizer
    why_not: str | None  # why it is not
    choices: int
    lora: str | None
    salt: str | None
    peek: Peek
    _keys: dict[int, list[int]] = {}
    _text: bytes | None = None
    _text_bytes: int | None = None  # set if the text itself was in another process
    read_apart: bool = False  # another process read it, as its body takes long to read
    shape: str | None = None  # the request's shape; None: it needs no verifying, or cannot be verified
    unverified: bytes | None = None  # the token ids that are its prompt if its shape turns out to be verified
    doubt: str | None = None  # why it is not called exact although its tokens are used
    retain: list[Retain] = []  # beginnings that replicas are asked to keep in their cache
    dated_s: float | None = None  # the moment at which its template was asked for the date; None: it shows none
    all_tokens: int = 0  # the tokens of all its prompts; no look-up finds those after the first one cached
    reason: str | None = None  # `why_not` or `doubt` in a word, by which such prompts are counted
    asked: bool = False  # an engine was asked for its tokens
    pictures: list[Place] = []  # among its tokens
    cut: Cut | None = None  # its body without pictures, if another process has read it

    def keys(self, block_size: int, lookahead: int = 0) -> list[int]:
        """The keys of the full blocks of this many tokens, or of blocks of text if the size is APPROXIMATE.

        `lookahead`: tokens after a block that its key covers, too.
        """
        kind = -1 - (block_size << 16 | lookahead) if lookahead else block_size
        known = self._keys.get(kind)
        if known is None:
            if self.salt is None:
                root = _unsalted_root(self.model, self.lora, block_size)
            else:
                root = root_key(self.model, self.lora, self.salt, block_size)
            if block_size == APPROXIMATE:
                text = self.text if self._text is None else self._text
                known = extend_keys(root, text, APPROXIMATE_BLOCK_BYTES // TOKEN_BYTES)
            elif self.exact:
                extras = extras_of(self.pictures, block_size) if self.pictures else None
                known = extend_keys(root, self.packed[0], block_size, extras, lookahead)
            else:
                known = []
            self._keys[kind] = known
        return known

    @property
    def text(self) -> bytes:
        """The bytes that approximate blocks are made of."""
        if self._text is None:
            self._text = text_of(self.peek)
        return self._text

    @property
    def text_bytes(self) -> int:
        return len(self.text) if self._text_bytes is None else self._text_bytes

    @property
    def approximate_block_tokens(self) -> float:
        if not self.exact:
            return APPROXIMATE_BLOCK_BYTES / BYTES_PER_TOKEN
        return self.tokens * APPROXIMATE_BLOCK_BYTES / max(self.text_bytes, 1)


def salted_for(prompt: Prompt, body: bytes) -> bytes:
    """The body for an engine of another kind: with the prompt's salt, which the client may not have written."""
    if prompt.salt is None or prompt.salt == prompt.peek.cache_salt:
        return body
    return salted(body, prompt.peek, prompt.salt)


def approximate(
    model: str, peek: Peek, lora: str | None, salt: str | None, why_not: str, reason: str | None = None
) -> Prompt:
    text = text_of(peek)
    tokens = max(1, len(text) // BYTES_PER_TOKEN)
    prompt = Prompt(model, tokens, [], False, why_not, max(peek.n or 1, 1), lora, salt, peek, {}, text)
    prompt.all_tokens, prompt.reason = tokens, reason
    if isinstance(peek.prompt, list) and peek.prompt and not isinstance(peek.prompt[0], int):  # several prompts
        prompt.choices *= len(peek.prompt)
        for further in peek.prompt[1:]:
            if isinstance(further, Raw):  # the length of a body that is read apart
                raw = bytes(further)
                prompt.all_tokens += raw.count(b",") + 1 if raw.startswith(b"[") else estimated(raw)
            else:
                prompt.all_tokens += estimated(_prompt_text(further))
    return prompt


def by_text(model: str, peek: Peek, lora: str | None, text: bytes) -> Prompt:
    """A prompt known only by bytes that begin alike where prompts do."""
    tokens, why_not = estimated(text), "its body is not taken apart"
    return Prompt(model, tokens, [], False, why_not, 1, lora, None, peek, {}, text, all_tokens=tokens)


def estimated(text: bytes) -> int:
    """The tokens of a text that no tokenizer has seen."""
    return max(1, len(text) // BYTES_PER_TOKEN)


def text_of(peek: Peek) -> bytes:
    """The first prompt in bytes: equal beginnings of conversations are equal bytes, however their JSON is written."""
    if peek.messages is None:
        return _prompt_text(peek.prompt)
    parts = [bytes(peek.tools)] if peek.tools else []
    messages = peek.messages
    if messages and messages[0].role == "system":
        messages = _unbilled(messages)
    # Message by message: one that is not ASCII is encoded far more slowly, and must not take the others with it.
    for message in messages:
        content = message.content
        if isinstance(content, list):
            texts = ((part, part.get("text") if isinstance(part, dict) else None) for part in content)
            # An image counts by its digest: its megabytes are not tokens.
            content = "\n".join(
                text if isinstance(text, str) else xxh3_64_hexdigest(msgspec.json.encode(part)) for part, text in texts
            )
        elif not isinstance(content, str):
            content = "" if content is None else _json(content)
        calls = _json(message.tool_calls) if message.tool_calls else ""
        parts.append(f"\0{message.role}\0{content}{calls}".encode())
    return b"".join(parts)


def _unbilled(messages: list[PeekMessage]) -> list[PeekMessage]:
    """The messages, of which the first is the system's, as engines see them that leave out a billing line there."""
    first = messages[0]
    if not isinstance(first.content, str | list):
        return messages
    content = without_billing(first.content)
    return messages if content == first.content else [PeekMessage("system", content, first.tool_calls), *messages[1:]]


def is_billed(peek: Peek) -> bool:
    """Tell whether the system prompt begins with Claude Code's billing line."""
    messages = peek.messages
    if messages is None:  # a body that was read apart is known by its beginning only
        return isinstance(peek.prompt, str) and peek.prompt.startswith(f"\0system\0{BILLING_HEADER}")
    return bool(messages) and messages[0].role == "system" and _unbilled(messages) is not messages


def beginning_of(peek: Peek, most_bytes: int) -> bytes:
    """The beginning of the first prompt's text, for people: without tools and images, and without reading all of it."""
    if peek.messages is None:
        given = peek.prompt
        while isinstance(given, list) and given:
            given = given[0]
        return given[:most_bytes].encode()[:most_bytes] if isinstance(given, str) else b""
    begun = ""
    for message in peek.messages:
        begun += f"\0{str(message.role)[:ROLE_CHARACTERS]}\0"
        content = message.content
        for part in content if isinstance(content, list) else (content,) if isinstance(content, str) else ():
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                begun += text[:most_bytes]
            if len(begun) >= most_bytes:
                return begun.encode()[:most_bytes]
    return begun.encode()[:most_bytes]


def _prompt_text(prompt: Any) -> bytes:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt:
        try:
            return pack_tokens(prompt)
        except ValueError:
            pass  # no token ids: the engine will say so
    return _json(prompt).encode()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# ---- the conversation in a request of an API that only engines speak, as the text that approximate blocks are made of:
# equal beginnings of conversations are equal texts, whichever API they come by, and whatever stands around them

MAX_TEXT_BYTES = 1024 * 1024  # a body that is not taken apart: a replica is taken to hold four times as much


class _Conversation(Struct):
    system: Any = None
    messages: Any = None
    instructions: Any = None
    input: Any = None
    tools: Raw = Raw(b"")
    stream: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None


_decode_conversation = msgspec.json.Decoder(_Conversation).decode


def peek_of(api: str, body: bytes, model: str) -> Peek | None:
    """The request that a replica gets as a chat, for matching and for people; None if it is no conversation."""
    try:
        asked = _decode_conversation(body)
    except UNREADABLE:
        return None
    if api == "responses":
        messages = [*_system(asked.instructions), *_list(asked.input)]
    else:
        messages = [*_system(asked.system), *_list(asked.messages)]
    if not messages:
        return None
    made = []
    for item in messages:
        content = item.get("content") if isinstance(item, dict) else item
        role = item.get("role") or item.get("type") if isinstance(item, dict) else None
        made.append(PeekMessage(role, item if content is None else content))
    salt, key = (given if isinstance(given, str) else None for given in (asked.cache_salt, asked.prompt_cache_key))
    return Peek(model, made, tools=asked.tools, stream=asked.stream is True, cache_salt=salt, prompt_cache_key=key)


def _system(content: Any) -> Iterable[dict[str, Any]]:
    return [{"role": "system", "content": content}] if content else []


def _list(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return content if isinstance(content, list) else []
