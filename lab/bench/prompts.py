"""Makes request bodies of a conversation's turns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lab.bench.words import Passage, Words
from lab.bench.workloads import Conversation

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
        text, dialect = self.words.text, self.dialect
        said = [("system", text(talk.system))] if talk.system else []
        for number, before in enumerate(talk.turns[:turn]):
            made_up = Passage(f"answer {number} of {talk.name}", before.output_tokens)
            said += [("user", text(before.said)), ("assistant", answers[number] or text([made_up]))]
        said.append(("user", text(talk.turns[turn].said)))
        fields: dict[str, Any] = {"model": self.model, "stream": True}
        if self.is_chat:
            fields["messages"] = [{"role": role, "content": content} for role, content in said]
        else:
            fields["prompt"] = "".join(content for _, content in said)
        fields[dialect.limit] = talk.turns[turn].output_tokens
        if dialect.greedy:
            fields["temperature"] = 0
        if dialect.ignore_eos:
            fields["ignore_eos"] = True
        if dialect.usage:
            fields["stream_options"] = {"include_usage": True}
        return _encode(fields)


def asked_tokens(talk: Conversation, turn: int) -> int:
    """Return the planned tokens of this turn's prompt, without a template's."""
    before = sum(_tokens(one.said) + one.output_tokens for one in talk.turns[:turn])
    return _tokens(talk.system) + before + _tokens(talk.turns[turn].said)


def _tokens(passages: Sequence[Passage]) -> int:
    return sum(passage.tokens for passage in passages)
