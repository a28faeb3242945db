"""The collector of traces and metrics, and the description of this process that both carry."""

import os
from importlib.metadata import version
from uuid import uuid4

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

TRACES_PATH, METRICS_PATH = "/v1/traces", "/v1/metrics"
EXPORT_LIMIT_S = 5.0
CLOSE_LIMIT_S = 2.0  # the time for the last spans and metrics; a lost collector must not delay the end
INSTANCE = "service.instance.id"


def is_sent(signal: str) -> bool:
    """Return whether OpenTelemetry's own variables leave `TRACES` or `METRICS` switched on."""
    if _value_of("OTEL_SDK_DISABLED") == "true":
        return False
    return _value_of(f"OTEL_{signal}_EXPORTER") != "none"


def _value_of(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


class Collector:
    def __init__(self, endpoint: str, worker: int | None = None) -> None:
        """`worker`: the number of this process if it is one of several."""
        self._base = endpoint.rstrip("/").removesuffix(TRACES_PATH).removesuffix(METRICS_PATH)
        self.resource = resource(worker)
        self.scope = InstrumentationScope("warmroute.router", version("warmroute"))

    def url(self, path: str) -> str:
        return self._base + path


def resource(worker: int | None) -> Resource:
    """Describe this process; the environment's names win, and each worker gets an instance of its own."""
    named = OTELResourceDetector().detect().attributes
    instance = str(named.get(INSTANCE) or uuid4())
    if INSTANCE in named and worker is not None:
        instance = f"{instance}-{worker}"
    usual = {"service.name": "warmroute-router", "service.version": version("warmroute")}
    return Resource.create({**usual, **named, INSTANCE: instance})
