"""Ray's view of actors and nodes, where its public interface has no answer.

All of it asks the GCS and may block: call it in a thread.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import ray
from ray._private import state, worker

from fleet.plan import Resources

Actor: TypeAlias = Any  # a handle; how Ray types it is another thing in each version
State: TypeAlias = Literal["DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD"]
# The options of an actor that outlives whoever makes it, and that all who make it at once share.
DETACHED = {"get_if_exists": True, "lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
UNPLACED: tuple[State, ...] = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


class Free(NamedTuple):
    """The resources of one node."""

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
    """Say which resource no node has free; None if one node has all of them."""
    if not found:
        return "Ray has no node"
    if any(all(node.available.get(name, 0.0) >= amount for name, amount in needed.items()) for node in found):
        return None
    for name, amount in needed.items():
        best = max(found, key=lambda node: node.available.get(name, 0.0))
        most = best.available.get(name, 0.0)
        if most < amount:
            total = best.total.get(name)
            where = f"the most is {most:g} of {total:g} on {best.address}" if total else "none has any at all"
            return f"no node has {name} {amount:g} free; {where}"
    together = " and ".join(f"{name} {amount:g}" for name, amount in needed.items())
    return f"no node has {together} free together"


def node_address() -> str:
    """The node's own, as Ray's other nodes know it."""
    mine = ray.get_runtime_context().get_node_id()
    found: str = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)
    return found


def log_folder() -> Path:
    """Return the folder of Ray's logs on this node, so that its tools show ours too. Ray has no public way to it."""
    node: Any = worker._global_node
    return Path(node.get_logs_dir_path())
