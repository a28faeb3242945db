"""Answers that an engine gives up, and ends as if they were complete.

vLLM ends running answers so on SIGTERM, `/sleep` and `/pause`, SGLang on `/abort_request`: `finish_reason` is `abort`.
In vLLM's Messages API there is no `stop_reason` then: null in a stream, and no field in a whole answer. SGLang's says
`end_turn` there, which nothing tells from a complete answer.
"""

import re

from engines.profile import EngineProfile

# Within a string the quotes would stand behind backslashes, so generated text cannot be mistaken.
_OPENAI = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ABORTED = {  # with a mark that is found faster
    "chat": (b'"abort"', _OPENAI),
    "completions": (b'"abort"', _OPENAI),
    "batch": (b'"abort"', _OPENAI),
    "messages": (b'"stop_reason"', re.compile(rb'"delta"\s*:\s*\{\s*"stop_reason"\s*:\s*null')),
}
_UNKNOWN = b"", None
_OWN_ERROR = re.compile(rb'"code"\s*:\s*5\d\d\b')
ABORTED = "it gave the answer up (finish_reason abort)"


def is_aborted(api: str, answer: bytes, profile: EngineProfile) -> bool:
    """Return whether the engine has given this whole answer up."""
    if api == "messages":
        return profile.hides_aborts and b'"stop_reason"' not in answer and b'"content"' in answer
    mark, pattern = _ABORTED.get(api, _UNKNOWN)
    return pattern is not None and mark in answer and pattern.search(answer) is not None


def mark_of(api: str) -> bytes:
    """Bytes without which no event of this API's streams gives an answer up."""
    return _ABORTED.get(api, _UNKNOWN)[0]


def aborted_event(api: str, before: bytes, body: bytes) -> bytes | None:
    """The whole events of `body` before one that gives the answer up; None: there is no such event.

    `before`: what came before, in which the event may begin.
    """
    mark, pattern = _ABORTED.get(api, _UNKNOWN)
    if pattern is None or (mark not in body and before.endswith(b"\n\n")):
        return None
    held = before + body
    found = pattern.search(held)
    if found is None:
        return None
    ends = [
        held.rfind(end, 0, found.start()) + len(end) for end in (b"\n\n", b"\n\r\n") if end in held[: found.start()]
    ]
    return body[: max(0, max(ends, default=0) - len(before))]


def is_servers_error(body: bytes) -> bool:
    """Return whether a stream of OpenAI's APIs is an error of the engine's own from its first event on."""
    return body.startswith(b'data: {"error"') and _OWN_ERROR.search(body) is not None
