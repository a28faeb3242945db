"""The images in real containers: built by Podman, started from the smallest overlay's pods, asked, ended and killed.

What the cluster would do is done here: replicas are named in a file, the test asks the probes, and rules of nftables
are the Service. Under load, replicas simulate their engine, in the router's image with numpy.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from qualification.images import torch_wheel
from qualification.images.dockerfile import DOCKERFILE, ROOT
from qualification.images.played import PROBES, Network, Played
from qualification.images.podman import BASE, build, inspect, is_there, podman, succeeds, why_not
from qualification.images.service import Service
from qualification.images.world import CLIENT, REPLICA, REPLICA_CPU, ROUTER, World, computes, of_overlay, simulates
from tests.events.processes import wait_until
from tests.k8s.load import token_ids, under_load

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

HEARD_S = 3.0  # until the last proxy has heard that a pod ends
STREAMS, OUTLASTING = 6, 900  # streams of this many tokens: 15 s, longer than --drain-delay; one may be preempted
ASK_TWICE = """
from openai import OpenAI
client = OpenAI(base_url="http://warmroute-router:8000/v1", api_key="none")
for _ in range(2):
    answer = client.completions.create(model="demo", prompt="Once upon a time, " * 40, max_tokens=8)
    print(answer.usage.prompt_tokens_details.cached_tokens)
"""
# KubeRay's command for a head, except its address.
RAY = (
    "ulimit -n 65536; ray start --head --block --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000"
)
CONFINED = ("--read-only", "--volume=/models", "--cap-drop=ALL", "--security-opt=no-new-privileges")
WGET = "; ".join(
    f"wget --tries 1 -T 2 -q -O- http://localhost:{path} | grep success"
    for path in ("52365/api/local_raylet_healthz", "8265/api/gcs_healthz")
)
COUNT_PACKAGES = """
from importlib.metadata import distributions
from pathlib import Path
files = [path for path in Path("/opt/warmroute").rglob("*") if path.is_file() and not path.is_symlink()]
print(len([*distributions()]), sum(file.stat().st_size for file in files))
"""


@pytest.fixture(scope="module")
def images() -> None:
    """Build them. They stay for the next time; `podman rmi` removes them."""
    own = Path(__file__).with_name("Containerfile")
    build(DOCKERFILE, "router", ROUTER)
    build(own, "simulated", REPLICA)
    build(own, "client", CLIENT)


@pytest.fixture(scope="module")
def replica_cpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build it, and return its base."""
    found = torch_wheel.wheel(os.environ)
    base = torch_wheel.base_for(found)
    if not is_there(base):
        pytest.skip(f"there is no image {base}, which PyTorch's wheel needs; qualification.images.base makes it")
    build(
        DOCKERFILE, "replica-cpu", REPLICA_CPU, base, torch_wheel.build_options(found, tmp_path_factory.mktemp("torch"))
    )
    return base


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path)
    yield network
    network.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The one that holds the list of replicas."""
    (tmp_path / "replicas").mkdir()
    return tmp_path / "replicas"


@pytest.fixture
def world(images: None, network: Network, folder: Path) -> World:  # noqa: ARG001
    return World(network, folder, simulates())


@pytest.fixture
def computing(images: None, replica_cpu: str, network: Network, folder: Path) -> World:  # noqa: ARG001
    return World(network, folder, computes())


@pytest.fixture
def service(network: Network) -> Iterator[Service]:
    service = Service(network.name, network.address(), 8000)
    yield service
    service.close()


def in_image(image: str, script: str) -> str:
    return podman("run", "--rm", "--user=0", "--entrypoint=sh", image, "-c", script)


def holds_no_tool_cache_secret_or_test(image: str) -> None:
    searched = ["pip", "pip3", ".cache", ".netrc", "pip.conf", ".git", "__pypackages__", "hypothesis", "pytest"]
    names = " -o ".join(f"-name {name}" for name in searched)
    found = in_image(image, f"find / -xdev \\( {names} -o -path '/opt/*/tests' \\) -not -path '/proc/*'").split()
    assert [path for path in found if not re.search(r"site-packages/[^/]+/", path)] == []
    config = inspect("image", image)["Config"]
    assert config["User"] == "10001:10001"
    assert not [line for line in config["Env"] if re.match(r"PIP_|.*(?i:key|token|secret|password)", line)]
    assert "pip.conf" not in in_image(image, "ls /etc")


def adds_layers(count: int, image: str, base: str) -> None:
    """As many as that upon the base."""
    upper, lower = inspect("image", image), inspect("image", base)
    layers, below = upper["RootFS"]["Layers"], lower["RootFS"]["Layers"]
    own, size = ((upper["Size"] - lower["Size"]) / 2**20, lower["Size"] / 2**20)
    print(f"\n{image}: {len(layers)} layers, {own:.0f} MiB upon a base of {size:.0f} MiB")
    assert (layers[: len(below)], len(layers)) == (below, len(below) + count)


def is_as_large_as_the_page_says(image: str, target: str) -> None:
    """About: versions of Python differ by a little."""
    count, size = map(int, podman("run", "--rm", "--entrypoint=python", image, "-c", COUNT_PACKAGES).split())
    print(f"\n{target}: {count} packages, {size / 2**20:.0f} MiB")
    page = (ROOT / "docs/images.md").read_text()
    [said] = re.findall(rf"\| `{target}` \|.*\| (\d+) packages, ([\d,]+) MiB \|", page)
    assert abs(count - int(said[0])) <= 1
    assert abs(size / 2**20 / int(said[1].replace(",", "")) - 1) < 0.05


def has_a_health_check_that_goes_well(image: str) -> None:
    """Run as the page of images says, by the image's own command."""
    began_s = time.monotonic()
    name = podman("run", "--detach", *CONFINED, image).strip()
    try:
        wait_until(lambda: " on http" in podman("logs", name), "it serves")
        print(f"\n{image}: serves after {time.monotonic() - began_s:.1f} s")
        podman("healthcheck", "run", name)
    finally:
        podman("rm", "--force", "--volumes", "--time=0", name)


