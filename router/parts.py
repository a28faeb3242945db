"""A worker's part of what the whole router was told to take."""

import os
from pathlib import Path

import msgspec

from router.config import RouterConfig
from router.peers.names import parse_endpoint
from router.workers.processes import Place

MOST_BY_ITSELF = 4  # each one more reads all events once more
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container


def workers_of(config: RouterConfig) -> int:
    """The number of workers. Peers on other machines have to know it, so with those there is one unless told.

    There is one for gateways, whose few connections could not be shared out evenly.
    """
    if config.workers:
        return config.workers
    is_single = config.peer_listen is not None or config.picker_listen is not None
    return 1 if is_single else min(MOST_BY_ITSELF, usable_cpus())


def usable_cpus(quota: Path = QUOTA) -> int:
    """The CPUs that this process may use at once, rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time_us, period_us = quota.read_text().split()
        limit = cpus if time_us == "max" else int(time_us) // int(period_us)
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2
        return cpus
    return max(1, min(cpus, limit))


def part_of(config: RouterConfig, place: Place) -> RouterConfig:
    """The limits of memory and connections divided, and the other workers as peers."""
    own, others = _peers(config, place)
    return msgspec.structs.replace(
        config,
        max_bodies_bytes=max(config.max_body_bytes, config.max_bodies_bytes // place.workers),
        max_connections=_share(config.max_connections, place.workers),
        queue_size=_share(config.queue_size, place.workers),
        message_cache_bytes=config.message_cache_bytes // place.workers,
        peer_listen=own,
        peers=others,
    )


def _share(whole: int, count: int) -> int:
    """Rounded up, so that a limit is not none."""
    return -(-whole // count)


def _peers(config: RouterConfig, place: Place) -> tuple[str, tuple[str, ...]]:
    """This worker's endpoint, and those of its peers: with other routers, each worker has the next port."""
    numbers = range(place.workers)
    if config.peer_listen is None:
        paths = [f"ipc://{place.folder}/peers-{number}" for number in numbers]
    else:
        paths = [_next(config.peer_listen, number) for number in numbers]
    others = [path for number, path in enumerate(paths) if number != place.number]
    return paths[place.number], (*others, *(_next(peer, number) for peer in config.peers for number in numbers))


def _next(endpoint: str, number: int) -> str:
    found = parse_endpoint(endpoint)
    if found is None:
        return f"{endpoint}-{number}"
    host, port = found
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port + number}"
