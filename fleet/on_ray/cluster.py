"""What Ray knows of actors and of nodes: the few questions that its public interface has no answer for.

All of it asks the GCS and may block: call it in a thread.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import ray
from ray._private import state

from fleet.plan import Resources

Actor: TypeAlias = Any  # a handle; how Ray types it is another thing in each version
State: TypeAlias = Literal["DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD"]
UNPLACED: tuple[State, ...] = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


class Free(NamedTuple):
    """Of one node."""

    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]


def state_of(actor: Actor) -> State:
    """DEAD, too, for an actor that Ray has forgotten."""
    found: State = state.actors(actor._actor_id.hex()).get("State", "DEAD")
    return found


def nodes() -> list[Free]:
    available = state.available_resources_per_node()
    return [
        Free(node["NodeManagerAddress"], node["Resources"], available.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def needs(resources: Resources) -> dict[str, float]:
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def lacking(needed: Mapping[str, float], found: list[Free]) -> str | None:
    """What no node has free, in one clause; None: there is one that has it all."""
    if not found:
        return "Ray has no node"
    if any(all(node.available.get(name, 0.0) >= amount for name, amount in needed.items()) for node in found):
        return None
    for name, amount in needed.items():
        best = max(found, key=lambda node: node.available.get(name, 0.0))
        if best.available.get(name, 0.0) < amount:
            return f"no node has {name} {amount:g} free; {_most(name, best)}"
    together = " and ".join(f"{name} {amount:g}" for name, amount in needed.items())
    return f"no node has {together} free together"


def _most(name: str, node: Free) -> str:
    if not node.total.get(name):
        return "none has any at all"
    return f"the most is {node.available.get(name, 0.0):g} of {node.total[name]:g} on {node.address}"
