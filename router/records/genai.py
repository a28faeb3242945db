"""Values of the GenAI attributes that spans and metrics share."""

from router.proxy.attempt import Attempt
from router.proxy.request_summary import RequestSummary

PROVIDER = "warmroute"  # none of the conventions' names is that of a server's own models


def operation(summary: RequestSummary) -> str:
    return "text_completion" if summary.chat is False else "chat"


def attempt_error(attempt: Attempt) -> str:
    """The `error.type` of an attempt that has failed."""
    return str(attempt.status) if attempt.status >= 400 else "replica_lost"