def is_tidy_and_well(image: str, target: str, layers: int, base: str) -> None:
    holds_no_tool_cache_secret_or_test(image)
    is_as_large_as_the_page_says(image, target)
    adds_layers(layers, image, base)
    has_a_health_check_that_goes_well(image)


@pytest.mark.usefixtures("images")
def test_the_routers_image_is_tidy_and_well() -> None:
    """User, packages and code come upon the base; a change of the code changes the last layer alone."""
    is_tidy_and_well(ROUTER, "router", 3, BASE)


def test_the_image_of_replicas_on_cpus_is_tidy_and_well(replica_cpu: str) -> None:
    """User, wget, packages and code come upon the base."""
    is_tidy_and_well(REPLICA_CPU, "replica-cpu", 4, replica_cpu)


@pytest.mark.usefixtures("images", "replica_cpu")
def test_a_fleet_on_ray_answers_in_the_image_of_replicas_on_cpus(network: Network) -> None:
    """One node with KubeRay's command, its probes by wget, and the plan and the router's pod of the overlay ray-cpu."""
    address = network.address()
    where = (f"--network={network.name}", f"--ip={address}", "--name=warmroute-fleet", "--shm-size=256m")
    plan = f"--volume={ROOT}/k8s/overlays/ray-cpu:/etc/warmroute:ro"
    command = RAY.replace("127.0.0.1", address).replace("--num-cpus=1", "--num-cpus=2")
    began_s = time.monotonic()
    confined = (*CONFINED, "--env=WARMROUTE_FLEET_KEY=of-this-test-alone", plan)
    podman("run", "--detach", *where, *confined, "--entrypoint=/bin/bash", REPLICA_CPU, "-c", "--", command)
    try:
        wait_until(lambda: succeeds("warmroute-fleet", WGET), "the probes go well")
        ready_s = time.monotonic() - began_s
        up = ("warmroute", "up", "--config=/etc/warmroute/fleet.toml", f"--address={address}:6379", "--no-router")
        assert "2 replicas of demo of the cluster are ready" in podman("exec", "warmroute-fleet", *up)
        print(f"\nRay: ready after {ready_s:.1f} s, with its fleet after {time.monotonic() - began_s:.1f} s")
        network.play(of_overlay("ray-cpu", "router"), "warmroute-router", ROUTER).wait_ready()
        cold, warm = ask_twice(network)
        assert cold == 0 < warm
    finally:
        podman("rm", "--force", "--volumes", "--time=0", "warmroute-fleet")


def run_as_their_manifests_say(world: World) -> None:
    for each in (world.router, *world.replicas):
        assert [each.probe(name) for name in PROBES] == [True] * 3
        status = dict(re.findall(r"(\w+):\t(.*)", each.execute("cat /proc/1/status")))
        assert (status["Uid"].split()[0], status["Gid"].split()[0]) == ("10001", "10001")
        assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "cannot touch" in each.execute("touch /opt/warmroute/x 2>&1 || touch /tmp/x")


