"""The end of an exchange between two replicas, which the one that catches it counts."""


class Lost(Exception):
    """The connection is of no more use; `reason` is a word for metrics."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason
