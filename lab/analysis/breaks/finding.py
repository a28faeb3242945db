"""One kind of fault: its cost, an example, and the advice."""

from msgspec import Struct

from lab.analysis.breaks.texts import Example


class Fault(Struct, frozen=True):
    name: str
    advice: str  # one sentence


class Finding(Struct, frozen=True):
    name: str
    requests: int
    lost_tokens: int
    example: Example
    request_ids: tuple[str, str]  # of the example
    advice: str


class Loss(Struct, frozen=True):
    """Before tokens are known: letters that would not have to be computed."""

    fault: Fault
    requests: int
    letters: int
    example: Example
    request_ids: tuple[str, str]
