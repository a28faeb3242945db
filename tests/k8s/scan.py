"""checkov over all that is rendered, the pods of Ray included, and the Dockerfile: `python -m tests.k8s.scan CHECKOV`.

What it finds and we mean so is in exceptions.toml, with the reason. An exception that nothing needs is a mistake, too.
"""

import fnmatch
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from tests.k8s.rendered import NAMESPACE, ROOT, VARIANTS, Object, Pod, pods, rendered

EXCEPTIONS = Path(__file__).parent / "exceptions.toml"
TIMEOUT_S = 300


class Finding(NamedTuple):
    check: str
    about: str  # checkov's name, such as Deployment.warmroute.warmroute-router
    text: str


class Excepted(NamedTuple):
    check: str
    about: tuple[str, ...]  # patterns as of a shell
    reason: str

    def covers(self, finding: Finding) -> bool:
        return finding.check == self.check and any(fnmatch.fnmatch(finding.about, each) for each in self.about)


def exceptions(text: str) -> list[Excepted]:
    return [Excepted(each["check"], tuple(each["about"]), each["reason"]) for each in tomllib.loads(text)["exceptions"]]


def judged(findings: Iterable[Finding], excepted: Sequence[Excepted]) -> list[str]:
    """Problems to fix: findings without an exception, and patterns without a finding."""
    found = set(findings)
    wrong = [
        f"{each.check} {each.about}: {each.text}"
        for each in sorted(found)
        if not any(one.covers(each) for one in excepted)
    ]
    for one in excepted:
        for pattern in one.about:
            if not any(one._replace(about=(pattern,)).covers(each) for each in found):
                wrong.append(f"{one.check} {pattern}: nothing is found there any more; take the exception out")
    return wrong


def write(folder: Path) -> None:
    """A file for each variant. RayClusters, which checkov does not know, are there as the pods that they become."""
    for variant in VARIANTS:
        objects = rendered(variant)
        of_ray = [as_object(pod) for pod in pods(objects) if pod.owner.startswith("RayCluster/")]
        known = [each for each in objects if each["kind"] != "RayCluster"]
        (folder / f"{variant}.yaml").write_text(yaml.safe_dump_all([*known, *of_ray]))


def as_object(pod: Pod) -> Object:
    name = pod.owner.removeprefix("RayCluster/").replace("/", "-")
    metadata = {"name": name, "namespace": NAMESPACE, "labels": dict(pod.labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}


def scanned(checkov: str, *where: str) -> Iterator[Finding]:
    command = [checkov, *where, "--quiet", "--compact", "--skip-download", "--output", "json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        said: Any = json.loads(finished.stdout)
    except json.JSONDecodeError:
        sys.exit(f"checkov said nothing that can be read (status {finished.returncode}): {finished.stderr[-2000:]}")
    for report in said if isinstance(said, list) else [said]:
        results = report.get("results")
        if results is None or results.get("parsing_errors"):
            sys.exit(f"checkov could not read all of {' '.join(where)}: {json.dumps(report)[:2000]}")
        for each in results["failed_checks"]:
            yield Finding(each["check_id"], each["resource"], each["check_name"])


def main(checkov: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        findings = [*scanned(checkov, "--framework", "kubernetes", "--directory", folder)]
    findings += scanned(checkov, "--framework", "dockerfile", "--file", str(ROOT / "Dockerfile"))
    wrong = judged(findings, exceptions(EXCEPTIONS.read_text()))
    if wrong:
        sys.exit("\n".join([*wrong, f"Mend it, or say in {EXCEPTIONS.relative_to(ROOT)} why it is meant so."]))


if __name__ == "__main__":
    main(sys.argv[1])
