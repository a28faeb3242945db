"""The Grafana dashboard and the Prometheus alerts ask only for what routers, replicas and fleets really expose."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from events.publisher import Publisher
from tests.fleet.test_controller import controller, plan
from tests.replica.serving import replica
from tests.router.dashboard.test_status import exact, ours
from tests.router.members.test_feeds import chain, config
from tests.router.scripted import CHAT, chat, connect, served

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "monitoring" / "alerts.yaml"
GRAFANA = ROOT / "monitoring" / "grafana.json"
SCALING = ROOT / "k8s" / "components" / "autoscale-replicas" / "rules.yaml"
OF_TARGET = {"job", "instance", "namespace"}  # labels that Prometheus adds
RANGED = {"rate": "counter", "increase": "counter"}

METRIC = re.compile(r"(?P<name>\b(?:vllm|warmroute\w*):\w+)(?:\{(?P<matchers>[^}]*)\})?(?P<range>\[[^]]+\])?")
AGGREGATION = re.compile(r"\b(?:sum|min|max|count|avg)(?: by \((?P<by>[^)]*)\))? ?\(")
WORD = re.compile(r"\b\w+\b")


class Exposed(NamedTuple):
    kind: str
    labels: frozenset[str]


def exposed_by(text: str) -> Iterator[tuple[str, Exposed]]:
    """Every name that a query may have, with its labels; what has no samples at all is left out."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kind = "counter" if family.type == "histogram" else family.type
            yield sample.name, Exposed(kind, frozenset(sample.labels))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exposed]:
    found: dict[str, Exposed] = {}
    with replica() as one:
        assert one.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1}).status == 200
        found |= exposed_by(one.get("/metrics").body.decode())
    with Publisher(config()) as publisher:
        async with served(ours(publisher)) as running, connect(running.port) as client:
            publisher.publish([chain(3)])
            await exact(running, publisher)
            await client.post(CHAT, chat())
            await client.post(CHAT, b"{")
            running.router.members.models["m"].tokens.approximated["planted"] = 1
            found |= exposed_by((await client.get("/metrics")).body.decode())
    async with controller(tmp_path_factory.mktemp("fleet"), plan("m")) as (fleet, _):
        await fleet.ready(1)
        found |= exposed_by((await fleet.http.get("/metrics")).text)
    return found | {rule["record"]: Exposed("gauge", frozenset({"namespace"})) for rule in scaling_rules()}


# ---- what is asked


