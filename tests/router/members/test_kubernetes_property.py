"""Whatever the API server does, replicas are those of its store at some moment, never an earlier one, soon of now."""

import asyncio
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from router.members.discovery.collection import Cluster
from router.members.discovery.desired import Discovery
from router.members.discovery.kubernetes import GRACE_S, WATCH_S, KubernetesWatch, PoolDiscovery
from router.members.discovery.pods import pods_of
from router.members.spec import Desired
from tests.router.kubernetes_api import HANG, PODS, POOLS, SPACE, KubernetesApi, following, pod, pool, port
from tests.router.virtual import in_virtual_time

PORT, NAMES = 6443, "pqrs"
HEALED_S = 7.0 + 5.0 + 2.5  # the longest Retry-After here, the longest pause beside it, and a connection that is slow
UNSTUCK_S = WATCH_S + GRACE_S + HEALED_S  # where the server may hang, and keep the connection

PODS_STATES: dict[str, Any] = {
    "labels": [{"app": "a"}, {"app": "a"}, {"app": "b"}],
    "ready": [True, True, False],
    "ending": [False, False, True],
    "phase": ["Running", "Running", "Running", "Pending", "Succeeded"],
    "address": ["10.0.0.1", "10.0.0.2", ""],
    "ports": [[port("http", 8000)], [port("http", 9000)]],
    "restarts": [0, 1],
    "annotations": [{}, {"note": "one\x85two\u2028drei \N{LLAMA} größer"}],
}
GOOD = {key: values[0] for key, values in PODS_STATES.items()}
STATES = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in PODS_STATES.items()})
SELECTED: dict[str, Any] = {f"{app} {at}": pool("llm", {"app": app}, [at]) for app in "ab" for at in (8000, 9000)}
UNUSABLE: dict[str, Any] = {"no port": pool("llm", ports=[]), "everything": pool("llm") | {"spec": {}}}
BABBLE = [
    b"<p>No.</p>\n",
    b"\n \n",
    b"{",
    b"\xff\xfe\n",
    b'{"type":"ADDED","object":{"metadata":{"name":1}}}\n',
    b'{"type":"ADDED","object":' + b"[" * 9_999 + b"\n",
    b'{"type":"ERROR","object":"none"}\n',
    b'{"type":"PINGED","object":{"metadata":{}}}\n',
]
LATER = {"retry_after": "7"}, {"retry_after": "Wed, 21 Oct 2026 07:28:00 GMT"}
PUT = st.tuples(st.sampled_from(["put", "put", "make again"]), st.sampled_from(NAMES), STATES)
CHANGES = (
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(st.just("pool"), st.sampled_from([*SELECTED, *UNUSABLE, ""])),
)
ASKED = st.sampled_from(["list", "page", "watch"])
FAULTS = (
    st.tuples(st.sampled_from(["stop", "drop", "forget", "mark"])),
    st.tuples(st.just("refuse"), ASKED, st.sampled_from([200, 400, 401, 403, 410, HANG])),
    st.tuples(st.just("refuse"), ASKED, st.sampled_from([429, 500]), st.sampled_from(LATER)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.sampled_from(["ends", "drops", "hangs"])),
    st.tuples(st.just("fail"), st.sampled_from([410, 500])),
    st.tuples(st.just("babble"), st.sampled_from(BABBLE)),
    st.tuples(st.just("repeat"), st.integers(1, 3), st.booleans()),
)
# Waits: most often with time enough for an answer, and less often with time enough for a hung one.
STEPS = st.tuples(st.one_of(PUT, PUT, PUT, *CHANGES, *FAULTS), st.sampled_from([0.0, 0.01, 0.01, 0.3, 0.3, 3.0, 60.0]))
ROUNDS = st.lists(st.tuples(st.lists(STEPS, max_size=8), st.sampled_from([*SELECTED])), min_size=2, max_size=6)
Round: TypeAlias = tuple[list[tuple[tuple[Any, ...], float]], str]


class Story:
    """The API server, and what a router should make of its store."""

    def __init__(self) -> None:
        self.api = KubernetesApi(port=PORT)
        self.api.page = 2
        self.app, self.port = "a", 0  # a pool names both; 0: none does
        self.pods: dict[str, tuple[str, dict[str, Any]]] = {}  # uid and state by name
        self.past: list[Any] = [{}]  # the replicas at each moment so far
        self.may_hang = False
        self.has_pool, self.uids = False, 0

    def looks(self) -> dict[str, Any]:
        """The replicas of the store as it is."""
        found = {}
        for name, (uid, state) in self.pods.items():
            is_running = state["phase"] == "Running" and state["address"] and state["labels"] == {"app": self.app}
            if is_running and (state["ready"] or state["ending"]):
                at = self.port or state["ports"][0]["containerPort"]
                url = f"http://{state['address']}:{at}"
                found[name] = url, state["ending"], f"{uid}/containerd://{name}-{state['restarts']}"
        return found

    async def do(self, what: str, *more: Any) -> None:
        api = self.api
        match what, *more:
            case "put" | "make again", str(name), state:
                if what != "put":
                    self.delete(name)
                if name not in self.pods:
                    self.uids += 1
                uid, _ = self.pods.get(name, (f"uid-{self.uids}", None))
                self.pods[name] = uid, state
                api.put(PODS, pod(name, uid=uid, **state))
                self.past.append(self.looks())
            case "delete", str(name):
                self.delete(name)
            case "pool", str(which):
                if which:
                    api.put(POOLS, (SELECTED | UNUSABLE)[which])
                elif self.has_pool:
                    api.delete(POOLS, "llm")
                self.has_pool = bool(which)
            case _:
                self.may_hang |= more[1:2] in ((HANG,), ("hangs",))
                await api.suffer(what, *more)

    def delete(self, name: str) -> None:
        if self.pods.pop(name, None) is not None:
            self.api.delete(PODS, name)
            self.past.append(self.looks())


def seen(desired: Desired) -> dict[str, Any]:
    return {spec.name: (spec.url, spec.draining, spec.incarnation) for spec in desired.values()}


async def told(rounds: list[Round], *, by_pool: bool) -> None:
    story, cluster = Story(), Cluster(f"http://127.0.0.1:{PORT}", SPACE)
    watch: Discovery = PoolDiscovery(cluster, "llm") if by_pool else KubernetesWatch(cluster, pods_of(SPACE, "app=a"))
    async with following(watch) as said:
        for name in NAMES:
            await story.do("put", name, GOOD)
        for steps, which in rounds:
            for step, wait_s in steps:
                await story.do(*step)
                await asyncio.sleep(wait_s)
            await story.do("heal")
            await story.do("pool", which)
            if by_pool:
                story.app, story.port = which[0], int(which[2:])
            async with asyncio.timeout(UNSTUCK_S if story.may_hang else HEALED_S):
                while watch.problem is not None or not said or seen(said[-1]) != story.looks():
                    await asyncio.sleep(0.25)
        await story.do("stop")
    past = iter(story.past)
    for number, each in enumerate([] if by_pool else said):
        assert seen(each) in past, f"what was said as number {number} has never been, or was over before"


@given(rounds=ROUNDS, by_pool=st.booleans(), seed=st.integers(0, 2**32))
def test_replicas_are_those_of_the_store(rounds: list[Round], by_pool: bool, seed: int) -> None:
    in_virtual_time(told(rounds, by_pool=by_pool), seed)
