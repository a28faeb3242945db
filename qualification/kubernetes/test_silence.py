"""An API server whose machine is gone: no connection ends, nothing is refused, there is only silence."""

import asyncio
import sys

import pytest

from qualification.kubernetes.real import until
from router.members.discovery.collection import Cluster
from router.members.discovery.kubernetes import KubernetesWatch
from router.members.discovery.pods import pods_of
from tests.chaos.nodes import Node, network, no_nodes
from tests.router.kubernetes_api import PODS, SPACE, KubernetesApi, following, pod

why_not = "Linux' own" if sys.platform != "linux" else no_nodes()
pytestmark = [pytest.mark.live, pytest.mark.skipif(why_not is not None, reason=why_not or "")]

NOTICED_S = 12.0
BACK_S = 2.5  # of which a second is that of a packet that was lost, when it is sent again


def test_silence_is_noticed_and_its_end_too() -> None:
    with network(2) as (server, router), router.inside():
        noticed_s, back_s = asyncio.run(cut_and_restored(server))
    assert noticed_s < NOTICED_S
    assert back_s < BACK_S


async def cut_and_restored(server: Node) -> tuple[float, float]:
    """Seconds until the watch reports a problem, and, with the server back, until it reports again."""
    api = KubernetesApi(server.address)
    api.put(PODS, pod("a"))
    with server.inside():
        await api.start()
    watch = KubernetesWatch(Cluster(api.url, SPACE), pods_of(SPACE, "app=llm"))
    async with following(watch) as said:
        await until(lambda: api.watched == 1, 5.0)
        server.cut()
        api.put(PODS, pod("b"))
        noticed_s = await until(lambda: watch.problem is not None, 30.0)
        assert list(said[-1]) == ["a"]
        server.restore()
        back_s = await until(lambda: sorted(said[-1]) == ["a", "b"], 30.0)
    await api.stop()
    return noticed_s, back_s
