"""The metrics of several workers as one text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.http.one_answer import metrics_of_all


def metrics_of(number: int) -> bytes:
    registry = CollectorRegistry()
    Counter("requests", "Requests, by {status}.", ["status"], registry=registry).labels("200").inc(number)
    Gauge("open", "Open ones.", registry=registry).set(number)
    Histogram("seconds", "How long.", ["path"], registry=registry, buckets=(1, 2)).labels('/"a"{b} c').observe(number)
    return generate_latest(registry)


def test_each_sample_is_there_with_its_worker_and_each_family_once() -> None:
    texts = {number: metrics_of(number) for number in (1, 0)}
    whole = metrics_of_all(b"", texts).decode()
    families = list(text_string_to_metric_families(whole))
    assert len({one.name for one in families}) == len(families)
    expected = {
        (sample.name, (("worker", str(number)), *sample.labels.items()), sample.value)
        for number, text in texts.items()
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    found = {(one.name, tuple(one.labels.items()), one.value) for family in families for one in family.samples}
    assert found == expected


def test_a_metric_that_only_one_worker_has_is_there() -> None:
    registry = CollectorRegistry()
    Gauge("rare", "Only here.", registry=registry).set(5)
    whole = metrics_of_all(b"", {0: metrics_of(0), 1: generate_latest(registry)})
    assert b'\nrare{worker="1"} 5.0\n' in whole
