"""Every overlay, base and component renders, and Kubernetes would know every field."""

import os
import subprocess
from copy import deepcopy
from itertools import chain
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.k8s.rendered import ALL, FOLDERS, K8S, OVERLAYS, VARIANTS, WITH, Object, kustomize, rendered, title
from tests.k8s.validation import OWN, mistakes

CUSTOM = sorted(file.stem for file in OWN.glob("*.json"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_renders(folder: str) -> None:
    """A component does with what it is for: those of overlays, and those that VARIANTS have besides."""
    if folder.startswith("components"):
        assert Path(folder).name in {*chain.from_iterable(WITH.values()), *used_by_overlays()}
    elif folder.startswith("overlays"):
        assert rendered(Path(folder).name)
    else:
        assert kustomize(K8S / folder)


def used_by_overlays() -> set[str]:
    files = [yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text()) for name in OVERLAYS]
    return {Path(each).name for file in files for each in file.get("components", [])}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_field_is_known(variant: str) -> None:
    wrong = {title(each): found for each in rendered(variant) if (found := mistakes(each))}
    assert not wrong


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_in_the_namespace(variant: str) -> None:
    for each in rendered(variant):
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "warmroute", title(each)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_two_objects_have_a_name(variant: str) -> None:
    names = [title(each) for each in rendered(variant)]
    assert len(set(names)) == len(names)


# ---- negative controls


def one_of(kind: str) -> Object:
    found = (each for name in OVERLAYS for each in rendered(name + ALL) if each["kind"].lower() == kind)
    return deepcopy(next(found))


@pytest.mark.parametrize("kind", [*CUSTOM, "deployment", "networkpolicy", "horizontalpodautoscaler", "role", "service"])
def test_a_field_that_does_not_exist_is_found(kind: str) -> None:
    each = one_of(kind)
    assert not mistakes(each)
    spec = each["spec"] if "spec" in each else each["rules"][0]
    spec["noSuchField"] = 1
    assert any("noSuchField" in mistake for mistake in mistakes(each))


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        (
            "raycluster",
            ("spec", "headGroupSpec", "template", "spec", "containers", 0, "imagePolicy"),
            "Always",
            "image",
        ),
        ("raycluster", ("spec", "workerGroupSpecs", 0, "minReplica"), 1, "minReplica"),
        ("raycluster", ("spec", "authOptions", "mode"), "tokens", "tokens"),
        ("raycluster", ("spec", "headGroupSpec", "rayStartParams", "port"), 6379, "string"),
        ("deployment", ("spec", "template", "spec", "containers", 0, "livenessProbe", "httpget"), {}, "httpget"),
        ("servicemonitor", ("spec", "endpoints", 0, "intervall"), "15s", "intervall"),
        ("podmonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "15", "15"),
        ("prometheusrule", ("spec", "groups", 0, "rules", 0, "exprs"), "up", "exprs"),
        ("httproute", ("spec", "rules", 0, "timeouts", "request"), "forever", "forever"),
    ],
)
def test_a_misspelt_word_is_found(kind: str, path: tuple[str | int, ...], value: object, said: str) -> None:
    each = one_of(kind)
    node: object = each
    for key in path[:-1]:
        node = node[key]  # type: ignore[index]
    node[path[-1]] = value  # type: ignore[index]
    assert any(said in mistake for mistake in mistakes(each)), mistakes(each)


def test_the_report_of_a_cluster_says_what_to_set_if_none_answers(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    ended = subprocess.run(["sh", K8S / "report.sh"], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.endswith("kubectl config use-context\n")
    assert ended.stdout.startswith("warmroute in the namespace warmroute, 20")
