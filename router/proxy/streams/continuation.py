"""Continues a foreign engine's stream at another replica: keeps its tokens, and rewrites later events to fit.

The engine is asked for its token ids (`return_token_ids`: vLLM from 0.10.2 on, SGLang for completions); the additions
are removed again. When the replica is lost, another one gets the prompt and the generated tokens as one prompt of
`/v1/completions`, and its events are rewritten as those of the first stream.

Some differences remain: a stream with a temperature uses other random numbers, even with a seed (greedy ones
continue with the same tokens); `cached_tokens` is the last replica's. Reasoning and tool calls need a parser
that cannot begin in the middle: such streams break off. No text is shown twice or left out: tokens whose
text the client has not seen are generated again.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from api.native import unpack_ids
from api.parsing.formats import REASONING
from api.responses import DONE as LAST_EVENT
from api.responses import event as event_of
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import Tokenizer
from engines.profile import EngineProfile
from events.blocks import TOKEN_BYTES
from router.prompts.prompt import Prompt
from router.prompts.reading.client import is_quick_event
from router.proxy.streams.events import ABORTED, DONE, EventReader, payload_of
from router.proxy.streams.fields import NOT_CONTINUED, decode_asked, without_ids

# ---- the parsed parts of an engine's stream


class Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        return (self.text if self.delta is None else self.delta.get("content")) or ""

    @property
    def role(self) -> bool:
        return self.delta is not None and self.delta.get("role") is not None


class Chunk(Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


def is_silent(chunk: Chunk, *, role_is_news: bool = True) -> bool:
    """Return whether the event is there only for its token ids."""
    if chunk.usage is not None or not chunk.choices:
        return False
    return all(
        choice.finish_reason is None
        and not choice.logprobs
        and not (choice.role and role_is_news)
        and not any(value for name, value in (choice.delta or {}).items() if name != "role")
        and not choice.text
        for choice in chunk.choices
    )


# ---- the stream


COMPLETIONS_PATH = b"/v1/completions"
PROMPT_END = 32  # tokens of a prompt in which the beginning of reasoning is looked for
USUAL_COMPLETION_TOKENS = 16  # OpenAI's default; a chat, and at vLLM null, may go on to the model's length


class Continuation:
    """Continues one stream. For each replica: `relay` or `resume`, then `read` its bytes; on a loss `settle`."""

    def __init__(self, chat: bool, prompt: Prompt, body: bytes, tokenizer: Tokenizer) -> None:
        asked = decode_asked(body)
        self.why_not: str | None = None  # the reason if no replica can continue it after all
        self.done = False  # the last event was shown
        self.ids: list[int] = []  # generated tokens whose text was shown
        self._clean: int | None = 0  # this many of them end with a whole character; None: no number does
        self._shown_ids = 0
        self._chat = chat
        self._object = "chat.completion.chunk" if chat else "text_completion"
        self._prompt_ids = prompt.packed[0]
        self._tokenizer = tokenizer
        self._shows_ids = bool(asked.return_token_ids)
        self._skips_special = asked.skip_special_tokens is not False
        ends = () if asked.ignore_eos else tokenizer.eos_token_ids
        self._ends = frozenset((*ends, *(asked.stop_token_ids or ())))
        self._wants_usage = bool((asked.stream_options or {}).get("include_usage"))
        self._limit = asked.max_completion_tokens if chat else None
        if self._limit is None and asked.max_tokens is UNSET:
            self._limit = None if chat else USUAL_COMPLETION_TOKENS
        elif self._limit is None:
            self._limit = asked.max_tokens or None
        self.head: tuple[str, int, str] | None = None  # id, created and model as the client has seen them
        self._opened = False  # the role was shown
        self._begun_by_ours = False
        self._finished = False
        self._usage_shown = False
        self._begin(retells=False)

    # ---- what a replica is sent

    def relay(self, *, native: bool = False) -> None:
        """Prepare for a replica that begins anew; a native one continues by itself, and has the ids in its frames."""
        self._begin(retells=self.head is not None and not (native and self.ids))
        self._says_ids = not native

    def resume(self, body: bytes, max_model_len: int | None) -> bytes:
        """The body for a foreign replica: the request as a completion, with the generated tokens in its prompt."""
        self._begin(retells=True)
        self._before = len(self.ids)
        fields = msgspec.json.decode(body, type=dict[str, Raw])
        kept = {name: value for name, value in fields.items() if name not in NOT_CONTINUED}
        prompt = [*unpack_ids(self._prompt_ids), *self.ids]
        more = {"prompt": prompt, "max_tokens": self._room(max_model_len), "return_token_ids": True}
        return msgspec.json.encode(kept | more)

    def _begin(self, *, retells: bool) -> None:
        self._reader, self._retells, self._says_ids = EventReader(), retells, True
        self.broken: str | None = None  # the replica's own error
        self._before = 0  # tokens of the answer that are part of its prompt
        self._new_ids: list[int] = []
        self._new_text: list[str] = []

    def fits(self, profile: EngineProfile, max_model_len: int | None) -> bool:
        """Return whether such a replica can continue, and drop the tokens that it cannot continue from."""
        native = profile.takes_envelope
        kept = len(self.ids) if native else self._clean
        if kept is None:
            return False
        if self._shows_ids and kept != self._shown_ids:
            return False  # ids within a character would be shown again
        if not native and (not profile.takes_token_ids or self._room(max_model_len) is None):
            return False
        if native and self._limit is None and not self._chat:
            return False  # ours would end it after a few tokens
        if not native and self._begun_by_ours and self._chat:  # a parser may have made reasoning of a part
            decode = self._tokenizer.decode
            last_ids = unpack_ids(self._prompt_ids[-PROMPT_END * TOKEN_BYTES :])
            prompt_end = decode(last_ids, skip_special_tokens=False).rstrip()
            text = decode(self.ids, skip_special_tokens=False)
            if any(
                prompt_end.endswith(markers.begin) or markers.begin in text or markers.end in text
                for markers in REASONING.values()
            ):
                return False  # the client has it as reasoning, the engine would continue it as content
        del self.ids[kept:]
        return True

    def _room(self, max_model_len: int | None) -> int | None:
        """The number of tokens that may still be generated; None if it is unknown."""
        if self._limit is not None:
            return self._limit - len(self.ids)
        if max_model_len is None:
            return None
        return max_model_len - len(self._prompt_ids) // TOKEN_BYTES - len(self.ids)

    # ---- the outcome

    @property
    def new_tokens(self) -> int:
        """The tokens whose ids the present replica has sent."""
        return len(self._new_ids)

    def read(self, body: bytes, complete: bool) -> tuple[bytes, str | None]:
        """Parse a part of the stream; return the bytes for the client, and the reason if the replica is lost."""
        try:
            events = self._reader.feed(body)
        except ValueError as error:
            self.why_not = f"it has {error}"
            shown = self._reader.take_rest()
        else:
            show = self._retold if self._retells else self._relayed
            shown = b"".join([show(event) for event in events])
        if self.broken is not None or not complete:
            return shown, self.broken
        if not (self.done or self.why_not):
            return shown, "its stream ended before it was complete"
        return shown + self._reader.take_rest(), None

    def _relayed(self, event: bytes) -> bytes:
        chunk = self._read(event)
        if chunk is None:
            return b"" if self.broken else event
        self.head = self.head or (chunk.id, chunk.created, chunk.model)
        self._note(chunk)
        if self._shows_ids:
            return event
        return b"" if is_silent(chunk) else without_ids(event)

    def _retold(self, event: bytes) -> bytes:
        chunk = self._read(event)
        if chunk is None or self.head is None:
            return b"" if self.broken else event
        again = self._opened and any(choice.role for choice in chunk.choices)
        self._note(chunk)
        if is_silent(chunk, role_is_news=not again) and not (self._shows_ids and not again):
            return b""
        payload = payload_of(event)
        assert payload is not None, "it was read"
        fields: dict[str, Any] = msgspec.json.decode(payload)
        fields["id"], fields["created"], fields["model"] = self.head
        fields["object"] = self._object
        fields.pop("prompt_token_ids", None)
        left_out = {"prompt_token_ids"} if self._shows_ids else {"prompt_token_ids", "token_ids"}
        for choice in fields.get("choices", ()):
            told = {name: value for name, value in choice.items() if name not in left_out}
            choice.clear()
            for name, value in told.items():  # the order stays
                is_text = name == "text" and self._chat
                choice["delta" if is_text else name] = ({"content": value} if value else {}) if is_text else value
        if usage := fields.get("usage"):
            usage["prompt_tokens"] = usage.get("prompt_tokens", 0) - self._before
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._before
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict) and details.get("cached_tokens"):
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return event_of(msgspec.json.encode(fields))

    def _read(self, event: bytes) -> Chunk | None:
        """Parse an event; None if it is to be passed on as it is, or dropped because the replica broke."""
        payload = payload_of(event)
        if payload is None:
            return None
        if payload == DONE:
            self.done = self.broken is None
            return None
        if not is_quick_event(payload):
            self.why_not = "an event of it takes too long to be read"
            return None
        try:
            chunk = decode_chunk(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.why_not = f"an event of it cannot be read: {error}"
            return None
        if chunk.error is not None and not chunk.choices:
            if self.why_not is None:
                self.broken = "it broke its stream off with an error"
            return None
        if any(choice.finish_reason == "abort" for choice in chunk.choices):
            self.broken = ABORTED  # another replica generates the rest of the event again
            return None
        return chunk

    def _note(self, chunk: Chunk) -> None:
        self._usage_shown = self._usage_shown or (not chunk.choices and chunk.usage is not None)
        prompts = [chunk.prompt_token_ids, *(choice.prompt_token_ids for choice in chunk.choices)]
        if not self._before and any(ids and ids != unpack_ids(self._prompt_ids) for ids in prompts):
            self.why_not = "the replica's prompt has other tokens than the router knows"
        for choice in chunk.choices:
            self._opened = self._opened or choice.role
            self._finished = self._finished or choice.finish_reason is not None
            if said := choice.said:
                self._new_text.append(said)
            if choice.token_ids:
                self._new_ids += choice.token_ids
                self._shown_ids += len(choice.token_ids)
            elif said and self._says_ids:
                self.why_not = "the replica does not say its token ids"
            if choice.index:
                self.why_not = "it has several choices"
            for name, value in (choice.delta or {}).items():
                if value and name not in ("role", "content"):
                    self.why_not = f"a parser made {name} of it"

    # ---- when the replica is lost

    def begun_by_ours(self, head: tuple[str, int, str]) -> None:
        """Adopt a stream that a replica of ours has begun, whose events are not parsed."""
        self.head = head
        self._opened = self._begun_by_ours = True
        if self._limit is None and not self._chat:
            self._limit = USUAL_COMPLETION_TOKENS  # ours take null for no word about it

    def settle(self, ids: Sequence[int] | None = None) -> None:
        """After a loss, find the generated tokens that were shown; `ids` are those of a replica of ours."""
        reader = Detokenizer(self._tokenizer, self._skips_special)
        reader.feed(self.ids)
        ends: list[int] = []  # token counts with exactly the shown text
        if ids is not None:
            for token_id in ids:
                self.ids.append(token_id)
                if reader.feed([token_id]):
                    ends.clear()
                elif not ends and self._clean is not None:
                    continue  # no text was added beyond the clean tokens
                ends.append(len(self.ids))
            if ends:
                self._clean = self._first_clean(ends)
            self._shown_ids = len(self.ids)
            room = self._room(None)  # the last token and the end are one event
            self._finished = self._finished or room == 0 or bool(self.ids and self.ids[-1] in self._ends)
            return
        if self._finished:
            self.ids += self._new_ids
            return
        shown, text = "".join(self._new_text), ""
        if not shown:
            ends.append(len(self.ids))
        for place, token_id in enumerate(self._new_ids, len(self.ids) + 1):
            text += reader.feed([token_id])
            if text == shown:
                ends.append(place)
            elif len(text) > len(shown):
                break
        if not ends:
            self.why_not = self.why_not or "its text is not that of its tokens"
            return
        self.ids += self._new_ids[: ends[-1] - len(self.ids)]
        if shown:
            self._clean = self._first_clean(ends)

    def _first_clean(self, ends: Sequence[int]) -> int | None:
        """The first of these ends that leaves no bytes of a character over, if there is one."""
        for end in ends:
            reader = Detokenizer(self._tokenizer, self._skips_special)
            reader.feed(self.ids[:end])
            if not reader.finish():
                return end
        return None

    def is_complete(self, max_model_len: int | None) -> bool:
        room = self._room(max_model_len)
        return self._finished or (room is not None and room <= 0)

    def ending(self) -> bytes:
        """The missing end of a stream whose tokens are complete."""
        if self.done:
            return b""
        last: list[bytes] = []
        if not self._finished:
            empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length"}
            last.append(self._event([choice], {"usage": None} if self._wants_usage else {}))
        if self._wants_usage and not self._usage_shown:
            prompt, generated = len(self._prompt_ids) // TOKEN_BYTES, len(self.ids)
            usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
            last.append(self._event([], {"usage": usage}))
        return b"".join(chain(last, (LAST_EVENT,)))

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        assert self.head is not None, "something was shown"
        id, created, model = self.head
        head = {"id": id, "object": self._object, "created": created, "model": model}
        return event_of(msgspec.json.encode(head | {"choices": choices} | more))
