"""Served models: plans are readable and fit, engines start as in a fleet, routers have the tokenizer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleet.host.engines import launch
from fleet.plan import Engine, FleetPlan, ModelPlan, Task
from fleet.toml.plan_file import read_fleet
from router.members.discovery import pods as discovered
from router.members.discovery.labels import values_in
from tests.k8s.commands import values_of
from tests.k8s.rendered import ON_RAY, VARIANTS, Object, Pod, of_kind, pods, rendered


def fleet_of(variant: str, folder: Path) -> FleetPlan:
    [config] = [
        each for each in of_kind(rendered(variant), "ConfigMap") if each["metadata"]["name"] == "warmroute-fleet"
    ]
    file = folder / Path(values_of(variant, "up")["config"]).name
    file.write_text(config["data"][file.name])
    return read_fleet(str(file))


@pytest.mark.parametrize("variant", ON_RAY)
def test_a_fleet_can_be_read_and_its_nodes_have_room_for_it(variant: str, tmp_path: Path) -> None:
    plan = fleet_of(variant, tmp_path)
    [cluster] = of_kind(rendered(variant), "RayCluster")
    [group] = cluster["spec"]["workerGroupSpecs"]
    params = group["rayStartParams"]
    [worker] = [pod for pod in pods(rendered(variant)) if pod.is_a(node="worker")]
    assert float(params["num-cpus"]) <= float(worker.spec["containers"][0]["resources"]["requests"]["cpu"])
    assert params.get("num-gpus") == worker.spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
    for model in plan.models:
        needs = model.resources
        assert needs.cpus or needs.gpus, f"a node with only {model.name} would look idle to Ray"
        on_one = min(each for each in fits(model, params))
        assert on_one >= 1 and on_one * group["maxReplicas"] >= (
            model.autoscale.max if model.autoscale else model.replicas
        )
        assert model.drain_timeout_s == 60.0, "terminationGracePeriodSeconds of workers relies on it"


def fits(model: ModelPlan, params: Object) -> Iterator[int]:
    if model.resources.cpus:
        yield int(float(params["num-cpus"]) // model.resources.cpus)
    if model.resources.gpus:
        yield int(float(params.get("num-gpus", 0)) // model.resources.gpus)


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_have_the_tokenizer_of_what_is_served(variant: str, tmp_path: Path) -> None:
    served = (
        {model.name: model.model for model in fleet_of(variant, tmp_path).models}
        if variant in ON_RAY
        else plainly(variant)
    )
    fetched = values_of(variant, "fetch")
    assert fetched["tokenizer_only"]
    assert values_of(variant, "router")["model_dir"] == (f"{next(iter(served))}={fetched['folder']}",)
    assert list(served.values()) == [fetched["model"]]


def plainly(variant: str) -> dict[str, str]:
    """Name and model of plain replicas."""
    [pod] = [pod for pod in pods(rendered(variant)) if pod.is_a(component="replica")]
    words = pod.spec["containers"][0]["args"]
    given: dict[str, str] = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    model = given.get("--model") or given.get("--model-path") or str(words[1])
    return {given.get("--served-model-name", model): model}


def volume_at(pod: Pod, each: Object, path: str) -> Object:
    [name] = [mount["name"] for mount in each["volumeMounts"] if mount["mountPath"] == path]
    [volume] = [volume for volume in pod.spec["volumes"] if volume["name"] == name]
    return dict(volume)


FROM_THE_HUB = [variant for variant in VARIANTS if variant.partition("+")[0] in ("gpu", "ha", "vllm", "sglang")]


@pytest.mark.parametrize("variant", FROM_THE_HUB)
def test_only_the_first_router_needs_the_hub(variant: str) -> None:
    """The fetched files are on a volume that outlives the router, and that all routers share."""
    [router] = [pod for pod in pods(rendered(variant)) if pod.is_a(component="router")]
    folder = values_of(variant, "fetch")["folder"]
    assert str(folder).startswith("/models/")
    claims = [volume_at(router, each, "/models")["persistentVolumeClaim"] for each in router.containers]
    assert claims == [{"claimName": "warmroute-models"}] * 2
    [volume] = of_kind(rendered(variant), "PersistentVolumeClaim")
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert router.spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", (
        "otherwise every start goes through it"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_that_fetch_from_the_hub_get_its_token(variant: str) -> None:
    fetching = {"model-files", "vllm", "sglang", "fleet", "ray-worker"} if variant in FROM_THE_HUB else set()
    for pod in pods(rendered(variant)):
        for each in pod.containers:
            tokens = [variable["valueFrom"] for variable in each.get("env", []) if variable["name"] == "HF_TOKEN"]
            if each["name"] != "wait-gcs-ready":  # KubeRay gives it all that its worker has
                wanted = {"secretKeyRef": {"name": "warmroute-hub", "key": "token", "optional": True}}
                assert tokens == [wanted] * (each["name"] in fetching), (pod.owner, each["name"])


@pytest.mark.parametrize("variant", ["kind+all", "vllm+all", "sglang+all"])
def test_replicas_demand_the_key_that_routers_send(variant: str) -> None:
    """ours and vLLM's by a variable that they read, SGLang by its option."""
    [router] = [pod for pod in pods(rendered(variant)) if pod.is_a(component="router")]
    [replica] = [pod for pod in pods(rendered(variant)) if pod.is_a(component="replica")]
    [sent] = keys_of(router.spec["containers"][0], {"WARMROUTE_REPLICA_API_KEY"})
    [demanded] = keys_of(replica.spec["containers"][0], {"WARMROUTE_API_KEY", "VLLM_API_KEY"})
    assert sent == demanded == {"name": "warmroute-replicas", "key": "api-key"}


