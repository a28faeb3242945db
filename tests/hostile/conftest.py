"""The router runs on uvloop, and so does what attacks it."""

from tests.router.http.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
