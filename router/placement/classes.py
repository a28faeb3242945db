"""Classes of service: whose prompts go first where prompts have to wait, and whose are refused first.

A class wants a time to first token, its objective. A prompt counts as come later by it. So prompts with a deadline soon
go first, and one without hurry is overtaken only by those that come within its objective: it never starves.
"""

from msgspec import Struct

NAMES = ("interactive", "standard", "batch")  # the last is refused first
USUAL = "standard"  # of a key without a class, beside keys that have one
FIRST_TOKEN_S = {"interactive": 2.0, "standard": 10.0, "batch": 120.0}
WEIGHTS = {"interactive": 4.0, "standard": 1.0, "batch": 0.25}
# OpenAI's and Anthropic's names; any other, such as auto, stands for the key's own class.
TIERS = {
    "priority": "interactive",
    "default": "standard",
    "standard_only": "standard",
    "flex": "batch",
    **{name: name for name in NAMES},
}


class ServiceClass(Struct, frozen=True, gc=False):
    name: str
    level: int  # in NAMES
    first_token_s: float  # the time to first token that it wants
    weight: float = 1.0  # times that of a key


def chosen(classes: tuple[ServiceClass, ...], tier: str | None, priority: int | None) -> ServiceClass | None:
    """The class that a request asks for, of those that its key may use; None: it has none.

    `classes`: the key's own first, then the lower ones. `priority`: as vLLM has it, lower goes first.
    """
    if not classes:
        return None
    own = classes[0]
    name = TIERS.get(tier) if tier is not None else None
    if name is None and priority:
        name = "batch" if priority > 0 else "interactive"
    return own if name is None else next((one for one in classes if one.name == name), own)
