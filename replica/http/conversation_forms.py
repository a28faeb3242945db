"""The forms of answers of other APIs than OpenAI's older ones: the same pieces of an answer in their own words."""

import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import starmap

import msgspec
from msgspec import Struct

from api.errors import ApiError, quoted
from api.generation_apis import MESSAGES, RESPONSES
from api.messages import answers as messages
from api.messages.blocks import Blocks
from api.openai_responses import answers as responses
from api.openai_responses.output import Output, event_bytes
from api.openai_responses.requests import Item, ResponsesRequest
from api.openai_responses.tools import shown_tools
from api.parsing.parsed import Parsed, in_order
from api.responses import Event, encode, named_event
from api.tokens.tokenizer import Tokenizer
from replica.http import forms
from replica.http.forms import Form
from replica.http.generation import Choice, Delta
from replica.http.work import Work

ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "reasoning", "store", "user")
SAMPLED_BY = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
UNSAID = {"description": None, "parameters": None, "strict": None}  # keys that a function has in every answer
MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


class StoredResponse(Struct, frozen=True):
    body: bytes  # the answer's JSON
    conversation: bytes  # the JSON of all its items, input and output


class Conversation(Struct):
    """All items of a stored response, as another request may begin with them."""

    items: list[Item]


class StoredResponses:
    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, response_id: str, body: bytes, items: list[Item]) -> None:
        """Store a response, and drop the oldest beyond the limits; one above the limit by itself is not stored."""
        self._drop(response_id)
        stored = StoredResponse(body, encode(Conversation(items)))
        size = _size(stored)
        if size > self._most_bytes:
            return
        self._stored[response_id] = stored
        self.bytes += size
        while len(self._stored) > self._most or self.bytes > self._most_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """The response; raise ApiError 404 if it is not here."""
        stored = self._stored.get(response_id)
        if stored is None:
            kept = f"a replica keeps its newest {self._most:,} responses until it ends, unless store is false"
            message = f"there is no response {quoted(response_id)}: {kept}; send the whole conversation as input"
            raise ApiError(404, message, param=param, code="response_not_found")
        return stored

    def remove(self, response_id: str) -> None:
        self.get(response_id)
        self._drop(response_id)

    def check(self) -> None:
        assert self.bytes == sum(map(_size, self._stored.values())) <= self._most_bytes
        assert len(self._stored) <= self._most

    def _drop(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self.bytes -= _size(stored)


def _size(stored: StoredResponse) -> int:
    return len(stored.body) + len(stored.conversation)


class ConversationForm(Form):
    """The common part: one choice, whose text is parsed.

    What another replica has said is told again without being sent, token by token as it was: so everything that
    counts events or blocks goes on where the client is.
    """

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer, stored: StoredResponses | None = None) -> None:
        super().__init__(work, model, tokenizer)
        self._stored = stored
        [part] = work.parts
        self.choice = part.choice
        self.streams = bool(work.request.stream)
        self._parser = part.parser
        self.prepare_answer()
        for delta in part.choice.retold(part.resumed.token_ids):
            self.show(part.choice, delta)

    @abstractmethod
    def prepare_answer(self) -> None:
        """Set up the empty answer."""

    def parsed(self, delta: Delta) -> Iterator[Parsed]:
        if self._parser is None:
            yield Parsed(content=delta.text)
            return
        yield from in_order(self._parser, delta.text)
        if delta.finish_reason is not None:
            yield self._parser.finish()


