"""Server-sent events, as OpenAI streams them. A payload is one line: JSON without newlines."""

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload
