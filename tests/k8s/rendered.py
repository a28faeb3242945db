"""The overlays as `kubectl kustomize` renders them, and the pods that come of it: KubeRay's as well."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import yaml  # type: ignore[import-untyped]

Object: TypeAlias = dict[str, Any]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C takes a tenth of the time
ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
NAMESPACE = "warmroute"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
FOLDERS = sorted(str(file.parent.relative_to(K8S)) for file in K8S.rglob("kustomization.yaml"))

# Components that no overlay has by itself, and where they belong.
EVERYWHERE = ("api-keys", "autoscale-requests", "gateway", "ingress", "monitoring", "peers")
WITH = {
    "kind": (*EVERYWHERE, "replica-key", "curve", "neighbours", "autoscale-replicas"),
    "vllm": (*EVERYWHERE, "replica-key", "mirror"),
    "sglang": (*EVERYWHERE, "replica-key", "mirror"),
    "ray-cpu": (*EVERYWHERE, "redis"),
    "gpu": EVERYWHERE,
    "ha": EVERYWHERE,
}
ALL = "+all"
VARIANTS = [*OVERLAYS, *(overlay + ALL for overlay in OVERLAYS)]
ON_RAY = [variant for variant in VARIANTS if variant.removesuffix(ALL) in ("ray-cpu", "gpu", "ha")]


class Pod(NamedTuple):
    """One that some object is the template of."""

    owner: str  # Kind/name, and of a RayCluster its part
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}

    def is_a(self, **labels: str) -> bool:
        """`component`, or `node` of Ray."""
        names = {"component": "app.kubernetes.io/component", "node": "ray.io/node-type"}
        return all(self.labels.get(names[key]) == value for key, value in labels.items())


def kustomize(folder: Path) -> list[Object]:
    """Render the folder. Without kubectl a test is skipped, and `make k8s-check` fails."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl here to render k8s/ with")
    finished = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert not finished.stderr, finished.stderr  # what is deprecated, for example
    return [each for each in yaml.load_all(finished.stdout, LOADER) if each is not None]


@functools.cache
def rendered(variant: str) -> list[Object]:
    """An overlay; with `+all` at its end, with every component that fits."""
    overlay = variant.removesuffix(ALL)
    if overlay == variant:
        return kustomize(K8S / "overlays" / overlay)
    with tempfile.TemporaryDirectory() as folder:
        return kustomize(together(Path(folder).resolve(), overlay, WITH[overlay]))


def together(folder: Path, overlay: str, components: tuple[str, ...]) -> Path:
    """A user's own overlay: one of ours, and components."""
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / overlay, folder)],
        "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def title(each: Object) -> str:
    return f"{each['kind']}/{each['metadata']['name']}"


def pods(objects: list[Object]) -> list[Pod]:
    return [pod for each in objects for pod in _pods(each)]


def _pods(each: Object) -> Iterator[Pod]:
    if each["kind"] == "Deployment":
        yield _pod(title(each), each["spec"]["template"])
    if each["kind"] == "RayCluster":
        yield from _pods_of_ray(each)


def _pod(owner: str, template: Object, labels: Mapping[str, str] | None = None) -> Pod:
    metadata = template.get("metadata", {})
    return Pod(owner, metadata.get("labels", {}) | (labels or {}), metadata.get("annotations", {}), template["spec"])


# ---- what KubeRay makes of a RayCluster (ray-operator/controllers/ray/common/pod.go, and job.go for the clean-up)


def _pods_of_ray(cluster: Object) -> Iterator[Pod]:
    spec = cluster["spec"]
    head = deepcopy(spec["headGroupSpec"]["template"])
    if spec.get("enableInTreeAutoscaling"):
        options = spec.get("autoscalerOptions", {})
        kept = {key: options[key] for key in ("resources", "securityContext", "env", "volumeMounts") if key in options}
        head["spec"]["containers"].append(
            {"name": "autoscaler", "image": head["spec"]["containers"][0]["image"], **kept}
        )
    yield _pod(f"{title(cluster)}/head", head, _ray_labels(cluster, "head", "headgroup"))
    for group in spec["workerGroupSpecs"]:
        worker = deepcopy(group["template"])
        ray = worker["spec"]["containers"][0]
        kept = {key: deepcopy(ray[key]) for key in ("image", "securityContext", "env", "volumeMounts") if key in ray}
        waiting = {"name": "wait-gcs-ready", "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}}, **kept}
        waiting["resources"]["requests"] = waiting["resources"]["limits"]
        worker["spec"].setdefault("initContainers", []).append(waiting)
        name = group["groupName"]
        yield _pod(f"{title(cluster)}/{name}", worker, _ray_labels(cluster, "worker", name))
    if "gcsFaultToleranceOptions" in spec:
        emptied = deepcopy(spec["headGroupSpec"]["template"])
        del emptied["spec"]["containers"][1:]
        emptied["spec"].pop("initContainers", None)
        yield _pod(f"{title(cluster)}/redis-cleanup", emptied, _ray_labels(cluster, "redis-cleanup", "headgroup"))


def _ray_labels(cluster: Object, node: str, group: str) -> dict[str, str]:
    return {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": node, "ray.io/group": group}