def ask_twice(network: Network) -> tuple[int, int]:
    """Cached tokens of a prompt and of its repetition."""
    cold, warm = map(int, network.client(CLIENT, "python", "-c", ASK_TWICE).split())
    print(f"\ncached tokens: {cold}, then {warm}")
    return cold, warm


def test_pods_run_as_their_manifests_say_and_a_second_answer_is_warm(world: World) -> None:
    run_as_their_manifests_say(world)
    world.wait_known()
    cold, warm = ask_twice(world.network)
    assert cold == 0 < warm
    assert all(each["tokenizer"].endswith("are as expected") for each in world.known().values())


def test_a_computing_replica_that_is_killed_returns_empty_and_exact(computing: World) -> None:
    run_as_their_manifests_say(computing)
    computing.wait_known()
    cold, warm = ask_twice(computing.network)
    before = computing.known()
    [holder] = [each for each in computing.replicas if before[each.name]["index"]["blocks"]]
    took_s = crashed(holder)
    incarnation = before[holder.name]["incarnation"]
    wait_until(lambda: computing.known()[holder.name]["incarnation"] != incarnation, "the router knows the new one")
    computing.wait_known()
    print(f"\ncomputing replica killed: ready again after {took_s:.1f} s")
    assert computing.known()[holder.name]["index"]["blocks"] == {}
    assert ask_twice(computing.network) == (cold, warm)
    assert cold == 0 < warm


async def test_a_computing_replica_ends_its_stream_and_then_itself(computing: World) -> None:
    await ends_after_its_stream(computing.replicas[0])


async def whole_stream(url: str, tokens: int, begun: asyncio.Event) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with (
        httpx2.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer,
    ):
        lines = answer.aiter_lines()
        heard = [await anext(lines)]
        begun.set()
        heard += [line async for line in lines if line]
    assert (heard[-1], token_ids(heard)) == ("data: [DONE]", tokens)


async def ends_after_its_stream(target: Played) -> None:
    """Stop it once a stream has begun; the stream has to be whole."""
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(whole_stream(target.url, 180, begun))
        await begun.wait()
        status, took_s = await asyncio.to_thread(target.stop)
    print(f"\n{target.name}: status {status}, {took_s:.1f} s after SIGTERM")
    assert status == 0


async def test_a_stream_is_finished_before_a_container_ends(world: World) -> None:
    for target in (world.replicas[0], world.router):
        await ends_after_its_stream(target)


async def replaced(world: World, service: Service, old: Played, name: str, *more: str) -> tuple[Played, int, float]:
    """A new router before the old one goes, as a Deployment does it; the Service hears of the end later.

    Return the new one, the old one's exit status, and the seconds that it took to end.
    """
    others = [each for each in service.pods if each is not old]
    new = await asyncio.to_thread(world.another_router, name, *more)
    assert world.is_exact(new), world.known(new)
    print(f"\n{name}: ready and exact after {new.ready_s:.1f} s")
    service.send_to([*service.pods, new])
    ending = asyncio.create_task(asyncio.to_thread(old.stop))
    await asyncio.sleep(HEARD_S)
    service.send_to([*others, new])
    return new, *await ending


async def test_both_routers_replaced_one_by_one_under_load_fail_no_request(world: World, service: Service) -> None:
    old = [world.router, await asyncio.to_thread(world.another_router, "warmroute-router-2")]
    service.send_to(old)
    ended = []
    async with under_load(service.url) as load:
        for each in old:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            async with asyncio.TaskGroup() as group:
                for event in begun:
                    group.create_task(whole_stream(service.url, OUTLASTING, event))
                for event in begun:
                    await event.wait()
                _, *how = await replaced(world, service, each, f"{each.name}-new")
                ended.append(how)
    print(f"\nboth routers replaced: {len(load.failed)} of {load.requests} failed, they ended with {ended}")
    assert ([status for status, _ in ended], load.failed) == ([0, 0], [])


async def test_without_the_delay_a_replaced_router_fails_requests(world: World, service: Service) -> None:
    """Connections are still sent to it."""
    old = await asyncio.to_thread(world.another_router, "warmroute-router-2", "--drain-delay=0")
    service.send_to([world.router, old])
    async with under_load(service.url) as load:
        await replaced(world, service, old, "warmroute-router-3")
    print(f"\nwithout --drain-delay: {len(load.failed)} of {load.requests} failed")
    assert load.failed != []


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
