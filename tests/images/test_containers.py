"""The images in real containers: built by Podman, started from the smallest overlay's pods, asked, ended and killed.

What the cluster would do is done here: replicas are named in a file, and probes are asked by the test. Replicas
simulate their engine, in the router's image with numpy.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.events.processes import wait_until
from tests.images.dockerfile import DOCKERFILE
from tests.images.played import PROBES, Network, Played
from tests.images.podman import BASE, build, inspect, podman, why_not
from tests.k8s.load import SIMULATED, token_ids, under_load
from tests.k8s.rendered import Pod, pods, rendered

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ROUTER, REPLICA, CLIENT = "warmroute-router:tests", "warmroute-simulated:tests", "warmroute-client:tests"
FOUND = "--kubernetes-service=warmroute-replicas"
ASK_TWICE = """
from openai import OpenAI
client = OpenAI(base_url="http://warmroute-router:8000/v1", api_key="none")
for _ in range(2):
    answer = client.completions.create(model="demo", prompt="Once upon a time, " * 40, max_tokens=8)
    print(answer.usage.prompt_tokens_details.cached_tokens)
"""


class World:
    """A router and its replicas."""

    def __init__(self, network: Network, folder: Path, image: str) -> None:
        self.network = network
        self._file = folder / "replicas.toml"
        self._numbers = count(1)
        found = pods(rendered("kind"))
        [router] = [pod for pod in found if pod.is_a(component="router")]
        [replica] = [pod for pod in found if pod.is_a(component="replica")]
        # The tokenizer that routers fetch; the engine that computes would make the demo model itself.
        self._replica = replica._replace(spec=replica.spec | {"initContainers": router.spec["initContainers"]})
        self.replicas = [self.replica(), self.replica()]
        self.announce()
        self.router = network.play(of_a_file(router, self._file), "warmroute-router", image, mount=folder)
        self.router.wait_ready()
        pods_ready = (f"{each.name} {each.ready_s:.1f} s" for each in (*self.replicas, self.router))
        print(f"\nready after: {', '.join(pods_ready)}")

    def replica(self) -> Played:
        name = f"replica-{next(self._numbers)}"
        played = self.network.play(self._replica, name, REPLICA, (*SIMULATED, "--tokenizer=/models/demo"))
        played.wait_ready()
        return played

    def announce(self) -> None:
        text = "".join(f'[[replicas]]\nurl = "{each.url}"\nname = "{each.name}"\n' for each in self.replicas)
        whole = self._file.with_suffix(".new")
        whole.write_text(text)
        whole.replace(self._file)

    def known(self) -> dict[str, Any]:
        answer = httpx2.get(f"{self.router.url}/replicas", timeout=5, trust_env=False)
        return {each["name"]: each for each in answer.json()["replicas"]}

    def wait_known(self) -> None:
        """Until the router has exactly these replicas, and knows the cache of each."""
        names = {each.name for each in self.replicas}
        wait_until(
            lambda: self.known().keys() == names and all(each["state"] == "exact" for each in self.known().values()),
            "the router knows the replicas",
        )


def of_a_file(router: Pod, file: Path) -> Pod:
    """The router's pod, with its replicas in a file in place of the API server."""
    [container] = router.spec["containers"]
    assert FOUND in container["args"]
    arguments = [f"--replicas-file={file}" if word == FOUND else word for word in container["args"]]
    return router._replace(spec=router.spec | {"containers": [container | {"args": arguments}]})


@pytest.fixture(scope="module")
def images() -> str:
    """Build them, and return the router's. They stay for the next time; `podman rmi` removes them."""
    own = Path(__file__).with_name("Containerfile")
    build(DOCKERFILE, "router", ROUTER)
    build(own, "simulated", REPLICA)
    build(own, "client", CLIENT)
    return ROUTER


@pytest.fixture
def world(images: str, tmp_path: Path) -> Iterator[World]:
    network = Network(tmp_path)
    try:
        (tmp_path / "replicas").mkdir()
        yield World(network, tmp_path / "replicas", images)
    finally:
        network.close()


def in_image(script: str) -> str:
    return podman("run", "--rm", "--user=0", "--entrypoint=sh", ROUTER, "-c", script)


@pytest.mark.usefixtures("images")
def test_the_image_holds_no_tool_cache_secret_or_test() -> None:
    searched = ["pip", "pip3", ".cache", ".netrc", "pip.conf", ".git", "__pypackages__", "hypothesis", "pytest"]
    names = " -o ".join(f"-name {name}" for name in searched)
    found = in_image(f"find / -xdev \\( {names} -o -path '/opt/*/tests' \\) -not -path '/proc/*'").split()
    assert [path for path in found if not re.search(r"site-packages/[^/]+/", path)] == []
    config = inspect("image", ROUTER)["Config"]
    assert config["User"] == "10001:10001"
    assert not [line for line in config["Env"] if re.match(r"PIP_|.*(?i:key|token|secret|password)", line)]
    assert "pip.conf" not in in_image("ls /etc")


