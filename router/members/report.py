"""The arrival of a native replica's status, as the log of a decision names it."""

from msgspec import Struct


class Report(Struct, array_like=True, frozen=True, gc=False):
    ts: float  # the status's own time, unique for the replica
    at_s: float  # when it came, by the router's clock
    order: int  # among all changes of the router's figures
