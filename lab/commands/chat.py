"""The command `warmroute chat`."""

import io
import sys

import click

from api.process.options import option
from fleet.commands.addresses.local_routers import locate_router, router_argument
from router.process.setting_types import SECRET


@click.command()
@router_argument
@option("--model", "NAME", "The model.  [default: the only one that is served]")
@option(
    "--api-key", "KEY", "Send this key. Better given as WARMROUTE_API_KEY.", type=SECRET, envvar="WARMROUTE_API_KEY"
)
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
