"""`warmroute router` and the commands that ask one. The router's options are the rows of `router.settings`."""

import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

import click

from api.lifeline import die_with_parent, parent_pid
from api.options import SettingOption, SettingsCommand
from api.settings import FiniteRange
from router.config import RouterConfig
from router.configure import config_from
from router.settings import SECRET, TABLE, URL


@click.command(cls=SettingsCommand, table=TABLE)
@click.pass_context
def router(ctx: click.Context, /, **_: object) -> int:
    """Answer the OpenAI API from many replicas; send each request to a warm cache with a short queue.

    Every option is also an environment variable, and a key of the --config file: --replica-limit is
    WARMROUTE_REPLICA_LIMIT there and replica_limit here. The command line wins over the environment, the environment
    over the file. Repeatable options are lists in the file, and separated by spaces in the
    environment.

    \b
    Examples:
      warmroute router --replica http://10.0.0.1:8001 --replica http://10.0.0.2:8001
      warmroute router --model-dir my-model=path/to/model \\
        --replica url=http://10.0.0.1:8000,engine=vllm,events=tcp://10.0.0.1:5557
      warmroute router --replicas-file replicas.toml --api-keys keys.toml --host 0.0.0.0
      warmroute router --kubernetes-service vllm --host 0.0.0.0
      warmroute router --kubernetes-pods app=vllm --host 0.0.0.0
      WARMROUTE_API_KEY=secret warmroute router --config router.toml

    SIGTERM and Ctrl-C let running requests finish, for as long as --drain-timeout says; a second one ends them.
    Exit status: 0 ended as asked, 1 could not start, 2 invalid setting.
    """
    config = config_from(ctx)
    if config.die_with_parent:
        die_with_parent(parent_pid())
    if not names_replicas(config):
        click.echo("Note: there are no replicas yet; give --replica, or add some with POST /replicas", err=True)
    from router.server import serve  # a web framework: not needed to refuse a setting

    return serve(config)


def names_replicas(config: RouterConfig) -> bool:
    return bool(config.replicas or config.replicas_file or config.registry or config.kubernetes)


router_option = click.option(
    "--router",
    "router_url",
    cls=SettingOption,
    type=URL,
    metavar="URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar="WARMROUTE_ROUTER",
    help="Where the router listens.",
)
admin_key_option = click.option(
    "--admin-key",
    cls=SettingOption,
    type=SECRET,
    metavar="KEY",
    envvar="WARMROUTE_ADMIN_KEY",
    help="The router's admin key, if it has one. Better given as WARMROUTE_ADMIN_KEY.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Show the router's answer as it is.")


def _show(answer: bytes, as_json: bool, draw: Callable[[bytes, TextIO], None]) -> None:
    if as_json:
        click.echo(answer.decode(errors="replace"))
    else:
        draw(answer, sys.stdout)


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
    prompt: str | None, chat: TextIO | None, model: str | None, router_url: str, admin_key: str | None, as_json: bool
) -> None:
    """Show where a router would send a request now, and why: block by block, replica by replica.

    It sends nothing to a replica, and the router remembers nothing.

    \b
    Examples:
      warmroute explain "Once upon a time"
      warmroute explain --chat request.json --router http://10.0.0.9:8000
      curl ... | warmroute explain --chat - --json
    """
    if (prompt is None) == (chat is None):
        raise click.UsageError("give either a PROMPT or --chat FILE")
    fields: dict[str, Any] = {"prompt": prompt} if chat is None else chat_fields(chat)
    if model is not None:
        fields["model"] = model

    from router.explain import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    _show(ask(router_url, fields, admin_key), as_json, draw)


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
@router_option
@admin_key_option
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of prefixes to show: those that save most, and the prefixes before them.",
)
@json_option
def prefixes(router_url: str, admin_key: str | None, limit: int, as_json: bool) -> None:
    """Show the prefixes that recent prompts share, and the replicas that hold them.

    Each line is a prefix of two or more prompts; indented lines continue it. Texts are shown if clients
    have no keys, or if the router was started with --show-prompts.

    \b
    Examples:
      warmroute prefixes
      warmroute prefixes --limit 100 --router http://10.0.0.9:8000
      warmroute prefixes --json | python -m json.tool
    """
    from router.prompts.prefixes.draw import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    _show(ask(router_url, limit, admin_key), as_json, draw)


@click.command()
@router_option
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
    router_url: str,
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
      warmroute usage --key alice --json --router http://10.0.0.9:8000
    """
    from router.tenants.draw import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    wanted = {"from": first, "to": last, "key": key, "model": model, "format": "csv" if as_csv else "json"}
    answer = ask(router_url, {name: value for name, value in wanted.items() if value is not None}, admin_key)
    if as_csv:
        click.echo(answer.decode(), nl=False)
    else:
        _show(answer, as_json, draw)


@click.command()
@router_option
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
@click.option("--once", "only_once", is_flag=True, help="Print one frame and end; rates are between two polls.")
def top(router_url: str, admin_key: str | None, interval_s: float, only_once: bool) -> None:
    """Watch a router: its replicas, their event streams, shared prefixes, and decisions with their reasons.

    Press ? for the keys. Enter shows a row's details; d drains a replica, after a question. If the router does not
    answer, the last figures stay, marked as old.

    \b
    Examples:
      warmroute top
      warmroute top --router http://10.0.0.9:8000 --interval 5
      warmroute top --once | grep down
    """
    import asyncio

    if only_once:
        from router.top.once import once  # an HTTP client and rich: not needed to refuse arguments

        asyncio.run(once(router_url, admin_key, interval_s, sys.stdout))
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # it is drawn on stderr
        raise click.UsageError("the live view needs a terminal; use --once to print a single frame")
    from router.top.app import top as live  # a terminal's application framework

    asyncio.run(live(router_url, admin_key, interval_s))
