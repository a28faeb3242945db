"""The fixtures of the tests' own conftest, and what importing it sets up."""

from tests.conftest import demo_cache, smollm2

__all__ = ["demo_cache", "smollm2"]