class MessageForm(ConversationForm):
    def prepare_answer(self) -> None:
        self._blocks = Blocks(self.id)
        self._started = False

    def show(self, choice: Choice, delta: Delta) -> bytes:  # noqa: ARG002  # there is only one
        events: list[Event] = []
        if not self._started:
            self._started = True
            events.append(("message_start", {"message": self._answer([], 0)}))
        for parsed in self.parsed(delta):
            events += self._blocks.add(parsed)
        return b"".join(starmap(named_event, events)) if self.streams else b""

    def end(self) -> bytes:
        closing = list(self._blocks.finish())
        if not self.streams:
            answer = self._answer(self._blocks.content(), self._completion_tokens)
            answer.stop_reason, answer.stop_sequence = self._stop_reason(), self.choice.stop_string
            return encode(answer)
        ending = {"stop_reason": self._stop_reason(), "stop_sequence": self.choice.stop_string}
        usage = {"output_tokens": self._completion_tokens}  # the message's start has said the rest
        closing.append(("message_delta", {"delta": ending, "usage": usage}))
        return b"".join(starmap(named_event, closing)) + messages.LAST_EVENT

    def _answer(self, content: list[messages.Content], output_tokens: int) -> messages.MessageAnswer:
        return messages.MessageAnswer(id=self.id, model=self.model, content=content, usage=self._usage(output_tokens))

    def _usage(self, output_tokens: int) -> messages.MessageUsage:
        return messages.usage(self._prompt_tokens, output_tokens, self._cached_in_prompts, self.work.retain)

    def _stop_reason(self) -> messages.StopReason:
        if self.choice.finish_reason == "length":
            return "max_tokens"
        if self._blocks.has_calls:
            return "tool_use"
        return "end_turn" if self.choice.stop_string is None else "stop_sequence"


class ResponseForm(ConversationForm):
    def prepare_answer(self) -> None:
        shown = shown_tools(self.work.original.tools or ())
        self._output = Output(self.id, {tool.shown_name: tool.called for tool in shown})
        self._reasoning_tokens = 0

    def show(self, choice: Choice, delta: Delta) -> bytes:  # noqa: ARG002  # there is only one
        events: list[Event] = []
        if self.streams and not self.events:
            begun = self._answer("in_progress", [])
            events += [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        for parsed in self.parsed(delta):
            if parsed.reasoning and not (parsed.content or parsed.calls):
                self._reasoning_tokens += len(delta.token_ids)
            events += self._output.add(parsed)
        return self._numbered(events)

    def end(self) -> bytes:
        status: responses.Status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        closing = list(self._output.finish(status))
        answer = self._answer(status, self._output.items(status))
        answer.usage = self._usage()
        if status == "incomplete":
            answer.incomplete_details = responses.IncompleteDetails("max_output_tokens")
        else:
            answer.completed_at = int(time.time())
        body = encode(answer)
        asked = self.work.original
        if asked.store and self._stored is not None:
            said = msgspec.convert(msgspec.to_builtins(answer.output), list[Item])
            self._stored.add(self.id, body, [*(asked.previous_items or ()), *asked.items, *said])
        return self._numbered([*closing, (f"response.{status}", {"response": answer})]) if self.streams else body

    def _numbered(self, events: Sequence[Event]) -> bytes:
        if not self.streams:
            return b""
        first, self.events = self.events, self.events + len(events)
        return b"".join([event_bytes(event, number) for number, event in enumerate(events, first)])

    def _answer(self, status: responses.Status, output: list[responses.OutputItem]) -> responses.ResponseAnswer:
        asked: ResponsesRequest = self.work.original
        return responses.ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            metadata=asked.metadata or {},
            model=self.model,
            output=output,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            text=asked.text or {"format": {"type": "text"}},
            tool_choice=asked.tool_choice or "auto",
            tools=[
                UNSAID | msgspec.to_builtins(tool) if tool.type == "function" else tool for tool in asked.tools or ()
            ],
            **{name: getattr(asked, name) for name in ECHOED},
            **{name: getattr(self.request, name) for name in SAMPLED_BY},
        )

    def _usage(self) -> responses.ResponseUsage:
        return responses.ResponseUsage(
            input_tokens=self._prompt_tokens,
            input_tokens_details=responses.InputTokensDetails(self._cached_in_prompts),
            output_tokens=self._completion_tokens,
            output_tokens_details=responses.OutputTokensDetails(self._reasoning_tokens),
            total_tokens=self._prompt_tokens + self._completion_tokens,
        )


FORMS: dict[str, type[ConversationForm]] = {MESSAGES.name: MessageForm, RESPONSES.name: ResponseForm}


def form_of(work: Work, model: str, tokenizer: Tokenizer, stored: StoredResponses | None = None) -> Form:
    form = FORMS.get(work.api.name)
    return forms.form_of(work, model, tokenizer) if form is None else form(work, model, tokenizer, stored)
