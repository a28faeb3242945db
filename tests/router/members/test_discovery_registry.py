"""The fleet's registry over real HTTP: long polls, restarts and nonsense."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.members.discovery.desired import Backoff
from router.members.discovery.registry import RegistryDiscovery
from router.members.spec import Desired
from tests.router.kubernetes_api import following
from tests.router.loopback import Reply, Request, serving, until

MEMBER = {"name": "a", "url": "http://h:1", "incarnation": 7, "draining": False, "model": None, "hat": "new field"}


class FakeRegistry:
    """A registry as docs/discovery.md describes it."""

    def __init__(self, members: list[Any] | None = None, version: int = 1) -> None:
        self.version = version
        self.members = [MEMBER] if members is None else members
        self.status = 200
        self.asked: list[Request] = []
        self._changed = asyncio.Event()

    def change(self, members: list[Any], version: int | None = None) -> None:
        self.members = members
        self.version = self.version + 1 if version is None else version
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request)
        if self.status == 200 and request.query.get("after") == str(self.version):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), float(request.query["wait"]))
        await reply.whole(self.status, {"version": self.version, "members": self.members})


@asynccontextmanager
async def polling(url: str, wait_s: float = 5.0) -> AsyncIterator[tuple[RegistryDiscovery, list[Desired]]]:
    registry = RegistryDiscovery(url, wait_s=wait_s, backoff=Backoff(first_s=0.01, most_s=0.05))
    async with following(registry) as said:
        yield registry, said


async def test_members_are_told_at_once_and_when_they_change() -> None:
    fake = FakeRegistry()
    async with serving(fake.handle) as url, polling(url) as (_, said):
        await until(lambda: said, "the first answer")
        spec = said[0]["a"]
        assert (spec.url, spec.incarnation, spec.draining, spec.model) == ("http://h:1", 7, False, None)
        await until(lambda: len(fake.asked) == 2, "the long poll")
        fake.change([MEMBER | {"draining": True}, {"url": "http://h:2", "incarnation": "x"}])
        await until(lambda: len(said) == 2, "the second answer")
        assert said[1]["a"].draining
        assert said[1]["h:2"].incarnation == "x"
    assert [request.query.get("after") for request in fake.asked][:2] == [None, "1"]
    assert {request.path for request in fake.asked} == {"/members"}


async def test_an_answer_without_news_is_not_told() -> None:
    fake = FakeRegistry()
    async with serving(fake.handle) as url, polling(url, wait_s=0.0) as (_, said):
        await until(lambda: len(fake.asked) >= 3, "it asks again")
    assert len(said) == 1


async def test_a_registry_that_is_gone_changes_nothing_and_one_that_comes_back_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    first = FakeRegistry(version=100)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(first.handle) as url:
            registry, said = await stack.enter_async_context(polling(url))
            await until(lambda: len(first.asked) == 2, "the long poll")
        await until(lambda: registry.problem, "it is missed")
        assert len(said) == 1
        # The new one happens to count up to the same number.
        second = FakeRegistry([{"url": "http://h:2"}], version=100)
        async with serving(second.handle, port=urlsplit(url).port or 0):
            await until(lambda: len(said) == 2, "the second answer")
        assert list(said[1]) == ["h:2"]
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("router.members.discovery")]
    assert "keeping what it named" in messages[0]
    assert messages[1].endswith("can be read again")


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (b"<html>", 200, "its response cannot be read"),
        (b'{"version": 2}', 200, "missing required field `members`"),
        (b'{"version": 2, "members": ' + b"[" * 9_999, 200, "its response cannot be read: maximum recursion depth"),
        (b'{"version": 2, "members": [{"url": "nonsense"}]}', 200, "all its replicas are invalid: url is"),
        (b'{"version": 2, "members": [7]}', 200, "7 is not an object with a url"),
        (b"{}", 503, "status 503"),
    ],
)
async def test_nonsense_keeps_the_members(content: bytes, status: int, why: str) -> None:
    answers = [(200, b'{"version": 1, "members": [{"url": "http://h:1"}]}')]

    async def handle(_: Request, reply: Reply) -> None:
        await reply.whole(*(answers.pop() if answers else (status, content)))

    async with serving(handle) as url, polling(url) as (registry, said):
        await until(lambda: registry.problem, "it is told")
        assert why in str(registry.problem)
        assert [list(wanted) for wanted in said] == [["h:1"]]


async def test_a_member_that_cannot_be_used_keeps_no_other_from_being(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeRegistry()
    async with serving(fake.handle) as url, polling(url) as (registry, said):
        await until(lambda: said, "the first answer")
        twice = {"url": "http://h:9", "name": "b"}
        fake.change([MEMBER | {"url": "nonsense"}, {"url": "http://h:2", "name": "b"}, twice, {"name": "c"}, "d"])
        await until(lambda: len(said) == 2, "the second answer")
        assert {name: spec.url for name, spec in said[1].items()} == {"a": "http://h:1", "b": "http://h:2"}
        assert registry.problem is None
        fake.change([MEMBER | {"url": "nonsense"}, {"name": "c"}])
        await until(lambda: len(said) == 3, "the third answer")
        assert list(said[2]) == ["a"]
    told = [record.getMessage() for record in caplog.records if "has an invalid replica" in record.getMessage()]
    assert len(told) == 4, told
