"""Attributes of spans, beside OpenTelemetry's published conventions."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry.semconv import attributes

from router.records.tracing import resource
from tests.router import collector
from tests.router.scripted import COMPLETIONS, MODEL, Call, Script, connect, drops, event, served

DEFINED = re.compile(r'^[A-Z_]+: Final = "([\w.]+)"\n"""\n(.*?)\n"""', re.MULTILINE | re.DOTALL)
GONE = ("Deprecated: Replaced", "Deprecated: Removed", "Deprecated: Obsoleted")  # those of GenAI have only moved


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
