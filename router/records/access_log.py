"""One JSON line for every request: its client, path, replica and outcome; no word of its body."""

import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from router.proxy.request_summary import RequestSummary

encode = msgspec.json.Encoder().encode


class Line(Struct, omit_defaults=True):
    ts: float
    client: str | None
    method: str
    path: str
    status: int
    duration_s: float
    sent_bytes: int
    request_id: str
    key: str | None = None
    model: str | None = None
    replica: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    retries: int = 0
    resumes: int = 0
    client_left: bool = False
    output_tokens: int | None = None


def line_of(scope: Any, *, status: int, duration_s: float, sent_bytes: int, request_id: str, **more: Any) -> Line:
    client = scope["client"]
    return Line(
        ts=round(time.time(), 6),
        client=client[0] if client else None,
        method=scope["method"],
        path=scope["path"],
        status=status,
        duration_s=round(duration_s, 6),
        sent_bytes=sent_bytes,
        request_id=request_id,
        **more,
    )


def line_of_request(summary: "RequestSummary") -> Line:
    """The line of a request meant for a replica."""
    exchange, admitted, generation = summary.exchange, summary.admitted, summary.generation
    told: dict[str, Any] = {}
    if generation is not None:
        told["replica"] = generation.member.name if generation.member else None
        told["prompt_tokens"] = summary.used.computed + summary.used.cached or generation.prompt.all_tokens
        told["cached_tokens"] = generation.reported_tokens
        told["output_tokens"] = summary.output_tokens
    return line_of(
        exchange.scope,
        status=exchange.status,
        duration_s=summary.duration_s,
        sent_bytes=exchange.sent_bytes,
        request_id=admitted.request_id,
        key=admitted.key.name if admitted.key else None,
        client_left=exchange.disconnected,
        model=summary.model.name if summary.model else None,
        ttft_s=None if summary.ttft_s is None else round(summary.ttft_s, 6),
        retries=summary.retries,
        resumes=summary.resumes,
        **told,
    )
