"""The model without weights that real engines are given."""

from pathlib import Path
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from api.prompts.templates import Conversation
from api.tokens.tokenizer import load_tokenizer
from qualification.engines.model import SPECIAL, make
from qualification.engines.traffic import TOOL

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}


@pytest.mark.live
def test_the_models_template_shows_tools_calls_and_the_switch_that_rows_send(tmp_path: Path) -> None:
    make(tmp_path)
    prompts = Prompts(load_tokenizer(tmp_path))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    asked = Conversation(messages=messages, tools=[TOOL], kwargs={"enable_thinking": False})
    shown = str(prompts.conversation_text(asked))
    assert shown.count("Be brief.") == 1
    assert '"name": "look_up"' in shown
    assert '<call>look_up {"word": "x"}</call>' in shown
    assert shown.endswith("<think>\n\n</think>\n\n")
    assert [prompts.tokenizer.encode(token, add_special_tokens=False)[0] for token in SPECIAL] == [0, 1, 2]
