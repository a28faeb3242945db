"""Commands that ask a router: `warmroute explain`, `top` and `usage`."""

import json
import sys
from typing import Any, TextIO

import click

from api.process.options import SettingOption
from api.process.settings import FiniteRange
from fleet.commands.addresses.local_routers import (
    admin_key_option,
    json_option,
    locate_router,
    router_argument,
    router_option,
    show,
)

# Each imports its part of router.console, an HTTP client and rich, only when its arguments have been read.


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

    from router.console.explain import ask, draw

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


@click.command()
@router_argument
@admin_key_option
@click.option(
    "--from", "first", metavar="DAY", help="The first day, such as 2026-01-31.  [default: 29 days before --to]"
)
@click.option("--to", "last", metavar="DAY", help="The last day.  [default: today, UTC]")
@click.option("--key", metavar="NAME", help="Only this key.")
@click.option("--model", metavar="NAME", help="Only this model.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def usage(
    which: str | None,
    admin_key: str | None,
    first: str | None,
    last: str | None,
    key: str | None,
    model: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show how many requests and tokens each API key has used, by day and model, and what the cache has saved.

    With a key that is not an administrator's, it shows that key's own usage.

    \b
    Examples:
      warmroute usage
      warmroute usage --from 2026-01-01 --to 2026-01-31 --csv > january.csv
      warmroute usage 10.0.0.9:8000 --key alice --json
    """
    from router.console.usage import ask, draw

    wanted = {"from": first, "to": last, "key": key, "model": model, "format": "csv" if as_csv else "json"}
    answer = ask(locate_router(which), {name: value for name, value in wanted.items() if value is not None}, admin_key)
    if as_csv:
        click.echo(answer.decode(), nl=False)
    else:
        show(answer, as_json, draw)


@click.command()
@router_argument
@admin_key_option
@click.option(
    "--interval",
    "interval_s",
    cls=SettingOption,
    type=FiniteRange(min=0.2, max=3600),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="How often to poll the router; less often if its answers take long.",
)
@click.option("--once", "only_once", is_flag=True, help="Print one frame and end.")
def top(which: str | None, admin_key: str | None, interval_s: float, only_once: bool) -> None:
    """Watch a router: its replicas, their event streams, and decisions with their reasons.

    Press ? for the keys. Enter shows a row's details. If the router does not answer, the last figures stay, marked as
    old.

    \b
    Examples:
      warmroute top
      warmroute top 10.0.0.9:8000 --interval 5
      warmroute top --once | grep down
    """
    from router.console.top.app import once, watch

    if only_once:
        once(locate_router(which), admin_key, sys.stdout)
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout)):
        raise click.UsageError("the live view needs a terminal; use --once to print a single frame")
    watch(locate_router(which), admin_key, interval_s)
