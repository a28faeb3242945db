"""Answers of the Messages API: blocks in the order of the model's text, however many tokens come at once."""

import itertools
import json

import pytest

from api.generation_apis import MESSAGES
from api.native import Native
from api.parsing.formats import AnswerFormats
from api.tokens.tokenizer import ByteTokenizer
from replica.http.conversation_forms import form_of
from replica.http.work import Served, plan

TEXT = 'Before<tool_call>{"name": "look", "arguments": {}}</tool_call>After'
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_text_after_a_call_stays_after_it(step: int) -> None:
    tokenizer = ByteTokenizer()
    body = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    request, original = MESSAGES.read(json.dumps(body).encode())
    served = Served(4096, tokenizer, tokenizer.eos_token_ids, AnswerFormats("hermes"))
    new_id = itertools.count(1).__next__
    work = plan(request, Native(), [[1]], served, new_id, MESSAGES, original)
    form = form_of(work, "m", tokenizer)
    [part] = work.parts
    form.begin(part.choice, 0)
    said = tokenizer.encode(TEXT, add_special_tokens=False)
    for start in range(0, len(said), step):
        form.add(part.choice, part.choice.feed(said[start : start + step]))
    form.add(part.choice, part.choice.feed([tokenizer.eos_token_ids[0]], "stop"))
    assert [block["type"] for block in json.loads(form.end())["content"]] == ["text", "tool_use", "text"]
