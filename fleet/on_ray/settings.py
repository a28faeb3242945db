"""The environment for Ray, set before its import so that it guesses nothing."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

NAMESPACE = "warmroute"
LOOPBACK = "127.0.0.1"

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


def local_environment() -> dict[str, str]:
    """Return the settings of a Ray of our own: on loopback only, with a random token."""
    return {
        **_QUIET,
        # Otherwise it kills every actor when the machine is short of memory, even for other programs' use.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray would listen on all addresses
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # replicas would have nice 15, and starve beside any other program
    }


def joined_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for joining a Ray: authentication by the environment, never by another Ray's token file."""
    named = "RAY_AUTH_TOKEN" in given or "RAY_AUTH_TOKEN_PATH" in given
    return _QUIET | {"RAY_AUTH_MODE": given.get("RAY_AUTH_MODE") or ("token" if named else "disabled")}


def not_for_children(own: Mapping[str, str], nodes: Mapping[str, str]) -> set[str]:
    """Return the variables that a replica must not inherit from its actor; `nodes` is the node's own environment."""
    threads = {"OMP_NUM_THREADS"} if "OMP_NUM_THREADS" not in nodes else set()  # then it is Ray's idea
    return {name for name in own if name.startswith("RAY_") or name in threads}


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if it cannot be read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in content.split(b"\0") if b"=" in entry)
