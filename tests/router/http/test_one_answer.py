"""Answers of several workers, made into one."""

import msgspec
import pytest

from router.http.one_answer import MERGED
from router.responses import Load, ReplicaList, ReplicaStatus, Served


def answer(idle: str | None, requests: int) -> bytes:
    replica = ReplicaStatus("r0", load=Load(in_flight=requests), served=Served(requests), idle=idle)
    return msgspec.json.encode(ReplicaList([replica]))


@pytest.mark.parametrize(
    ("own", "other", "idle"), [("no prompt", "by lot", "no prompt"), ("no prompt", None, None), (None, "by lot", None)]
)
def test_a_replica_is_idle_if_every_worker_gives_it_nothing(
    own: str | None, other: str | None, idle: str | None
) -> None:
    merged = MERGED["GET", "/replicas"](b"", {0: answer(own, 1), 1: answer(other, 2)})
    [found] = msgspec.json.decode(merged, type=ReplicaList).replicas
    assert (found.idle, found.load.in_flight, found.served.requests) == (idle, 3, 3)
