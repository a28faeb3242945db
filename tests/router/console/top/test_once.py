"""`warmroute top --once`, and the command's messages if there is nothing to show."""

import asyncio
import re

import pytest
from click.testing import CliRunner, Result

from fleet.commands.router import top
from router.tenants.keys import keys_from_options
from tests.router.scripted import CHAT, Script, chat, connect, named, refused_port, says, served

GOOD = b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'
DEADLINE_S = 50.0


async def frame(port: int, *arguments: str, **environment: str) -> Result:
    options = ["--once", "--interval", "0.2", "--router", f"http://127.0.0.1:{port}", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, top, options, env={"COLUMNS": "80"} | environment)


async def test_one_frame_is_plain_text_in_eighty_columns() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running, connect(running.port) as client:
        for _ in range(2):
            await client.post(CHAT, chat("Why? " * 300))
        result = await frame(running.port)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"http://127.0.0.1:{running.port}  2 replicas: 2 approximate"
    assert max(map(len, lines[3:])) <= 80 and "\x1b" not in result.stdout
    assert [line.split()[0] for line in lines if line.startswith("r0")] == ["r0"]
    assert "its turn" in result.stdout
    assert re.match(r"req/s [\d.]+  ", lines[1])  # one look is enough


async def test_a_wide_frame_says_more() -> None:
    async with served(named("a")) as running:
        running.member("a").health.drain()
        narrow, wide = await frame(running.port), await frame(running.port, COLUMNS="160")
    assert "can/s" not in narrow.stdout and "can/s" in wide.stdout
    assert "No decisions yet." in narrow.stdout


async def test_the_admin_key_comes_from_the_option_or_the_environment() -> None:
    keys = tuple(keys_from_options(["user"], "root"))
    async with served(named("a"), keys=keys, demand_key=True) as running:
        missing, user = await frame(running.port), await frame(running.port, "--admin-key", "user")
        admin = await frame(running.port, WARMROUTE_ADMIN_KEY="root")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("Error: the router says: the API key is missing or wrong")
    assert missing.stderr.endswith("see --admin-key or WARMROUTE_ADMIN_KEY\n")
    assert user.exit_code == 0 and "1 replica: 1 approximate" in user.stdout
    assert user.stdout.count("needs the admin key") == 1
    assert admin.exit_code == 0 and "admin key" not in admin.stdout


async def test_a_missing_router_is_reported_in_one_line() -> None:
    result = await frame(refused_port())
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("Error: no router answers at http://127.0.0.1:")
    assert result.stderr.endswith("; see --router\n") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the live view needs a terminal; use --once to print a single frame"),
        (["--interval", "0.1"], "0.1 is not in the range 0.2<=x<=3600"),
        (["--interval", "nan"], "nan is not a finite number"),
        (["--router", "here"], "'here' is not an address; write 8000, HOST:8000 or http://HOST:8000."),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(top, arguments)
    assert result.exit_code == 2 and said in result.stderr
