"""Names, units, kinds and attributes of metrics and spans, beside OpenTelemetry's published conventions."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.semconv import attributes
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from router.records.genai_metrics import GenaiMetrics, Instrument, Labels
from router.records.otlp import resource
from tests.router import collector
from tests.router.scripted import COMPLETIONS, MODEL, Call, Script, connect, drops, event, served

DEFINED = re.compile(r'^[A-Z_]+: Final = "([\w.]+)"\n"""\n(.*?)\n"""', re.MULTILINE | re.DOTALL)
GONE = ("Deprecated: Replaced", "Deprecated: Removed", "Deprecated: Obsoleted")  # those of GenAI have only moved
MODALITY = "gen_ai.token.modality"  # of the conventions that are to come, as the counter of cached tokens
SECONDS = tuple(round(0.01 * 2**power, 2) for power in range(14))
BOUNDS = {  # as the conventions' text gives them
    "gen_ai.client.operation.duration": SECONDS,
    "gen_ai.server.request.duration": SECONDS,
    "gen_ai.client.token.usage": tuple(4**power for power in range(14)),
    "gen_ai.server.time_per_output_token": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "gen_ai.server.time_to_first_token": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
}


def published() -> Iterator[str]:
    """Yield the names of all attributes, without those that others have replaced."""
    incubating = import_module("opentelemetry.semconv._incubating.attributes")
    for package in (attributes, incubating):
        for module in iter_modules(package.__path__, package.__name__ + "."):
            text = Path(import_module(module.name).__file__ or "").read_text()
            yield from (name for name, says in DEFINED.findall(text) if not says.startswith(GONE))


def native(call: Call) -> None:
    call.begin_frames(x_warmroute_cached_tokens="4")
    call.frame(event("one"), 1, 2)
    call.end()


def histogram(name: str) -> Histogram:
    """The instrument that the conventions' own package makes."""
    meter = MeterProvider().get_meter("test")
    made = getattr(gen_ai_metrics, "create_" + name.replace(".", "_"))(meter)
    assert isinstance(made, Histogram) and made.name == name
    return made


@pytest.mark.parametrize("ours", [one for one in GenaiMetrics() if one.bounds], ids=lambda one: one.name)
def test_a_metric_is_the_one_that_the_conventions_describe(ours: Instrument) -> None:
    theirs = histogram(ours.name)
    assert (ours.unit, ours.description) == (theirs.unit, theirs.description)
    assert ours.bounds == BOUNDS[ours.name]


def test_the_counter_is_named_after_the_attribute_of_spans() -> None:
    [ours] = [one for one in GenaiMetrics() if not one.bounds]
    assert ours.name == gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS.replace(
        "gen_ai.", "gen_ai.client.inference."
    )
    assert ours.unit == "{token}"


def test_the_page_lists_every_metric() -> None:
    page = Path(__file__).parents[3] / "docs" / "monitoring.md"
    listed = re.findall(r"^\| `(gen_ai\S+)` \| (\w+), `(\S+)` \|", page.read_text(), re.MULTILINE)
    assert listed == [(one.name, "histogram" if one.bounds else "counter", one.unit) for one in GenaiMetrics()]


def test_attributes_of_metrics_are_published() -> None:
    failed, answered = Labels("chat", "m", "500", "h", 1), Labels("chat", "m", None, "h", 1, "input", "text")
    assert (failed.attributes() | answered.attributes()).keys() - set(published()) == {MODALITY}
    types = {one.value for one in gen_ai_attributes.GenAiTokenTypeValues}
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert {"input", "output"} <= types and {"chat", "text_completion"} <= operations


async def test_attributes_of_spans_and_of_the_process_are_published() -> None:
    with collector.collecting() as running_collector:
        replicas = Script(drops, native).replicas(2, native=True)
        async with served(*replicas, otlp_endpoint=running_collector.url) as running, connect(running.port) as client:
            await client.post(COMPLETIONS, {"model": MODEL, "prompt": "hello", "stream": True})
    request, lost, done = running_collector.spans
    found = {key for span in (request, lost, done) for key in collector.attributes(span)} | resource(
        None
    ).attributes.keys()
    ours = {key for key in found if key.startswith("warmroute.")}
    assert "gen_ai.usage.output_tokens" in found and "error.type" in found and "warmroute.replica" in ours
    assert found - ours - set(published()) == set()
    for span in (request, lost, done):  # required of each
        assert {"gen_ai.operation.name", "gen_ai.provider.name"} <= collector.attributes(span).keys()
