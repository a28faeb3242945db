"""The set-up for each page's commands, and commands that cannot run in a test, with the reason.

A command is named by how its line begins. One that is not named here runs as it is, and has to end with status 0.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Serves(NamedTuple):
    """It serves once it has printed this, and runs until the page has another command with the same beginning."""

    says: str


class Ends(NamedTuple):
    """It ends with one of these."""

    statuses: tuple[int, ...]


class NotHere(NamedTuple):
    """It cannot run in a test."""

    because: str


How = Serves | Ends | NotHere


class Scene(NamedTuple):
    """Commands to run before the named one, which the page takes for granted; "": before all."""

    before: str
    commands: tuple[str, ...]


class Walk(NamedTuple):
    how: Mapping[str, How] = MappingProxyType({})
    scenes: tuple[Scene, ...] = ()
    shows: tuple[str, ...] = ()  # commands whose output is what the page shows, but for numbers and made-up text


UP = Serves("Ctrl-C ends everything")
REPLICA = Serves("ready on http")
ROUTER = Serves("router on http")
EVERYWHERE: dict[str, How] = {
    "make up": UP,
    "warmroute up": UP,
    "warmroute replica": REPLICA,
    "warmroute router": ROUTER,
}

NO_GPU = NotHere("needs a GPU and vLLM or SGLang; simulated replicas answer at its address")
NO_HUB = NotHere("needs the Hugging Face hub; the demo model's tokenizer lies in its folder")
NO_CLUSTER = NotHere("needs a cluster; qualification/kubernetes/test_discovery.py runs it against an API server")
ROLES = NotHere("needs a model beside the demo; tests/chaos/test_native_prefill.py starts such replicas")
NO_TERMINAL = NotHere("needs a terminal; tests/router/console/top drives it in one")
MESSAGES = '[{"role": "user", "content": "Name the capital of France."}]'
QUESTION = f'{{"model": "demo", "max_tokens": 4, "messages": {MESSAGES}}}'


def simulated(host: str, port: int, events: int = 5557, name: str = "demo") -> str:
    return (
        f"warmroute replica --engine simulated --model demo --served-model-name {name} --host {host} --port {port} "
        f"--events-host {host} --events-port {events} --replica-name {host}-{port}"
    )


def asked(times: int, router: str = "http://127.0.0.1:8000") -> str:
    headers = "-H 'Content-Type: application/json'"
    return f"for n in $(seq {times}); do curl -sf {router}/v1/chat/completions {headers} -d '{QUESTION}'; done"


TWO = (simulated("127.0.0.1", 8001), simulated("127.0.0.1", 8002, 5561))
ROUTED = (*TWO, "warmroute router --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002 --policy cost")
QWEN = (
    "warmroute fetch demo models/qwen --tokenizer-only",
    simulated("10.0.0.1", 8000, name="Qwen/Qwen3-8B"),
    simulated("10.0.0.2", 8000, name="Qwen/Qwen3-8B"),
)
SHADOW = "warmroute shadow --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000"
IDLE = Ends((0, 2))  # 2: the replica has sent nothing meanwhile
VLLM: dict[str, How] = {"vllm serve": NO_GPU, "warmroute fetch Qwen/Qwen3-8B": NO_HUB}

WALKS = {
    "README.md": Walk(
        VLLM
        | {
            "make test": NotHere("it is the run that this test is part of"),
            "warmroute demo": NotHere("computes for a minute; tests/lab/chat/test_demo.py runs it"),
        },
        (Scene("warmroute router", QWEN),),
        ("make up", "for ask"),
    ),
    "docs/quickstart.md": Walk({}, (), ("warmroute status", "for ask")),  # a busy machine may answer from both
    "docs/vllm.md": Walk(
        VLLM | {"VLLM_NIXL_SIDE_CHANNEL_HOST": NO_GPU, "python -m sglang": NO_GPU, "warmroute events conform": IDLE},
        (Scene("", QWEN),),
    ),
    "docs/events.md": Walk(
        {
            "warmroute events replay": Serves("waiting for a subscriber"),
            "warmroute events conform": IDLE,
            "warmroute events mirror": Serves("rank 0: nothing published yet"),
        },
        (Scene("", TWO),),
    ),
    "docs/explain.md": Walk({}, (Scene("", (*ROUTED, asked(2))),)),
    "docs/top.md": Walk(
        {"warmroute top": NO_TERMINAL, "COLUMNS=160 warmroute top --once": Ends((0, 1))}, (Scene("", ROUTED),)
    ),
    "docs/router.md": Walk({}, (Scene("", ("warmroute fetch demo path/to/model", *TWO)),)),
    "docs/discovery.md": Walk(
        {"warmroute router --kubernetes": NO_CLUSTER},
        (Scene("", (simulated("10.0.0.1", 8001), simulated("10.0.0.2", 8000))),),
    ),
    "docs/keys.md": Walk({"WARMROUTE_API_KEY=secret warmroute router": ROUTER}, (Scene("", TWO),)),
    "docs/picker.md": Walk({"pip install": NotHere("it is installed"), "warmroute picker": ROUTER}, (Scene("", TWO),)),
    "docs/usage.md": Walk({"warmroute router --replica": ROUTER}, (Scene("", TWO),)),
    "docs/failures.md": Walk({}, (Scene("", QWEN),)),
    "docs/request-log.md": Walk({}, (Scene("", TWO),)),
    "docs/metrics.md": Walk({}, (Scene("", ROUTED),)),
    "docs/doctor.md": Walk({"warmroute doctor": Ends((0, 1))}, (Scene("", ROUTED),)),
    "docs/replica.md": Walk(),
    "docs/kv-tiers.md": Walk(
        {
            "WARMROUTE_KV_SECRET": REPLICA,
            "export WARMROUTE_KV_SECRET": ROLES,
            "warmroute replica --model path/to/model": ROLES,
            "warmroute router": ROLES,
        }
    ),
    "docs/agents.md": Walk({}, (Scene("", ("""echo '{"text": "I wrote a.txt."}' > answers.jsonl""",)),)),
    "docs/fetch.md": Walk({}, (Scene("", TWO),)),
    "docs/fleet.md": Walk(),
    "docs/fleet-commands.md": Walk(
        {"warmroute down 8000": NotHere("needs a fleet of a cluster; tests/chaos/test_fleet_nodes.py has one")},
        (Scene("", ("warmroute up --no-ray --simulated --replicas 3",)),),
    ),
    "docs/bench.md": Walk({}, (Scene("", ROUTED),)),
    "docs/analyze.md": Walk(
        {},
        (
            Scene("", (*TWO, "python -m tests.docs.traces agents agents.jsonl.gz")),
            Scene("warmroute analyze requests.log", (asked(4),)),
        ),
    ),
    "docs/shadow.md": Walk(
        {f"{SHADOW} --listen": Serves("following 2 replicas"), f"{SHADOW} --requests": Ends((0,))},
        (
            Scene("", (simulated("10.0.0.1", 8000), simulated("10.0.0.2", 8000))),
            Scene(f"{SHADOW} --requests", (f"""echo '{{"body": {QUESTION}}}' > requests.jsonl""",)),
        ),
    ),
    "docs/prove.md": Walk(
        {"warmroute prove 10.0.0.9": NotHere("needs a router of another make; tests/bench/prove.py starts two")},
        (Scene("", ROUTED),),
    ),
    "docs/kv-events-spec.md": Walk({"warmroute events conform": IDLE}),
    "docs/simulate.md": Walk({}, (Scene("", ("python -m tests.docs.traces conversations conversation.jsonl",)),)),
}

ELSEWHERE = {
    "docs/adapters.md": "needs an adapter; tests/replica/lora has some, and asks for them",
    "docs/benchmarks.md": "takes an hour; tests/bench has a small run of each part",
    "docs/coming-from.md": "starts a router of others; tests/docs/test_coming_from.py checks what it says of ours",
    "docs/fleet-file.md": "the file asks for GPUs; tests/fleet/test_plan_file.py reads the very file",
    "docs/gguf.md": "needs a file of the reader's; tests/replica/gguf serves the one of smollm2",
    "docs/gpu.md": "needs a GPU; tests/gpu/test_run.py runs all of it in small on a CPU",
    "docs/images.md": "needs a container engine; qualification/images builds, starts and asks the images",
    "docs/install.md": "installs gigabytes; qualification/images does it for its images",
    "docs/kubernetes.md": "needs a cluster; tests/k8s/test_walk.py compares every line with kubectl and the manifests",
    "docs/kubernetes-checked.md": "needs a cluster; tests/k8s/test_validation.py runs its script",
    "docs/library.md": "wants two replicas; tests/docs/test_library.py runs the program with two",
    "docs/model-names.md": "its models are only names; tests/router/proxy/test_rewriting.py serves such ones",
    "docs/ray.md": "needs several machines; tests/chaos/test_fleet_nodes.py starts such a cluster",
    "docs/several-routers.md": "its routers run until they are ended; tests/router/workers starts such ones",
}
