"""Classes of requests that name an InferenceObjective, by its priority. Only a request without a key can gain by it."""

from collections.abc import Iterable, Mapping

from router.placement.classes import NAMES, USUAL, ServiceClass
from router.tenants.keys import ClassTable, Key

HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")  # of both, the first counts
CLASSES = tuple(ClassTable().service(name) for name in NAMES)


class Priorities:
    """The priorities of all objectives of a pool."""

    def __init__(self) -> None:
        self.of: Mapping[str, int] = {}  # by the objective's name

    def service(
        self, key: Key | None, own: ServiceClass | None, headers: Iterable[tuple[bytes, bytes]]
    ) -> ServiceClass:
        """The class of a request. `own`: what its key and its body make it; None: they know no classes."""
        named = dict(headers)
        objective = next((named[header].decode("latin-1") for header in HEADERS if header in named), "")
        priority = self.of.get(objective, 0)
        if priority < 0:
            return (CLASSES if key is None or not key.classes else key.classes)[-1]
        if priority > 0 and key is None:
            return CLASSES[0]
        return own or CLASSES[NAMES.index(USUAL)]
