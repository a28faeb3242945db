"""The roles of replicas: which half of a generation each may take.

A generation has two halves: `prefill` computes the prompt, `decode` generates the answer. One replica takes both unless
the prompt is computed elsewhere (`router.placement.elsewhere`).
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["prefill", "decode", "both"]
Half: TypeAlias = Literal["prefill", "decode"]

# None: no role is given. Such a replica generates, and exchanges KV with nobody.
TAKES: dict[Half, frozenset[Role | None]] = {
    "prefill": frozenset({"prefill", "both"}),
    "decode": frozenset({"decode", "both", None}),
}


def can_split(roles: Iterable[Role | None]) -> bool:
    """Tell whether one of these replicas may compute a prompt, and another one generate its answer."""
    given = [role for role in roles if role is not None]
    return len(given) > 1 and any(role != "decode" for role in given) and any(role != "prefill" for role in given)
