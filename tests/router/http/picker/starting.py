"""A router that starts processes while a gateway asks it, in the loop that the command runs in."""

import asyncio

import uvloop

from tests.router.http.picker.asking import Gateway, asked, gateway
from tests.router.scripted import named, served

REQUESTS = 40


async def ask(asking: Gateway) -> None:
    for _ in range(REQUESTS):
        stream = asking.stream()
        await stream.begin(asked())
        await stream.picked()
        await stream.answer()


async def start_processes() -> set[int]:
    """The exit codes of those that end at once."""
    codes: set[int] = set()
    async with served(named("one"), picker_listen="127.0.0.1:0") as running, gateway(running) as asking:
        clients = asyncio.create_task(ask(asking))
        while not clients.done():
            process = await asyncio.create_subprocess_exec("true", start_new_session=True)
            codes.add(await process.wait())
        await clients
    return codes


def main() -> None:
    print(uvloop.run(start_processes()))
