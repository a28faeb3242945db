"""Changes of a user's overlay reach every object: image names, the namespace, a patch of the router."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.k8s.rendered import K8S, OVERLAYS, Object, kustomize, of_kind, pods, rendered, title

OURS = ("warmroute-router", "warmroute-replica-cpu", "warmroute-replica-gpu")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Object]]:
    """The objects of an overlay, with images from a registry of one's own, and in another namespace."""
    images = [{"name": name, "newName": f"registry.example/{name}", "newTag": "1.2.3"} for name in OURS]

    @cache
    def moved(overlay: str) -> list[Object]:
        return with_changes(tmp_path_factory.mktemp(overlay), overlay, images=images, namespace="green")

    return moved


def with_changes(folder: Path, overlay: str, **changes: Any) -> list[Object]:
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / overlay, folder.resolve())],
        **changes,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return kustomize(folder)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_have_other_names_everywhere(overlay: str, elsewhere: Callable[[str], list[Object]]) -> None:
    """kustomize does not know RayClusters, but their images are renamed, too."""
    for pod in pods(elsewhere(overlay)):
        for each in pod.containers:
            name, _, tag = each["image"].rpartition(":")
            if "warmroute" in name:
                assert name.startswith("registry.example/") and tag == "1.2.3", (pod.owner, each["name"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_namespace_is_that_of_everything(overlay: str, elsewhere: Callable[[str], list[Object]]) -> None:
    """RoleBindings' subjects and the Namespace itself change, too; nothing refers to the old one by name."""
    objects = elsewhere(overlay)
    for each in objects:
        own = each["metadata"]["name"] if each["kind"] == "Namespace" else each["metadata"]["namespace"]
        assert own == "green", title(each)
    for binding in of_kind(objects, "RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == ["green"]
    assert "warmroute.svc" not in yaml.safe_dump(objects)


def test_ray_of_another_namespace_keeps_nothing_where_ours_does(elsewhere: Callable[[str], list[Object]]) -> None:
    """This holds in the same Redis: KubeRay prefixes every key with the RayCluster's uid by default."""
    [cluster] = of_kind(elsewhere("ha"), "RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"].keys() == {"redisAddress", "redisPassword"}
    assert "ray.io/external-storage-namespace" not in cluster["metadata"].get("annotations", {})
    assert "external_storage_namespace" not in yaml.safe_dump(cluster["spec"])


def test_a_patch_adds_to_what_the_overlay_says(tmp_path: Path) -> None:
    path = "/spec/template/spec/containers/0/args/-"
    patch = yaml.safe_dump([{"op": "add", "path": path, "value": "--queue-timeout=10"}])
    target = {"kind": "Deployment", "name": "warmroute-router"}
    objects = with_changes(tmp_path, "kind", patches=[{"target": target, "patch": patch}])
    [router] = [pod for pod in pods(objects) if pod.is_a(component="router")]
    [before] = [pod for pod in pods(rendered("kind")) if pod.is_a(component="router")]
    assert router.spec["containers"][0]["args"] == [*before.spec["containers"][0]["args"], "--queue-timeout=10"]


def test_a_plan_of_your_own_takes_the_place_of_ours(tmp_path: Path) -> None:
    """A file of the same name replaces it; the ConfigMap keeps its name, which the head's pod refers to."""
    (tmp_path / "fleet.toml").write_text('[[models]]\nmodel = "demo"\nreplicas = 4\n')
    generator = {"name": "warmroute-fleet", "behavior": "replace", "files": ["fleet.toml"]}
    generator["options"] = {"disableNameSuffixHash": True}  # type: ignore[assignment]
    objects = with_changes(tmp_path, "ray-cpu", namespace="warmroute", configMapGenerator=[generator])
    [config] = [
        each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].startswith("warmroute-fleet")
    ]
    assert config["metadata"]["name"] == "warmroute-fleet"
    assert "replicas = 4" in config["data"]["fleet.toml"]
