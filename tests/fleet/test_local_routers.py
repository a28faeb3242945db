"""Commands that ask a router: it is an argument or an option, in every form, or the only one on this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from fleet.cli import COMMANDS
from fleet.commands.addresses import local_routers
from fleet.commands.addresses.address import Address
from fleet.commands.addresses.local_fleets import record_fleet
from fleet.commands.router import usage
from fleet.up.starting import bind
from fleet.up.telling import url_here
from lab.commands.bench import bench
from lab.commands.doctor import doctor
from tests.fleet.scripted import Ran, machine_without_fleets, run
from tests.fleet.test_local_fleets import fleet_of
from tests.router.scripted import named, refused_port, served

WITH_ARGUMENT = dict.fromkeys(("bench", "chat", "doctor", "top", "usage"), "router")
WITH_ARGUMENT |= dict.fromkeys(("demo", "down", "status"), "fleet")
WITH_OPTION = {"explain": "router"} | dict.fromkeys(("drain", "logs", "restart", "scale"), "fleet")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_without_fleets(tmp_path, monkeypatch)
    monkeypatch.delenv("WARMROUTE_ROUTER", raising=False)
    monkeypatch.setattr(local_routers, "DEFAULT", url_of(refused_port()))


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def record(port: int, **more: Any) -> None:
    record_fleet(fleet_of(port=port, controller="http://127.0.0.1:9", **more))


@asynccontextmanager
async def routing(monkeypatch: pytest.MonkeyPatch, *, by_default: bool = True) -> AsyncIterator[int]:
    """Serve a router, at the default address unless told otherwise."""
    async with served(named("a")) as running:
        if by_default:
            monkeypatch.setattr(local_routers, "DEFAULT", url_of(running.port))
        yield running.port


async def asked(*arguments: str, **environment: str) -> Ran:
    return await asyncio.to_thread(run, usage, *arguments, "--json", **environment)


def complaint(command: click.Command, *arguments: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        command.main(list(arguments), f"warmroute {command.name}", standalone_mode=False)
    return caught.value.format_message()


# ---- named


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("9000", "http://127.0.0.1:9000"),
        ("10.0.0.9:8000", "http://10.0.0.9:8000"),
        ("router.example:80", "http://router.example:80"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost:8000/v1", "http://localhost:8000"),
        ("https://router.example/", "https://router.example"),
    ],
)
def test_an_address_is_a_url_a_host_with_a_port_or_a_port(given: str, url: str) -> None:
    assert Address().convert(given, None, None) == url


@pytest.mark.parametrize("given", ["", "0", "65536", "here", "here:", "here:x", "::1", ":80", "user@here:80", "²"])
def test_another_word_is_no_address(given: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write 8000, HOST:8000|write http://HOST:PORT|leave the setting"):
        Address().convert(given, None, None)


@pytest.mark.parametrize("form", ["{port}", "127.0.0.1:{port}", "http://127.0.0.1:{port}"])
async def test_each_form_works_as_argument_and_as_option(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(monkeypatch, by_default=False) as port:
        address = form.format(port=port)
        for arguments in ([address], ["--router", address]):
            ran = await asked(*arguments)
            assert (ran.status, ran.errors) == (0, ""), arguments
        assert (await asked(WARMROUTE_ROUTER=address)).status == 0
        assert (await asked(address, WARMROUTE_ROUTER="127.0.0.1:1")).status == 0


def test_a_router_is_named_once() -> None:
    assert complaint(usage, "8000", "--router", "9000") == (
        "ROUTER and --router name the same thing; leave one of them out"
    )


@pytest.mark.parametrize("name", [*WITH_ARGUMENT, *WITH_OPTION])
def test_every_command_takes_its_router_or_fleet_in_the_same_way(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(__import__(module, fromlist=[attribute]), attribute)
    arguments = [param.name for param in command.params if isinstance(param, click.Argument)]
    options = {flag for param in command.params if isinstance(param, click.Option) for flag in param.opts}
    if name in WITH_ARGUMENT:
        assert arguments[0] == WITH_ARGUMENT[name]
    assert f"--{(WITH_ARGUMENT | WITH_OPTION)[name]}" in options


# ---- found


async def test_a_router_at_the_default_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(monkeypatch):
        assert (await asked()).status == 0


async def test_the_router_of_the_only_fleet_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(monkeypatch, by_default=False) as port:
        record(port, router=url_of(port))
        assert (await asked()).status == 0


def test_several_routers_are_listed_with_what_to_type() -> None:
    record(9000)
    record(9001, router="http://10.0.0.5:9001")
    assert complaint(usage) == (
        "2 routers run on this machine: http://127.0.0.1:9000, http://10.0.0.5:9001; name one: `warmroute usage 9000`"
    )


@pytest.mark.parametrize(("command", "status"), [(usage, 1), (bench, 1), (doctor, 2)])
def test_without_any_router_the_default_port_is_asked(command: click.Command, status: int) -> None:
    ran = run(command)
    assert ran.status == status
    assert local_routers.DEFAULT in ran.errors, ran.errors


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_fleets_router_is_recorded_as_clients_here_reach_it(host: str) -> None:
    with bind(host, 0) as listener:
        assert url_here(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
