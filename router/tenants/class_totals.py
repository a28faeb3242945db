"""Counts of the requests of each class of service."""

from msgspec import Struct

from router.placement.classes import ServiceClass


class ClassCounts(Struct):
    answered: int = 0  # whose first token came
    late: int = 0  # of these, those whose first token came later than the class wants
    refused: int = 0  # as it could not be served in time


class ClassTotals:
    def __init__(self) -> None:
        self.by_name: dict[str, ClassCounts] = {}  # empty while there are no classes

    def answered(self, service: ServiceClass, first_token_s: float) -> None:
        counts = self._of(service)
        counts.answered += 1
        counts.late += first_token_s > service.first_token_s

    def refused(self, service: ServiceClass) -> None:
        self._of(service).refused += 1

    def _of(self, service: ServiceClass) -> ClassCounts:
        found = self.by_name.get(service.name)
        if found is None:
            found = self.by_name[service.name] = ClassCounts()
        return found
