"""Finds `cache_salt`s that only one request has: it shares nothing."""

from collections import Counter
from collections.abc import Sequence

from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.prompts import Prompt
from lab.analysis.breaks.texts import Example

SALT = Fault(
    "a cache_salt for each request",
    "Give one cache_salt to all requests that may share, for example one for each tenant, or none.",
)
SHOWN = 8  # letters: a salt is a secret of a kind


def without_lone_salts(prompts: Sequence[Prompt]) -> list[Prompt]:
    lone = _lone(prompts)
    return [prompt._replace(salt=None) if prompt.salt in lone else prompt for prompt in prompts]


def salts_example(one: Prompt, other: Prompt) -> Example:
    return Example("cache_salt ", _shown(one), _shown(other))


def _lone(prompts: Sequence[Prompt]) -> set[str | None]:
    """Salts of one request; a single such salt parts nothing."""
    users = {(prompt.salt, prompt.request_id) for prompt in prompts if prompt.salt is not None}
    lone: set[str | None] = {salt for salt, count in Counter(salt for salt, _ in users).items() if count == 1}
    return lone if len(lone) > 1 else set()


def _shown(prompt: Prompt) -> str:
    salt = prompt.salt or ""
    return salt[:SHOWN] + "..." * (len(salt) > SHOWN)
