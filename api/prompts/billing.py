"""The line at the head of Claude Code's system prompt that changes with every request.

It means nothing to a model, and would spoil every hit: vLLM leaves it out of system messages, and so do we.
"""

from typing import Any

BILLING_HEADER = "x-anthropic-billing-header"


def without_billing(content: str | list[Any]) -> str | list[Any]:
    """A system message's content without lines that bill a request; without any text, an empty list."""
    if isinstance(content, str):
        return (content.partition("\n")[2] or []) if content.startswith(BILLING_HEADER) else content
    kept: list[Any] = []
    for part in content:
        of_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if of_text else part
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append({**part, "text": rest} if of_text else rest)
    return kept
