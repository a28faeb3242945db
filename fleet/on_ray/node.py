"""What an actor asks about the node that it is on."""

from pathlib import Path
from typing import Any

import ray
from ray._private import worker


def address() -> str:
    """The node's own, as Ray's other nodes know it."""
    mine = ray.get_runtime_context().get_node_id()
    found: str = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)
    return found


def log_folder() -> Path:
    """Where Ray's own logs of this node are, so that its tools show ours too. There is no public way to it."""
    node: Any = worker._global_node
    return Path(node.get_logs_dir_path())
