"""A trace: requests with their times, lengths and blocks, and no text."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from router.placement.cost import Tenant


class TraceRequest(NamedTuple):
    """Equal numbers in `blocks` are blocks with the same content after the same beginning.

    There is one for each block that the prompt begins; the last may not be full. `output_tokens` are those generated.
    """

    at_s: float  # after the trace's beginning
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str | None = None  # that keeps requests together, where the trace says one
    tenant: Tenant | None = None  # that has a share of the replicas
    replica: int | None = None  # that it went to, where the trace says one
    name: str = ""  # the id that a log gives it, or the line of the file


class Trace(Struct, frozen=True):
    """In order of arrival."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    left_out: Sequence[str] = ()  # names of requests of the file that are none of these, as their blocks are not known

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)
