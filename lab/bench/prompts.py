"""Makes request bodies of a conversation's turns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lab.bench.conversations import Conversation
from lab.bench.words import Passage, Words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_encode = msgspec.json.Encoder().encode


class Dialect(NamedTuple):
    """The optional fields that an endpoint takes."""

    greedy: bool = True  # temperature 0
    ignore_eos: bool = True  # answers are as long as was asked for
    usage: bool = True  # the stream ends with its usage
    limit: str = "max_tokens"  # the field's name


DIALECTS = (
    Dialect(),
    Dialect(ignore_eos=False),
    Dialect(ignore_eos=False, greedy=False, limit="max_completion_tokens"),
    Dialect(ignore_eos=False, greedy=False, usage=False),
)


class Form(NamedTuple):
    """The form of requests: messages, or a text."""

    model: str
    words: Words
    is_chat: bool = True
    dialect: Dialect = Dialect()

    @property
    def path(self) -> str:
        return CHAT if self.is_chat else COMPLETIONS

    def body(self, talk: Conversation, turn: int, answers: Sequence[str]) -> bytes:
        """`answers`: to the turns before, empty where there was none. Instead of those something made up is said."""
        if self.is_chat:
            said = self._said(talk, turn, answers)
            prompt: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in said]}
        else:
            prompt = {"prompt": "".join(content for _, content in self._said(talk, turn, answers))}
        return _encode({"model": self.model, "stream": True, **prompt, **self._options(talk.turns[turn].output_tokens)})

    def _options(self, output_tokens: int) -> dict[str, Any]:
        dialect = self.dialect
        return {
            dialect.limit: output_tokens,
            **({"temperature": 0} if dialect.greedy else {}),
            **({"ignore_eos": True} if dialect.ignore_eos else {}),
            **({"stream_options": {"include_usage": True}} if dialect.usage else {}),
        }

    def _said(self, talk: Conversation, turn: int, answers: Sequence[str]) -> list[tuple[str, str]]:
        text = self.words.text
        said = [("system", text(talk.system))] if talk.system else []
        for number in range(turn):
            said.append(("user", text(talk.turns[number].said)))
            said.append(("assistant", answers[number] or text([_made_up(talk, number)])))
        said.append(("user", text(talk.turns[turn].said)))
        return said


def asked_tokens(talk: Conversation, turn: int) -> int:
    """Return the planned tokens of this turn's prompt, without a template's."""
    before = sum(_tokens(one.said) + one.output_tokens for one in talk.turns[:turn])
    return _tokens(talk.system) + before + _tokens(talk.turns[turn].said)


def _tokens(passages: Sequence[Passage]) -> int:
    return sum(passage.tokens for passage in passages)


def _made_up(talk: Conversation, turn: int) -> Passage:
    return Passage(f"answer {turn} of {talk.name}", talk.turns[turn].output_tokens)
