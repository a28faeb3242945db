"""`warmroute usage`: the tokens that each API key has used."""

import click

from fleet.commands.addresses.local_routers import admin_key_option, json_option, locate_router, router_argument, show


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
    from router.console.usage import ask, draw  # an HTTP client and rich: not needed to refuse arguments

    wanted = {"from": first, "to": last, "key": key, "model": model, "format": "csv" if as_csv else "json"}
    answer = ask(locate_router(which), {name: value for name, value in wanted.items() if value is not None}, admin_key)
    if as_csv:
        click.echo(answer.decode(), nl=False)
    else:
        show(answer, as_json, draw)
