"""`warmroute explain`: where a request would go."""

import json
from typing import Any, TextIO

import click

from fleet.commands.addresses.local_routers import admin_key_option, json_option, locate_router, router_option, show


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--chat",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="A request in JSON: a chat, messages, a response, or a list of a chat's messages; -: stdin.",
)
@click.option("--model", metavar="NAME", help="The model.  [default: the one in FILE, or the only one served]")
@router_option
@admin_key_option
@json_option
def explain(
    prompt: str | None, chat: TextIO | None, model: str | None, which: str | None, admin_key: str | None, as_json: bool
) -> None:
    """Show where a router would send a request now, and why: block by block, replica by replica.

    It sends nothing to a replica, and the router remembers nothing.

    \b
    Examples:
      warmroute explain "Once upon a time"
      warmroute explain --chat request.json --router 10.0.0.9:8000
      curl ... | warmroute explain --chat - --json
    """
    if (prompt is None) == (chat is None):
        raise click.UsageError("give either a PROMPT or --chat FILE")
    fields: dict[str, Any] = {"prompt": prompt} if chat is None else chat_fields(chat)
    if model is not None:
        fields["model"] = model

    from router.console.explain import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    show(ask(locate_router(which), fields, admin_key), as_json, draw)


def chat_fields(file: TextIO) -> dict[str, Any]:
    try:
        content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--chat: {file.name} is not JSON: {error}") from error
    if isinstance(content, list):
        return {"messages": content}
    if not isinstance(content, dict) or not (isinstance(content.get("messages"), list) or "input" in content):
        raise click.UsageError(f'--chat: {file.name} is not a chat request; write {{"messages": [...]}}')
    return content
