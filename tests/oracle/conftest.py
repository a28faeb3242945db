"""Says which vectors a run of the oracle used."""

from tests.oracle.vectors import VECTORS


def pytest_report_header() -> str:
    return f"vectors: {VECTORS.resolve()}"
