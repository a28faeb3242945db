"""Classes of service: whose prompts go first where prompts have to wait, and whose are refused first.

A class wants a time to first token, its objective. A prompt counts as come later by it. So prompts with a deadline soon
go first, and one without hurry is overtaken only by those that come within its objective: it never starves.
"""

from msgspec import Struct

NAMES = ("interactive", "standard", "batch")  # the last is refused first
USUAL = "standard"  # the class of a key that names none, beside keys that do
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
    level: int  # its place in NAMES
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


# ---- refusals

STEP_S = 2.0  # a class is refused once prompts have been late for this long, and after that the next
CALM_S = 5.0  # a class is taken again when no prompt was late for this long
ACTIVE_S = 10.0  # after its last prompt a class is there
OWN_TIMES = 2.0  # a long prompt may take this many times its own time, if that is more than its class wants
WEIGHT = 0.1  # the weight of the newest observation
LEAST_WAIT_S = 1.0  # shorter waits say nothing about those to come
MAX_STRETCH = 50.0
LONG_AGO_S = float("-inf")


class _Pressure(Struct, gc=False):
    """Lateness at one model."""

    refused_from: int = len(NAMES)  # classes of this level and above are refused
    since_s: float = LONG_AGO_S  # prompts have been late since then, or since a class was refused for that
    late_s: float = LONG_AGO_S  # the last time that one was late, or a class was taken again
    asked_s: list[float] = []  # the time of each level's last prompt
    stretch: list[float] = []  # each level's prompts waited this many times as long as foreseen: others overtook them

    def is_there(self, level: int, now_s: float) -> bool:
        return self.asked_s[level] > now_s - ACTIVE_S


class Outlook(Struct, frozen=True, gc=False):
    """The expectation for one new prompt."""

    first_token_s: float
    refused_for_s: float | None = None  # it is refused, and had better be sent again after this long


class Objectives:
    """Refusals while the times to first token that classes want cannot be kept: the lowest class first.

    A prompt is late if no replica can give its first token in time, as far as their loads tell. While prompts of a
    class are late for some seconds, the lowest class is refused, then the next, one every few seconds; when nobody
    lower is left, late prompts of the class itself are. When none has been late for a while, the classes come back
    one by one.

    A tenant that was given so much more than its share that the others cannot catch up in time is late by its own
    fault: its late prompts are refused at once, and nobody else is for them.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Pressure] = {}

    def yields(self, model: str, service: ServiceClass, now_s: float) -> bool:
        """Note a prompt; return whether a higher class has sent some lately, which this one leaves room for."""
        pressure = self._of(model)
        pressure.asked_s[service.level] = now_s
        return any(pressure.is_there(above, now_s) for above in range(service.level))

    def outlook(
        self, model: str, service: ServiceClass, wait_s: float, own_s: float, now_s: float, lead_s: float = 0.0
    ) -> Outlook:
        """Take or refuse a new prompt that would wait so long at the best replica, and then take its own time.

        `lead_s`: the time in which other tenants could catch up with its own.
        """
        pressure = self._of(model)
        while pressure.refused_from < len(NAMES) and pressure.late_s < now_s - CALM_S:
            pressure.refused_from += 1
            pressure.late_s += CALM_S
        expected_s = own_s + wait_s * pressure.stretch[service.level]
        late_s = expected_s - max(service.first_token_s, OWN_TIMES * own_s)
        is_own_fault = lead_s > service.first_token_s
        if late_s > 0 and not is_own_fault:
            if pressure.late_s < now_s - CALM_S:
                pressure.since_s = now_s
            pressure.late_s = now_s
            while now_s >= pressure.since_s + STEP_S and pressure.refused_from > service.level + 1:
                pressure.refused_from -= 1
                if pressure.is_there(pressure.refused_from, now_s):
                    pressure.since_s = now_s
        foreseen_s = wait_s + own_s
        if service.level >= pressure.refused_from:
            return Outlook(foreseen_s, max(CALM_S, expected_s - own_s))
        below = range(service.level + 1, pressure.refused_from)
        must_bear_it = service.level == len(NAMES) - 1 or (  # it has been late for a while, and nobody is below
            now_s >= pressure.since_s + STEP_S and not any(pressure.is_there(level, now_s) for level in below)
        )
        is_refused = late_s > 0 and (is_own_fault or must_bear_it)
        return Outlook(foreseen_s, late_s if is_refused else None)

    def came(self, model: str, service: ServiceClass, foreseen_s: float, first_token_s: float) -> None:
        """Note when a prompt's first token came, and when it had been foreseen."""
        if foreseen_s >= LEAST_WAIT_S:
            stretch = self._of(model).stretch
            found = min(MAX_STRETCH, max(1.0, first_token_s / foreseen_s))
            stretch[service.level] += WEIGHT * (found - stretch[service.level])

    def _of(self, model: str) -> _Pressure:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Pressure(asked_s=[LONG_AGO_S] * len(NAMES), stretch=[1.0] * len(NAMES))
        return found
