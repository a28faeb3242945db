"""The commands `warmroute chat` and `warmroute demo`."""

import io
import sys
from contextlib import ExitStack

import click

from api.process.options import option
from fleet.commands.addresses.local_fleets import find, fleet_argument, running_fleets
from fleet.commands.addresses.local_routers import locate_router, router_argument
from fleet.commands.client import FleetClient
from router.process.setting_types import SECRET

KEY = option(
    "--api-key", "KEY", "Send this key. Better given as WARMROUTE_API_KEY.", type=SECRET, envvar="WARMROUTE_API_KEY"
)


@click.command()
@router_argument
@option("--model", "NAME", "The model.  [default: the only one that is served]")
@KEY
def chat(which: str | None, model: str | None, api_key: str | None) -> None:
    """Talk to a model in the terminal: the answer streams, and a line tells what of the prompt was cached, and where.

    ROUTER is the one on this machine if it is not given. It may also be a replica, or any other endpoint of the OpenAI
    API, with or without /v1. In a pipe, each line is a question, and nothing but the answers is printed.

    \b
    Examples:
      warmroute chat
      warmroute chat 8000
      warmroute chat http://10.0.0.1:8000/v1 --model smollm2
      printf '/file guide.txt\\nWho built it?\\n' | warmroute chat

    /help lists what else can be typed: /file FILE puts a document in front, /new begins again. Ctrl-C ends an answer.
    Exit status: 0 ended as asked, 1 the endpoint cannot be asked, 2 a value cannot be used.
    """
    from lab.bench.probe import target_of  # it brings an HTTP client, which is not needed to refuse arguments
    from lab.chat.answers import Place, find_model
    from lab.chat.conversation import Conversation, piped, typed

    target = target_of(locate_router(which))
    place = Place(target, model or find_model(target, api_key), api_key)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(place, decorated=is_terminal)
    if not is_terminal:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        for line in piped():
            conversation.take(line)
        return
    conversation.say(f"{place.model} at {target.url}. /help lists what else can be typed.")
    for line in typed():
        try:
            conversation.take(line)
        except click.ClickException as error:
            error.show()


@click.command()
@fleet_argument
@KEY
def demo(which: str | None, fleet_key: str | None, api_key: str | None) -> None:
    """Show what a warm cache saves, and what becomes of an answer whose replica is killed.

    It asks three questions about a document of some 4,000 tokens: the first one is cold, the others are warm. Then it
    kills the replica that is answering a fourth one, and another replica goes on. If no fleet runs on this machine, two
    replicas are started for it, and ended with it. In one that runs already, a replica is killed only if you name the
    FLEET or agree, and only one of smollm2 or demo: it is started again within seconds.

    \b
    Examples:
      warmroute demo
      warmroute demo 8000

    Exit status: 0 shown, 1 something cannot be started or asked, 2 a value cannot be used.
    """
    from lab.bench.probe import target_of  # HTTP clients: not needed to refuse arguments
    from lab.chat.answers import Place
    from lab.chat.scenes import KILLABLE, Demonstration, own_fleet

    with ExitStack() as stack:
        if which is None and not running_fleets():
            local, kills = stack.enter_context(own_fleet()), True
        else:
            found = find(which).local
            if found is None:
                raise click.UsageError(
                    f"{which} is not on this machine, where a replica can be killed; name one that is"
                )
            local, kills = found, which is not None
            if not kills and sys.stdin.isatty():
                kills = click.confirm(f"May a replica of the fleet at port {local.port} be killed?", True)
        fleet = stack.enter_context(FleetClient(local.controller, fleet_key or local.key))
        models = sorted(fleet.view().models, key=lambda model: model.name not in KILLABLE)
        if not models:
            raise click.ClickException(
                f"the fleet at port {local.port} serves no model; end it, and one is started here"
            )
        place = Place(target_of(local.router_url), models[0].serves or models[0].name, api_key)
        Demonstration(place, fleet, kills=kills).run()
