"""When a fleet that was lost is begun again, and what is wanted then."""

from collections.abc import Callable

import msgspec

from fleet.commands.view import View
from fleet.plan import FleetPlan

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # a fleet that lasted for so long has not failed at once


class Tries:
    """How many in a row there may be: the first at once, each later one after twice the pause."""

    def __init__(self, most: float, now_s: Callable[[], float]) -> None:
        self._most = most
        self._now_s = now_s
        self._count = 0
        self._began_s = now_s()

    def began(self) -> None:
        """A try has begun the fleet; how long it lasts counts from now on."""
        self._began_s = self._now_s()

    def lost(self) -> None:
        """The fleet is lost; one that had lasted leaves all tries to the next one."""
        if self._now_s() - self._began_s > SETTLED_S:
            self._count = 0

    def next_pause_s(self) -> float | None:
        """Seconds to wait before the next try; None: there were enough."""
        if self._count >= self._most:
            return None
        self._count += 1
        if self._count == 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._count - 2, 64), LONGEST_PAUSE_S)


def plan_now(plan: FleetPlan, seen: View | None) -> FleetPlan:
    """The plan with as many replicas as were wanted when the fleet was seen last."""
    wanted = {model.name: model.wanted for model in seen.models} if seen is not None else {}
    return msgspec.structs.replace(
        plan,
        models=tuple(
            msgspec.structs.replace(model, replicas=wanted.get(model.name, model.replicas)) for model in plan.models
        ),
    )
