"""The commands in docs/kubernetes.md exist, and refer to objects of the manifests."""

import re
import shlex
from collections.abc import Iterator

from tests.k8s.rendered import K8S, OVERLAYS, ROOT, pods, rendered

PAGE = ROOT / "docs" / "kubernetes.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(kubectl [^`\n]+)`")
LABELS = re.compile(r"[\w./-]+=[\w./-]+(,[\w./-]+=[\w./-]+)*")
# Programs that cannot be run here, with the page's uses of them.
ELSEWHERE = {"kind": ("create cluster", "load docker-image"), "openssl": ("rand -hex",), "docker": ("build",)}
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
