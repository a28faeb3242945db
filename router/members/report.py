"""When a native replica's status came: what the log of a decision names it by."""

from msgspec import Struct


class Report(Struct, array_like=True, frozen=True, gc=False):
    ts: float  # the status's own time, which no other one of the replica has
    at_s: float  # when it came, by the router's clock
    order: int  # among all that changes the router's figures
