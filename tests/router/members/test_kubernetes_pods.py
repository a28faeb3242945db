"""Pods as replicas: readiness, ports, labels and annotations."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.members.discovery.collection import Collection
from router.members.discovery.labels import KEYS, PREFIX
from router.members.discovery.pods import Pod, check_selector, pods_of
from router.members.spec import ReplicaSpec
from tests.router.kubernetes_api import SPACE, Object, pod, port

EVENTS = [port("events", 5557), port("replay", 5558), port("status", 5559), port("snapshot", 5560)]


def listed(*pods: Object) -> Collection[Pod, ReplicaSpec]:
    made = pods_of(SPACE, "app=llm")
    made.listed([made.page(msgspec.json.encode({"metadata": {"resourceVersion": "5"}, "items": pods}))])
    return made


def only(content: Object) -> ReplicaSpec:
    (spec,) = listed(content).desired().values()
    return spec


def none_of(content: Object) -> bool:
    return not listed(content).desired()


def change(made: Collection[Pod, ReplicaSpec], kind: str, content: Object, version: str) -> bool:
    content["metadata"]["resourceVersion"] = version
    return made.changed(msgspec.json.encode({"type": kind, "object": content}))


# ---- when it is one


def test_a_ready_pod_is_a_replica_by_its_name_address_and_ports() -> None:
    spec = only(pod("p", "10.1.2.3", ports=[port("http", 8001), *EVENTS, port("metrics", 9000)]))
    assert (spec.name, spec.url, spec.engine, spec.draining) == ("p", "http://10.1.2.3:8001", "auto", False)
    assert (spec.events, spec.replay) == ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:5558")
    assert (spec.status, spec.snapshot) == ("tcp://10.1.2.3:5559", "tcp://10.1.2.3:5560")


def test_what_is_null_is_empty() -> None:
    content = pod("p", annotations={"warmroute/http-port": "8000"})
    content["metadata"] |= {"labels": None}
    content["spec"] = {"containers": [{"name": "engine", "ports": None}], "initContainers": None}
    content["status"]["containerStatuses"] = None
    assert only(content).incarnation == "uid-p"
    content["status"]["conditions"] = None
    assert none_of(content) and none_of(pod("p") | {"status": {}}) and none_of({"metadata": {"name": "p"}})


# ---- ports


@pytest.mark.parametrize(
    ("content", "url", "events"),
    [
        (pod("p", ports=[port("", 9000)]), "http://10.0.0.1:9000", None),
        (pod("p", ports=[port("web", 9000), port("gossip", 1, "UDP")]), "http://10.0.0.1:9000", None),
        (pod("p", "fd00::7", ports=[port("http", 1), port("events", 2)]), "http://[fd00::7]:1", "tcp://[fd00::7]:2"),
        (
            pod("p", ports=[], annotations={"warmroute/http-port": "8001", "warmroute/events-port": "5557"}),
            "http://10.0.0.1:8001",
            "tcp://10.0.0.1:5557",
        ),
        (
            pod("p", ports=[port("http", 8000), *EVENTS], annotations={"warmroute/events-port": "off"}),
            "http://10.0.0.1:8000",
            "off",
        ),
    ],
    ids=["the only one", "the only one of TCP", "IPv6", "annotated", "without events"],
)
def test_ports_are_those_of_the_containers_or_the_annotations(content: Object, url: str, events: str | None) -> None:
    spec = only(content)
    assert (spec.url, spec.events, spec.replay) == (url, events, None)


def test_ports_may_be_those_of_several_containers() -> None:
    content = pod("p", ports=[port("http", 8000)])
    content["spec"]["containers"].append({"name": "publisher", "ports": [port("events", 5557), port("http", 1)]})
    content["spec"]["initContainers"] = [
        {"name": "once", "ports": [port("status", 1)]},
        {"name": "beside", "restartPolicy": "Always", "ports": [port("replay", 5558)]},
    ]
    spec = only(content)
    assert (spec.url, spec.events, spec.replay, spec.status) == (
        "http://10.0.0.1:8000",
        "tcp://10.0.0.1:5557",
        "tcp://10.0.0.1:5558",
        None,
    )


# ---- restarts


def test_without_ids_of_containers_their_restarts_count() -> None:
    content = pod("p", restarts=3)
    del content["status"]["containerStatuses"][0]["containerID"]
    assert only(content).incarnation == "uid-p/3"


def test_a_container_beside_it_may_be_restarted() -> None:
    def with_proxy(restarts: int, **more: Any) -> Object:
        content = pod("p", **more)
        content["spec"]["containers"].insert(0, {"name": "a-proxy", "ports": [port("proxy", 15001)]})
        content["status"]["containerStatuses"].append({"name": "a-proxy", "restartCount": restarts})
        return content

    assert only(with_proxy(0)).incarnation == only(with_proxy(7)).incarnation == "uid-p/containerd://p-0"
    undeclared = {"ports": [], "annotations": {"warmroute/http-port": "8000"}}  # it may be that of either
    assert only(with_proxy(0, **undeclared)).incarnation != only(with_proxy(7, **undeclared)).incarnation


# ---- labels and annotations


def test_annotations_say_what_the_replica_cannot() -> None:
    annotations = {
        "warmroute/engine": "vllm",
        "warmroute/model": "org/model",
        "warmroute/adapters": "one, org/two",
        "warmroute/topic": "kv@",
        "warmroute/block-size": "16",
        "warmroute/max-model-len": "4096",
        "warmroute/resume": "true",
        "prometheus.io/scrape": "true",
    }
    spec = only(pod("p", annotations=annotations, labels={"warmroute/engine": "sglang", "warmroute/role": "decode"}))
    assert spec.role == "decode"
    assert (spec.engine, spec.model, spec.adapters, spec.topic) == ("vllm", "org/model", ("one", "org/two"), "kv@")
    assert (spec.block_size, spec.max_model_len, spec.resume) == (16, 4096, True)


def test_the_docs_name_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "discovery.md").read_text()
    section = page.partition("## Kubernetes\n")[2].partition("\n## ")[0]
    for key in KEYS:
        assert f"`{PREFIX}{key}`" in section or f"`{key}`" in section, key


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ({"warmroute/model": ""}, "warmroute/model is empty; give it a value, or remove it"),
        ({"warmroute/engine": "vlm"}, "engine is 'vlm'; write auto, warmroute, vllm, sglang, trtllm or openai"),
        ({"warmroute/block-size": "16k"}, "warmroute/block-size is '16k'; write a whole number from 1 to 2147483647"),
        ({"warmroute/block-size": "٣"}, "warmroute/block-size is '٣'; write a whole number"),
        ({"warmroute/http-port": "65536"}, "warmroute/http-port is '65536'; write a whole number from 1 to 65535"),
        ({"warmroute/resume": "yes"}, "warmroute/resume is 'yes'; write true or false"),
        ({"warmroute/replay-port": "5558"}, "replay without events (events is missing)"),
    ],
)
def test_a_pod_that_says_what_cannot_be_is_refused_once_and_the_others_continue(
    annotations: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = listed(pod("bad", annotations=annotations), pod("good"))
    assert list(made.desired()) == ["good"]
    assert not change(made, "MODIFIED", pod("bad", annotations=annotations), "6")
    (message,) = caplog.messages
    assert message.startswith("pods space/app=llm: the pod bad cannot be used: ")
    assert why in message
    assert change(made, "MODIFIED", pod("bad"), "7")
    assert sorted(made.desired()) == ["bad", "good"]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("enginge", "is not known; did you mean warmroute/engine?"),
        ("zzz", f"is not known; the keys are {', '.join(KEYS)}"),
        ("api-key-env", "would let a pod ask for the router's secrets; give the router --replica-api-key"),
        ("curve-server", "would let a pod name files of the router's; give the router --curve-server"),
        ("curve-secret", "would let a pod name files of the router's; give the router --curve-secret"),
    ],
)
def test_an_invalid_key_is_skipped(key: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    spec = only(pod("p", annotations={f"warmroute/{key}": "/etc/passwd", "warmroute/engine": "vllm"}))
    assert (spec.engine, spec.api_key_env, spec.curve_server, spec.curve_secret) == ("vllm", None, None, None)
    assert caplog.messages == [
        f"pods space/app=llm: the pod p has a key that is ignored: warmroute/{key} {why}",
    ]


def test_a_mistyped_annotation_takes_no_replica_away(caplog: pytest.LogCaptureFixture) -> None:
    made = listed(pod("p", annotations={"warmroute/engine": "vllm"}))
    mistyped = {"warmroute/engine": "vlm"}
    assert not change(made, "MODIFIED", pod("p", annotations=mistyped), "6")
    assert change(made, "MODIFIED", pod("p", annotations=mistyped, ready=False), "7")
    assert made.desired() == {}
    assert change(made, "MODIFIED", pod("p", "10.9.9.9", restarts=1, annotations=mistyped), "8")
    assert change(made, "MODIFIED", pod("p", "10.9.9.9", restarts=1, annotations=mistyped, ending=True), "9")
    (spec,) = made.desired().values()
    assert (spec.engine, spec.url, spec.draining) == ("vllm", "http://10.9.9.9:8000", True)
    assert spec.incarnation == "uid-p/containerd://p-1"
    (message,) = caplog.messages
    assert message.startswith("pods space/app=llm: the pod p cannot be used: ")
    assert message.endswith("or openai; its last valid value still counts")
    assert change(made, "MODIFIED", pod("p", annotations=mistyped, uid="another"), "10")
    assert made.desired() == {}


def test_a_pod_without_a_port_of_http_is_told_how_to_name_it(caplog: pytest.LogCaptureFixture) -> None:
    assert none_of(pod("p", ports=EVENTS))
    assert caplog.messages == [
        "pods space/app=llm: the pod p cannot be used: it has no port named http; "
        "name the container's port, or annotate warmroute/http-port"
    ]


# ---- changes


def test_a_list_that_cannot_be_read_changes_nothing() -> None:
    made = listed(pod("p"))
    whole = msgspec.json.encode({"metadata": {"resourceVersion": "9"}, "items": [pod("q")]})
    with pytest.raises(msgspec.DecodeError):
        made.listed([made.page(whole), made.page(whole[:-1])])
    assert (list(made.desired()), made.resource_version) == (["p"], "5")


# ---- selectors


SELECTORS = [
    "app=vllm",
    "app==vllm",
    "app!=a",
    "app=",
    "app in (a,b)",
    "app notin (a, b),tier=x",
    "app = a , b in (c)",
    "app",
    "!app",
    "size>3",
    "size < 007",
    "size>9223372036854775807",
    "example.com/app=a.b_c-d",
]
NO_SELECTORS = [
    "app=a,",
    "app=a b",
    "app in a",
    "app in (a",
    "-app=a",
    "app=a/b",
    "a/b/c=d",
    "app=" + "x" * 64,
    "size>-1",  # a number, but no value of a label
    "size>+1",
    "size>٣",
    "size>a",
]


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_selector_may_be_what_kubernetes_takes(selector: str) -> None:
    check_selector(selector)


@pytest.mark.parametrize("selector", ["", " ", *NO_SELECTORS])  # to the API server an empty one means everything
def test_an_invalid_selector_is_refused(selector: str) -> None:
    with pytest.raises(ValueError, match=r"is not a selector; write app=model, or app in \(a,b\)"):
        check_selector(selector)