@pytest.mark.usefixtures("images")
def test_only_three_layers_come_upon_the_base() -> None:
    """User, packages and code; a change of the code changes the last alone."""
    image, base = inspect("image", ROUTER), inspect("image", BASE)
    layers, below = image["RootFS"]["Layers"], base["RootFS"]["Layers"]
    own, size = ((image["Size"] - base["Size"]) / 2**20, base["Size"] / 2**20)
    print(f"\n{len(layers)} layers, {own:.0f} MiB upon a base of {size:.0f} MiB")
    assert (layers[: len(below)], len(layers)) == (below, len(below) + 3)


@pytest.mark.usefixtures("images")
def test_its_health_check_goes_well() -> None:
    name = podman("run", "--detach", "--read-only", "--cap-drop=ALL", ROUTER).strip()
    try:
        wait_until(lambda: "router on" in podman("logs", name), "it serves")
        podman("healthcheck", "run", name)
    finally:
        podman("rm", "--force", "--time=0", name)


def test_pods_run_as_their_manifests_say_and_a_second_answer_is_warm(world: World) -> None:
    for each in (world.router, *world.replicas):
        assert [each.probe(name) for name in PROBES] == [True] * 3
        status = dict(re.findall(r"(\w+):\t(.*)", each.execute("cat /proc/1/status")))
        assert (status["Uid"].split()[0], status["Gid"].split()[0]) == ("10001", "10001")
        assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "cannot touch" in each.execute("touch /opt/warmroute/x 2>&1 || touch /tmp/x")
    world.wait_known()
    cold, warm = map(int, world.network.client(CLIENT, "python", "-c", ASK_TWICE).split())
    print(f"\ncached tokens: {cold}, then {warm}")
    assert cold == 0 < warm
    assert all(each["tokenizer"].endswith("are as expected") for each in world.known().values())


async def stream_through(target: Played) -> tuple[int, float]:
    """Stop it once its stream has begun; the stream has to be whole."""
    tokens = 180
    body = {"model": "demo", "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with (
        httpx2.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("POST", f"{target.url}/v1/completions", json=body | {"return_token_ids": True}) as answer,
    ):
        lines = answer.aiter_lines()
        heard = [await anext(lines)]
        ending = asyncio.create_task(asyncio.to_thread(target.stop))
        heard += [line async for line in lines if line]
    assert (heard[-1], token_ids(heard)) == ("data: [DONE]", tokens)
    return await ending


async def test_a_stream_is_finished_before_a_container_ends(world: World) -> None:
    for target in (world.replicas[0], world.router):
        status, took_s = await stream_through(target)
        print(f"\n{target.name}: status {status}, {took_s:.1f} s after SIGTERM")
        assert status == 0


async def test_a_replica_replaced_under_load_fails_no_request(world: World) -> None:
    async with under_load(world.router.url) as load:
        old = world.replicas[0]
        world.replicas.append(await asyncio.to_thread(world.replica))
        world.announce()
        await asyncio.to_thread(world.wait_known)
        status, took_s = await asyncio.to_thread(old.stop)
        world.replicas.remove(old)
        world.announce()
        await asyncio.to_thread(world.wait_known)
    print(f"\nreplaced: {len(load.failed)} of {load.requests} failed, it ended after {took_s:.1f} s")
    assert (status, load.failed) == (0, [])


async def test_a_replica_killed_under_load_fails_no_request(world: World) -> None:
    async with under_load(world.router.url) as load:
        took_s = await asyncio.to_thread(crashed, world.replicas[0])
        await asyncio.to_thread(world.wait_known)
    print(f"\nkilled: {len(load.failed)} of {load.requests} failed, ready again after {took_s:.1f} s")
    assert load.failed == []


async def test_the_only_router_killed_under_load_fails_requests(world: World) -> None:
    """So the load would notice."""
    async with under_load(world.router.url) as load:
        took_s = await asyncio.to_thread(crashed, world.router)
    print(f"\nthe only router killed: {len(load.failed)} of {load.requests} failed, ready again after {took_s:.1f} s")
    assert load.failed != []


def crashed(target: Played) -> float:
    """Kill it; return the seconds until its restarted container is ready."""
    began_s = time.monotonic()
    target.crash()
    wait_until(lambda: target.restarts == 1, "it is restarted")
    target.wait_ready()
    return time.monotonic() - began_s
