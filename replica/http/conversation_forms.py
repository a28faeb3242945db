"""The forms of answers of other APIs than OpenAI's older ones: the same pieces of an answer in their own words."""

from abc import abstractmethod
from collections.abc import Iterator

from api.generation_apis import MESSAGES
from api.messages import answers as messages
from api.messages.blocks import Blocks
from api.parsing.parsed import AnswerParser, Parsed
from api.responses import encode
from api.tokenizer import Tokenizer
from replica.http import forms
from replica.http.forms import Form
from replica.http.generation import Choice, Delta
from replica.http.work import Work


class ConversationForm(Form):
    """The common part: one choice, whose text is parsed.

    What another replica has said is told again without being sent, token by token as it was: so everything that
    counts events or blocks goes on where the client is.
    """

    def __init__(self, work: Work, model: str, tokenizer: Tokenizer, parser: AnswerParser | None = None) -> None:
        super().__init__(work, model, tokenizer)
        [part] = work.parts
        self.choice = part.choice
        self.streams = bool(work.request.stream)
        self._parser = parser
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
        yield self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            yield self._parser.finish()


class MessageForm(ConversationForm):
    """A message of the Messages API."""

    def prepare_answer(self) -> None:
        self._blocks = Blocks(self.id)
        self._started = False

    def show(self, choice: Choice, delta: Delta) -> bytes:  # noqa: ARG002  # there is only one
        events: list[messages.Event] = []
        if not self._started:
            self._started = True
            events.append(messages.MessageStart(self._answer([], 0)))
        for parsed in self.parsed(delta):
            events += self._blocks.add(parsed)
        return b"".join(map(messages.event_bytes, events)) if self.streams else b""

    def end(self) -> bytes:
        closing = list(self._blocks.finish())
        if not self.streams:
            answer = self._answer(self._blocks.content(), self._completion_tokens)
            answer.stop_reason, answer.stop_sequence = self._stop_reason(), self.choice.stop_string
            return encode(answer)
        ending = messages.Ending(self._stop_reason(), self.choice.stop_string)
        last = messages.MessageDelta(ending, messages.OutputUsage(self._completion_tokens))
        return b"".join(map(messages.event_bytes, [*closing, last])) + messages.LAST_EVENT

    def _answer(self, content: list[messages.Content], output_tokens: int) -> messages.MessageAnswer:
        return messages.MessageAnswer(id=self.id, model=self.model, content=content, usage=self._usage(output_tokens))

    def _usage(self, output_tokens: int) -> messages.MessageUsage:
        return messages.usage(self._prompt_tokens, output_tokens, self._cached_in_prompts)

    def _stop_reason(self) -> messages.StopReason:
        if self.choice.finish_reason == "length":
            return "max_tokens"
        if self._blocks.has_calls:
            return "tool_use"
        return "end_turn" if self.choice.stop_string is None else "stop_sequence"


FORMS: dict[str, type[ConversationForm]] = {MESSAGES.name: MessageForm}


def form_of(work: Work, model: str, tokenizer: Tokenizer, parser: AnswerParser | None = None) -> Form:
    form = FORMS.get(work.api.name)
    return forms.form_of(work, model, tokenizer) if form is None else form(work, model, tokenizer, parser)
