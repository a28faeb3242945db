"""Scripted answers of the simulated engine: for a conversation, the text of the first rule that matches."""

from collections.abc import Sequence

from api.generation_apis import InnerRequest
from api.native import pack_ids
from api.openai.requests import ChatRequest
from api.tokens.tokenizer import Tokenizer
from replica.config import AnswerRule


class ScriptedAnswers:
    """The tokens that each rule has the engine generate."""

    def __init__(self, rules: Sequence[AnswerRule], tokenizer: Tokenizer) -> None:
        self._rules = [(rule, pack_ids(tokenizer.encode(rule.text, add_special_tokens=False))) for rule in rules]

    def token_ids(self, request: InnerRequest) -> bytes:
        """The packed tokens of the answer; empty where no rule matches, as for prompts without messages."""
        if not isinstance(request, ChatRequest):
            return b""
        return next((token_ids for rule, token_ids in self._rules if matches(rule, request)), b"")


def matches(rule: AnswerRule, request: ChatRequest) -> bool:
    """Tell whether the conversation has every feature that the rule names."""
    if rule.last is not None and rule.last not in request.messages[-1].text:
        return False
    if rule.tool is not None and rule.tool not in [tool["function"]["name"] for tool in request.tools]:
        return False
    results = sum(message.role == "tool" for message in request.messages)
    return rule.tool_results is None or rule.tool_results == results
