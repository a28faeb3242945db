"""The commands in docs/kubernetes.md exist, and refer to objects of the manifests."""

import functools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.k8s.rendered import K8S, NAMESPACE, OVERLAYS, ROOT, pods, rendered

PAGE = ROOT / "docs" / "kubernetes.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(kubectl [^`\n]+)`")
LABELS = re.compile(r"[\w./-]+=[\w./-]+(,[\w./-]+=[\w./-]+)*")
# Programs that cannot be run here, with the page's uses of them.
ELSEWHERE = {"kind": ("create cluster", "load docker-image"), "openssl": ("rand -hex",), "docker": ("build",)}
SHORT = {"-n": "--namespace", "-l": "--selector", "-c": "--container", "-o": "--output", "-k": "--kustomize"}
KINDS = {"deployment": "Deployment", "service": "Service"}


def typed() -> Iterator[str]:
    """Commands line by line, without shell keywords; the contents of $( ) are lines of their own."""
    text = PAGE.read_text()
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            inner = re.findall(r"\$\(([^()]+)\)", line)
            yield from inner
            line = re.sub(r"\$\([^()]+\)", "made", line).strip()
            line = re.sub(r"^(until|head=made)\b|; do sleep \d+; done$", "", line).strip()
            if line and not line.startswith(("for ", "done", "#")):
                yield line
    yield from (line.replace("\\|", "|") for line in SPAN.findall(text))


def of(program: str) -> list[list[str]]:
    found = (shlex.split(line, comments=True) for line in typed())
    return [words for words in found if words[0] == program]


@functools.cache
def help_of(*words: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl here to ask for its commands")
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, check=True).stdout


def verb_of(words: list[str]) -> tuple[str, ...]:
    """`get`, `rollout status`, `create secret generic`: as deep as kubectl knows."""
    plain = [word for word in without_namespace(words)[1:] if not word.startswith("-")]
    verb: tuple[str, ...] = ()
    for word in plain:
        if re.search(rf"^  {re.escape(word)} ", listed(verb), re.MULTILINE) is None:
            break
        verb = (*verb, word)
    assert verb, f"kubectl has no {plain[0]!r}: {words}"
    return verb


def listed(verb: tuple[str, ...]) -> str:
    """The commands below this one, as its help lists them."""
    text = help_of(*verb, "--help")
    return text if not verb else "".join(re.findall(r"^Available Commands:\n(?:  .*\n)+", text, re.MULTILINE))


def without_namespace(words: list[str]) -> list[str]:
    if "-n" not in words:
        return words
    place = words.index("-n")
    assert words[place + 1] == NAMESPACE, words
    return [*words[:place], *words[place + 2 :]]


def refused(words: list[str]) -> str | None:
    """First flag of a line that kubectl does not know, or its error."""
    try:
        known = help_of(*verb_of(words), "--help") + help_of("options")
    except AssertionError as error:
        return str(error)
    own = words[: words.index("--")] if "--" in words else words
    flags = [word.partition("=")[0] for word in own if word.startswith("-") and word != "-"]
    return next((flag for flag in flags if f"{SHORT.get(flag, flag)}=" not in known), None)


def test_kubectl_understands_every_line() -> None:
    lines = of("kubectl")
    assert len(lines) > 15
    assert {" ".join(words): refused(words) for words in lines if refused(words)} == {}


@pytest.mark.parametrize("line", ["aply -k x", "get pods --selecto=a", "rollout status --for=x"])
def test_what_kubectl_does_not_know_would_be_found(line: str) -> None:
    assert refused(shlex.split(f"kubectl {line}")) is not None


def test_every_overlay_and_component_is_told_of_and_no_other() -> None:
    text = PAGE.read_text()
    for kind, names in (("overlays", OVERLAYS), ("components", [path.name for path in (K8S / "components").iterdir()])):
        for name in names:
            assert f"`{name}`" in text, f"the page does not mention k8s/{kind}/{name}"
        assert set(re.findall(rf"k8s/{kind}/([\w-]+)", text)) <= set(names)


def test_named_objects_and_labels_are_those_of_the_manifests() -> None:
    objects = [each for overlay in OVERLAYS for each in rendered(overlay)]
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    # Includes KubeRay's labels, added where its pods are made.
    labels = [{*pod.labels.items()} for overlay in OVERLAYS for pod in pods(rendered(overlay))]
    for words in of("kubectl"):
        for word in words:
            kind, _, name = word.partition("/")
            if kind in KINDS and name:
                assert (KINDS[kind], name) in made, words
        if "-l" in words:
            wanted = words[words.index("-l") + 1]
            assert LABELS.fullmatch(wanted), words
            pairs = {tuple(pair.split("=")) for pair in wanted.split(",")}
            assert any(pairs <= each for each in labels), words


def test_ports_that_are_forwarded_are_those_of_services() -> None:
    services = {
        each["metadata"]["name"]: {port["port"] for port in each["spec"]["ports"]}
        for overlay in OVERLAYS
        for each in rendered(overlay)
        if each["kind"] == "Service"
    }
    forwarded = [words for words in of("kubectl") if "port-forward" in words]
    assert forwarded
    for words in forwarded:
        *_, service, ports = words
        assert int(ports.partition(":")[2]) in services[service.removeprefix("service/")], words


def test_secrets_are_made_with_the_keys_that_pods_ask_for() -> None:
    asked: set[tuple[str, str]] = set()
    for overlay in (f"{overlay}+all" for overlay in OVERLAYS):
        for pod in pods(rendered(overlay)):
            for each in pod.containers:
                for variable in each.get("env", ()):
                    secret = variable.get("valueFrom", {}).get("secretKeyRef")
                    if secret is not None:
                        asked.add((secret["name"], secret["key"]))
    page = PAGE.read_text()
    for name, key in asked:
        assert re.search(rf"`{re.escape(name)}` \| `{re.escape(key)}`", page), f"{name}/{key} is not in the table"
    for words in of("kubectl"):
        if "secret" in words:
            name = words[words.index("generic") + 1]
            keys = [word.partition("=")[2].partition("=")[0] for word in words if word.startswith("--from-")]
            assert keys and all(re.search(rf"`{name}` \| `{key}`", page) for key in keys), words


def test_other_programs_are_used_as_they_are_known() -> None:
    targets = set(re.findall(r"^FROM .* AS ([\w-]+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.IGNORECASE))
    programs = {shlex.split(line, comments=True)[0] for line in typed()}
    assert programs <= {"kubectl", "warmroute", "curl", *ELSEWHERE}, programs
    for program, uses in ELSEWHERE.items():
        for words in of(program):
            assert " ".join(words[1:]).startswith(uses), words
            if "--target" in words:
                assert words[words.index("--target") + 1] in targets, words