class Query(NamedTuple):
    where: str
    text: str
    shown: frozenset[str]  # labels that its title or message shows


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def scaling_rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(SCALING.read_text())["spec"]["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads(GRAFANA.read_text())["panels"])


def queries() -> Iterator[Query]:
    for rule in alerts():
        shown = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        yield Query(rule["alert"], rule["expr"], frozenset(shown))
    for rule in scaling_rules():
        yield Query(rule["record"], rule["expr"], frozenset({"namespace"}))
    for panel in panels():
        for target in panel.get("targets", []):
            shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
            yield Query(panel["title"], target["expr"], frozenset(shown))


ALL = [pytest.param(query, id=f"{number}: {query.where}") for number, query in enumerate(queries())]


@pytest.mark.parametrize("query", ALL)
def test_a_query_asks_for_what_is_exposed(query: Query, exposed: dict[str, Exposed]) -> None:
    assert query.text.count("(") == query.text.count(")")
    found = list(METRIC.finditer(query.text))
    assert found, query.text
    for metric in found:
        assert metric["name"] in exposed, metric["name"]
        kind, labels = exposed[metric["name"]]
        asked = {matcher.partition("=")[0].strip() for matcher in (metric["matchers"] or "").split(",") if matcher}
        assert asked <= labels, f"{metric['name']} has no {asked - labels}"
        function = WORD.findall(query.text[: metric.start()].removesuffix("("))[-1:]
        ranged = query.text[metric.start() - 1] == "(" and RANGED.get("".join(function))
        assert bool(metric["range"]) == bool(ranged), (
            f"{metric[0]} must be a range vector exactly where one is expected"
        )
        assert kind == (ranged or "gauge"), f"{metric['name']} is a {kind}"


@pytest.mark.parametrize("query", ALL)
def test_a_query_has_the_labels_that_it_shows(query: Query, exposed: dict[str, Exposed]) -> None:
    assert query.shown <= next(operands(query.text, exposed))


@pytest.mark.parametrize("query", ALL)
def test_both_sides_of_an_operator_have_the_same_labels(query: Query, exposed: dict[str, Exposed]) -> None:
    """Or they never match, and the alert never fires."""
    if " on (" not in query.text:
        sides = set(operands(query.text, exposed))
        assert len(sides) == 1, sides


def operands(text: str, exposed: dict[str, Exposed], *, inside: bool = False) -> Iterator[frozenset[str]]:
    """The labels of each one that is no number; `inside` of an aggregation."""
    place = 0
    while place < len(text):
        aggregation, metric = AGGREGATION.search(text, place), METRIC.search(text, place)
        if aggregation is not None and (metric is None or aggregation.start() < metric.start()):
            end = closing(text, aggregation.end() - 1)
            inner = text[aggregation.end() : end]
            by = frozenset(re.findall(r"\w+", aggregation["by"] or ""))
            for labels in operands(inner, exposed, inside=True):
                assert by <= labels, f"{by - labels} is not a label of {inner}"
            if "histogram_quantile" in text[place : aggregation.start()]:
                assert "le" in by and "_bucket" in inner, f"a quantile of {aggregation[0]}{inner}"
                by -= {"le"}
            yield by
            place = end + 1
        elif metric is not None:
            assert inside or "_bucket" not in metric["name"], "sum the buckets before taking a quantile"
            is_recorded = metric["name"].startswith("warmroute_pool:")
            yield exposed[metric["name"]].labels | (frozenset() if is_recorded else OF_TARGET)
            place = metric.end()
        else:
            return


def closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    raise AssertionError(f"{text[opening:]} is not closed")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rate(warmroute_router:nothing_total[5m])", "nothing_total"),
        ("rate(warmroute_router:replica_up[5m])", "is a gauge"),
        ("warmroute_router:faults_total", "is a counter"),
        ("rate(warmroute_router:faults_total)", "must be a range vector"),
        ('warmroute_router:replica_up{model="m"}', "has no"),
        ("sum by (model) (warmroute_router:replica_up)", "is not a label"),
        ("warmroute_router:replica_up / warmroute_router:open_requests", "frozenset"),
        ("sum(warmroute_router:replica_up", "closed|=="),
        ("histogram_quantile(0.9, sum(rate(warmroute_router:request_seconds_bucket[5m])))", "a quantile of"),
    ],
)
def test_a_wrong_query_is_found(text: str, why: str, exposed: dict[str, Exposed]) -> None:
    def check(query: Query) -> None:
        test_a_query_asks_for_what_is_exposed(query, exposed)
        test_both_sides_of_an_operator_have_the_same_labels(query, exposed)

    with pytest.raises(AssertionError, match=why):
        check(Query("planted", text, frozenset()))


# ---- the files


def test_every_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings], rule["alert"]


def test_the_page_lists_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Warmroute\w+)` ", page, re.MULTILINE) == [rule["alert"] for rule in alerts()]


def test_panels_have_a_place_of_their_own_and_a_source_that_can_be_chosen() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        targets = panel.get("targets", [])
        assert len({target["refId"] for target in targets}) == len(targets)
        for source in [panel, *targets] if targets else []:
            assert source["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_variables_are_defined_and_used(exposed: dict[str, Exposed]) -> None:
    text = GRAFANA.read_text()
    defined = json.loads(text)["templating"]["list"]
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == {variable["name"] for variable in defined}
    for variable in defined:
        if variable["type"] == "query":
            [(metric, label)] = re.findall(r"label_values\(([\w:]+), (\w+)\)", variable["definition"])
            assert label in exposed[metric].labels


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here (it comes with Prometheus)")
def test_prometheus_itself_takes_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
