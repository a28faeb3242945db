"""A line of the request log: a request, what was weighed for it, and its attempts.

Fields that end in `at_s` are read from the router's own clock, and compare only within one `run`.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct, field

from router.responses import Considered, PrefillRecord

NO_BODY = Raw()  # msgspec leaves out a default by its identity


class Sending(Struct, omit_defaults=True):
    replica: str
    sent_at_s: float
    begun_at_s: float = 0  # 0: it never was
    ended_at_s: float = 0
    uncached_tokens: int = 1
    fault: str | None = None


class LogLine(Struct, kw_only=True, omit_defaults=True):
    """One request. New fields need a default; none is renamed. `body` is present only if prompts may be logged."""

    ts: float  # its arrival, seconds since 1970
    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None  # the replica's figure
    block_tokens: int = 0  # 0: no blocks are known
    blocks: list[int] = []  # keys of the prompt's full blocks
    status: int = 200
    ttft_s: float | None = None
    duration_s: float = 0.0
    replica: str | None = None
    session: str | None = None
    exact: bool = True  # False: `prompt_tokens` is an estimate
    base_model: str | None = None  # the base, if `model` is an adapter
    client_left: bool = False
    run: str = ""  # identifies the router's process
    at_s: float = 0.0  # its arrival by the router's clock
    policy: str = ""
    estimated_ttft_s: float | None = None
    candidates: Sequence[Considered] = []  # of the last choice
    known_batch: int | None = None  # the last one of the chosen replica's events that was known then
    sendings: list[Sending] = []
    raw_body: Raw = field(default=NO_BODY, name="body")  # `Raw | None` is nothing that msgspec can decode
    index_exact: bool = True  # False: the chosen replica's cache was not known completely
    prediction_exact: bool = True  # False: the replica may find another number than `predicted_tokens`
    predicted_tokens: int | None = None  # cached at the replica; None: only guessed
    prefill: PrefillRecord | None = None  # None: no other place was weighed for computing its prompt
    further_tokens: int = 0  # tokens of all prompts but the first one, which `prompt_tokens` counts

    @property
    def body(self) -> Raw | None:
        return self.raw_body or None
