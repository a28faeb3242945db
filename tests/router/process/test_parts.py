"""The parts that the workers of a router have."""

import os
from pathlib import Path

import pytest

from api.process.cpus import usable_cpus
from router.config import RouterConfig
from router.process.server import MAX_BY_ITSELF, with_others, workers_of
from tests.router.workers.places import places

CPUS = len(os.sched_getaffinity(0))


def test_with_other_routers_each_worker_has_a_port_of_its_own_and_hears_all_of_theirs() -> None:
    config = RouterConfig(peer_listen="tcp://10.0.0.1:5570", peers=("tcp://10.0.0.2:5570", "tcp://[fd00::2]:5570"))
    [_, place] = places(2, Path("/run/here"))
    part = with_others(config, place)
    assert part.peer_listen == "tcp://10.0.0.1:5571"
    assert part.peers == (
        "tcp://10.0.0.2:5570",
        "tcp://10.0.0.2:5571",
        "tcp://[fd00::2]:5570",
        "tcp://[fd00::2]:5571",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RouterConfig(workers=7), 7),
        (RouterConfig(peer_listen="tcp://127.0.0.1:5570"), 1),
        (RouterConfig(workers=3, peer_listen="tcp://127.0.0.1:5570"), 3),
        (RouterConfig(), min(MAX_BY_ITSELF, usable_cpus())),
    ],
)
def test_how_many_workers_there_are(config: RouterConfig, expected: int) -> None:
    assert workers_of(config) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000\n", CPUS), ("100000 100000\n", 1), ("50000 100000\n", 1), ("9900000 100000\n", CPUS), ("junk", CPUS)],
)
def test_a_container_has_as_many_cpus_as_its_quota_allows(quota: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cpus(tmp_path / "cpu.max") == expected


def test_without_control_groups_all_cpus_count(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "cpu.max") == CPUS