def keys_of(each: Object, read: set[str]) -> list[Object]:
    """Secrets of the variables in use: those that are read, or that an option names."""
    named = {word.partition("=$(")[2].rstrip(")") for word in each["args"] if word.startswith("--api-key=")}
    return [one["valueFrom"]["secretKeyRef"] for one in each["env"] if one["name"] in read | named]


def test_sglang_has_the_time_to_say_that_it_is_well() -> None:
    """SGLang's health check generates a token, and gives up after 20 seconds, before Kubernetes ends it."""
    [pod] = [pod for pod in pods(rendered("sglang")) if pod.is_a(component="replica")]
    [container] = pod.spec["containers"]
    assert container["readinessProbe"]["timeoutSeconds"] >= 10
    assert container["livenessProbe"]["timeoutSeconds"] > 20


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_are_started_as_a_fleet_starts_them(engine: Engine, tmp_path: Path) -> None:
    """Differences: all addresses for HTTP, fixed ports, and the pod's address for events."""
    for name in ("python", "python3", "vllm"):
        (tmp_path / name).touch(0o755)
    [pod] = [pod for pod in pods(rendered(engine)) if pod.is_a(component="replica")]
    [container] = pod.spec["containers"]
    plan = ModelPlan(name="qwen", model="Qwen/Qwen2.5-7B-Instruct", engine=engine, environment={"PATH": str(tmp_path)})
    begun = launch(Task(name="NAME", plan=plan), "127.0.0.1", "one")
    known = {"POD_IP": "127.0.0.1", "POD_NAME": "NAME"}
    words = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in container["args"]]
    ours, theirs = flags(words), flags(list(begun.command))
    assert theirs.items() - ours.items() == set(), "settings of the fleet that the manifest lacks"
    assert set(ours) - set(theirs) <= {"--max-model-len", "--context-length", "--page-size"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"  # as fleet.host.supervisor asks
    assert Path(container["command"][-1]).name in (Path(begun.command[0]).name, "sglang.launch_server")
    assert pod.annotations["warmroute/engine"] == engine


def flags(words: list[str]) -> dict[str, str]:
    """Flags by name; necessary differences are made equal."""
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, given, value = word.partition("=")
            follows = words[place + 1] if not given and place + 1 < len(words) else ""
            found[name] = value or (follows if not follows.startswith("--") else "")
    found |= {"--host": "any", "--port": "any"}
    events = json.loads(found["--kv-events-config"])
    found["--kv-events-config"] = re.sub(r":\d+\"", ':PORT"', json.dumps(events, sort_keys=True))
    return found


def test_a_flag_that_the_fleet_has_not_is_found() -> None:
    assert flags(["--tp-size=1", "--kv-events-config", "{}"]) != flags(["--tp=1", "--kv-events-config", "{}"])


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in ON_RAY])
def test_routers_understand_what_is_reported_of_replicas(variant: str) -> None:
    """The router's own reader of pods reads them."""
    [pod] = [pod for pod in pods(rendered(variant)) if pod.is_a(component="replica")]
    given = values_of(variant, "router")
    discovered.check_selector(given["kubernetes_pods"])
    key, _, value = given["kubernetes_pods"].partition("=")
    assert pod.labels[key] == value
    values, passed_over = values_in(pod_of(pod).metadata)
    [spec], refused = discovered.replicas_in(pod_of(pod), values)
    assert not refused and not passed_over
    assert spec.url == f"http://10.0.0.7:{pod.ports['http']}"
    for name in ("events", "replay", "status", "snapshot"):
        port = pod.ports.get(f"mirror-{name}", pod.ports.get(name))
        assert getattr(spec, name) == (port and f"tcp://10.0.0.7:{port}")
    assert spec.engine == ("auto" if variant.startswith("kind") else variant.partition("+")[0])
    words = [word for each in pod.containers for word in each.get("args", [])]
    encrypted = any(word.startswith("--curve-secret=") for word in words)
    assert encrypted == (given["curve_server"] is not None) == (variant == "kind+all")


def pod_of(pod: Pod) -> discovered.Pod:
    """The pod as the API server returns it."""
    metadata = {"name": "one", "uid": "1", "labels": dict(pod.labels), "annotations": dict(pod.annotations)}
    status = {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]}
    return msgspec.convert({"metadata": metadata, "spec": pod.spec, "status": status}, discovered.Pod)
