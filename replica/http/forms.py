"""The forms of an answer: completion or chat completion, streamed as events or whole.

A form is told what each choice adds. A streamed one returns the events at once; a whole one keeps everything and
returns it at the end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

from msgspec import UNSET, UnsetType

from api import responses
from api.errors import ApiError
from api.openai.requests import ChatRequest, CompletionRequest
from api.parsing.answer import named_function
from api.parsing.parsed import AnswerParser, Parsed, merged
from api.tokens.detokenize import Detokenizer
from api.tokens.tokenizer import Tokenizer
from replica.http.generation import Choice, Delta
from replica.http.work import Work
from replica.messages import TokenLogprobs

AT_ONCE = 1000  # log probabilities of prompts that are put into words before others have their turn: about 1 ms


class Form(ABC):
    kind: ClassVar[type[responses.Completion | responses.ChatChunk | responses.ChatCompletion]]

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        self.work = work
        self.id, self.created = work.id, work.created
        self.request = work.request
        self.model = model
        self.tokenizer = tokenizer
        self._cached_tokens: dict[int, int] = {}  # tokens by choice
        self._told: dict[int, Sequence[TokenLogprobs]] = {}  # those of each prompt, from its second token on
        # `usage` says these, which are kept as they grow: it may be asked for at every event, of a thousand choices.
        self._prompt_tokens = work.prompt_tokens
        self.events = 0  # sent so far, where they are numbered
        self._completion_tokens = sum(part.choice.completion_tokens for part in work.parts)
        self._cached_in_prompts = 0

    def begin(self, choice: Choice, cached_tokens: int) -> None:
        """Note the start of a choice, with its number of cached prompt tokens."""
        self._cached_tokens[choice.index] = cached_tokens
        if choice.index % self.request.n == 0:
            self._cached_in_prompts += cached_tokens

    def tell_prompt(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log probabilities of this choice's prompt."""
        self._told[choice.index // self.request.n] = logprobs

    def prepare(self) -> Iterator[None]:
        """Make the slow parts of `end`, in small steps."""
        yield from ()

    def add(self, choice: Choice, delta: Delta) -> bytes:
        self._completion_tokens += len(delta.token_ids)
        return self.show(choice, delta)

    @abstractmethod
    def show(self, choice: Choice, delta: Delta) -> bytes: ...

    @abstractmethod
    def end(self) -> bytes: ...

    def broken(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        return self.work.api.error_event(error, self.events)

    def cached_tokens_of_first(self) -> int:
        """Cached tokens of the first choice that has begun; the choices of one prompt begin together."""
        return self._cached_tokens[min(self._cached_tokens)] if self._cached_tokens else 0

    def usage(self) -> responses.Usage:
        """A prompt counts once, however many choices it has."""
        return responses.usage(self._prompt_tokens, self._completion_tokens, self._cached_in_prompts)

    def stop_reason(self, choice: Choice) -> str | int | UnsetType | None:
        """vLLM's addition: which stop string or stop token of the client's it was."""
        if choice.finish_reason is None:
            return UNSET
        if choice.stop_token in self.request.stop_token_ids:
            return choice.stop_token
        return choice.stop_string

    def token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self.request.return_token_ids else UNSET

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        return list(self.work.prompts[index // self.request.n]) if self.request.return_token_ids else UNSET

    def logprobs(self, delta: Delta) -> Any:
        """As a choice of this kind has them."""
        if self.request.alternatives is None:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        chosen = [(token_id, logprobs.logprob, logprobs.top) for token_id, logprobs in pairs]
        if self.kind is not responses.Completion:
            return responses.chat_logprobs(self.tokenizer, chosen)
        shown = responses.completion_logprobs(self.tokenizer, chosen, 0)
        shown.text_offset = list(delta.offsets)
        return shown

    def answer(self, choices: list[Any], used: Any) -> Any:
        return self.kind(id=self.id, created=self.created, model=self.model, choices=choices, usage=used)


class ChatForm(Form):
    """The parsers of a chat's choices."""

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(work, model, tokenizer)
        self._parsers: list[AnswerParser | None] = [part.parser for part in work.parts]
        self._called: set[int] = set()  # choices
        assert isinstance(work.request, ChatRequest)
        # OpenAI's rule: a call that the client asked for is no reason to end.
        self._calls_end = named_function(work.request) is None

    def parsed(self, choice: Choice, delta: Delta) -> Parsed:
        parser = self._parsers[choice.index]
        if parser is None:
            return Parsed(content=delta.text)
        said = parser.feed(delta.text)
        if delta.finish_reason is not None:
            said = merged(said, parser.finish())
        if said.calls:
            self._called.add(choice.index)
        return said

    def finish_reason(self, choice: Choice, delta: Delta) -> responses.FinishReason:
        """An answer with calls is one that ends because of them, unless it was cut short."""
        reason = finish_reason(delta)
        return "tool_calls" if reason == "stop" and self._calls_end and choice.index in self._called else reason


class StreamedForm(Form):
    """Server-sent events. What another replica has said is not said again."""

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(work, model, tokenizer)
        self._opened = {part.choice.index for part in work.parts if part.resumed.token_ids}
        options = work.request.stream_options
        self._always_usage = bool(options and options.continuous_usage_stats and options.include_usage)
        self._always_show = work.request.return_token_ids or work.request.alternatives is not None

    def is_first(self, choice: Choice) -> bool:
        first = choice.index not in self._opened
        self._opened.add(choice.index)
        return first

    def is_silent(self, shown: bool, delta: Delta) -> bool:
        """Half a character, or a text that may become a stop string or a call."""
        return not (shown or delta.finish_reason or self._always_show)

    def usage_so_far(self) -> responses.Usage | UnsetType | None:
        """Every event has the field when the last one will have it filled."""
        if self._always_usage:
            return self.usage()
        return None if self.request.include_usage else UNSET

    def end(self) -> bytes:
        used = responses.event(responses.encode(self.answer([], self.usage()))) if self.request.include_usage else b""
        return used + responses.DONE


class StreamedCompletion(StreamedForm):
    kind = responses.Completion

    def show(self, choice: Choice, delta: Delta) -> bytes:
        first = self.is_first(choice)
        echo = echo_of(self, choice.index) if first else ""
        if self.is_silent(bool(delta.text or echo), delta):
            return b""
        shown = responses.CompletionChoice(
            index=choice.index,
            text=echo + delta.text,
            logprobs=self.logprobs(delta),
            finish_reason=finish_reason(delta),
            stop_reason=self.stop_reason(choice),
            token_ids=self.token_ids(delta),
            prompt_token_ids=self.prompt_token_ids(choice.index) if first else UNSET,
        )
        return responses.event(responses.encode(self.answer([shown], self.usage_so_far())))


class StreamedChat(ChatForm, StreamedForm):
    kind = responses.ChatChunk

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(work, model, tokenizer)
        for part in work.parts:
            self.parsed(part.choice, part.resumed)  # the client has it

    def show(self, choice: Choice, delta: Delta) -> bytes:
        opening = b""
        if self.is_first(choice):
            role = responses.ChatChunkChoice(index=choice.index, delta=responses.Delta(role="assistant", content=""))
            chunk = self.answer([role], self.usage_so_far())
            chunk.prompt_token_ids = self.prompt_token_ids(choice.index)
            opening = responses.event(responses.encode(chunk))
        said = self.parsed(choice, delta)
        if self.is_silent(any(said), delta):
            return opening
        shown = responses.ChatChunkChoice(
            index=choice.index,
            delta=responses.chat_delta(said),
            logprobs=self.logprobs(delta),
            finish_reason=self.finish_reason(choice, delta),
            stop_reason=self.stop_reason(choice),
            token_ids=self.token_ids(delta),
        )
        return opening + responses.event(responses.encode(self.answer([shown], self.usage_so_far())))


class WholeForm(Form):
    """One JSON body. What another replica has said is a part of it."""

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(work, model, tokenizer)
        self._said = [[part.resumed] for part in work.parts]
        self._prompt_logprobs: dict[int, responses.PromptLogprobs] = {}

    @property
    def pause_every(self) -> int:
        """The tokens of a prompt that are put into words at once."""
        return max(1, AT_ONCE // ((self.request.scored or 0) + 1))

    def prepare(self) -> Iterator[None]:
        wanted = self.request.prompt_logprobs
        for index, told in self._told.items() if wanted is not None else ():
            shown: responses.PromptLogprobs = [None]
            self._prompt_logprobs[index] = shown
            for token_id, of_token in zip(self.work.prompts[index][1:], told, strict=True):
                top = of_token.top[:wanted]
                shown.append(responses.prompt_logprob(self.tokenizer, token_id, of_token.logprob, of_token.rank, top))
                if len(shown) % self.pause_every == 0:
                    yield

    def prompt_logprobs(self, index: int) -> responses.PromptLogprobs | UnsetType:
        return self._prompt_logprobs.get(index // self.request.n, UNSET)

    def show(self, choice: Choice, delta: Delta) -> bytes:
        self._said[choice.index].append(delta)
        return b""

    def joined(self, index: int) -> Delta:
        said = self._said[index]
        return Delta(
            "".join(delta.text for delta in said),
            [token_id for delta in said for token_id in delta.token_ids],
            [offset for delta in said for offset in delta.offsets],
            [logprobs for delta in said for logprobs in delta.logprobs],
            said[-1].finish_reason,
        )


class WholeCompletion(WholeForm):
    kind = responses.Completion

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(work, model, tokenizer)
        self._echoed: dict[int, responses.CompletionLogprobs] = {}  # log probabilities by prompt

    def end(self) -> bytes:
        choices = [self._choice(part.choice) for part in self.work.parts]
        return responses.encode(self.answer(choices, self.usage()))

    def prepare(self) -> Iterator[None]:
        yield from super().prepare()
        request = cast(CompletionRequest, self.request)
        if not request.echo or request.logprobs is None:
            return
        for index, told in self._told.items():
            detokenizer = Detokenizer(self.tokenizer, request.skip_special_tokens)
            first, *token_ids = self.work.prompts[index]
            self._echoed[index] = echoed = responses.CompletionLogprobs([], [], [], [])
            responses.add_first_token(echoed, self.tokenizer, first)
            text_offset = len(detokenizer.feed((first,)))
            for count, (token_id, of_token) in enumerate(zip(token_ids, told, strict=True), start=1):
                chosen = token_id, of_token.logprob, of_token.top[: request.logprobs]
                responses.add_logprob(echoed, self.tokenizer, chosen, text_offset)
                text_offset += len(detokenizer.feed((token_id,)))
                if count % self.pause_every == 0:
                    yield

    def _choice(self, choice: Choice) -> responses.CompletionChoice:
        said = self.joined(choice.index)
        echo, logprobs = echo_of(self, choice.index), self.logprobs(said)
        if (echoed := self._echoed.get(choice.index // self.request.n)) is not None:
            logprobs = responses.CompletionLogprobs(
                [*echoed.text_offset, *(len(echo) + offset for offset in logprobs.text_offset)],
                [*echoed.token_logprobs, *logprobs.token_logprobs],
                [*echoed.tokens, *logprobs.tokens],
                [*echoed.top_logprobs, *logprobs.top_logprobs],
            )
        return responses.CompletionChoice(
            index=choice.index,
            text=echo + said.text,
            logprobs=logprobs,
            finish_reason=finish_reason(said),
            stop_reason=self.stop_reason(choice),
            token_ids=self.token_ids(said),
            prompt_token_ids=self.prompt_token_ids(choice.index),
            prompt_logprobs=self.prompt_logprobs(choice.index),
        )


class WholeChat(ChatForm, WholeForm):
    kind = responses.ChatCompletion

    def end(self) -> bytes:
        choices = [self._choice(part.choice) for part in self.work.parts]
        answer = self.answer(choices, self.usage())
        answer.prompt_token_ids, answer.prompt_logprobs = self.prompt_token_ids(0), self.prompt_logprobs(0)
        return responses.encode(answer)

    def _choice(self, choice: Choice) -> responses.ChatChoice:
        said = self.joined(choice.index)
        return responses.ChatChoice(
            index=choice.index,
            message=responses.chat_message(self.parsed(choice, said)),
            logprobs=self.logprobs(said),
            finish_reason=self.finish_reason(choice, said),
            stop_reason=self.stop_reason(choice),
            token_ids=self.token_ids(said),
        )


FORMS: dict[tuple[type, bool], type[Form]] = {
    (CompletionRequest, False): WholeCompletion,
    (CompletionRequest, True): StreamedCompletion,
    (ChatRequest, False): WholeChat,
    (ChatRequest, True): StreamedChat,
}


def form_of(work: Work, model: str, tokenizer: Tokenizer) -> Form:
    return FORMS[type(work.request), work.request.stream](work, model, tokenizer)


def echo_of(form: Form, index: int) -> str:
    """The text of the prompt of this choice, if the client wants it back."""
    request = form.request
    if not isinstance(request, CompletionRequest) or not request.echo:
        return ""
    given = request.prompts[index // request.n]
    if isinstance(given, str):  # the client sent text, and gets it back unchanged
        return given
    return form.tokenizer.decode(given, skip_special_tokens=request.skip_special_tokens)


def finish_reason(delta: Delta) -> responses.FinishReason:
    """There is no "abort" here: a client that is gone is told nothing."""
    return cast(responses.FinishReason, delta.finish_reason)
