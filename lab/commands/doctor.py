"""`warmroute doctor`: diagnose a running router and its replicas."""

import click

from api.process.options import SettingOption, option
from api.process.settings import FiniteRange
from fleet.commands.addresses.local_routers import admin_key_option, locate_router, router_argument
from fleet.display import progress
from lab.doctor.asking import Asking, watched
from lab.doctor.comparing import figures_of
from lab.doctor.report import as_json as in_json
from lab.doctor.report import lines
from router.dashboard.doctor.rules import findings
from router.process.setting_types import SECRET, URL


class DoctorFailed(click.ClickException):
    exit_code = 2  # 1: there are findings


@click.command()
@router_argument
@option(
    "--replica",
    "URL",
    "A replica without a router, or beside a ROUTER with a key for its metrics. May be repeated.",
    name="replica_urls",
    type=URL,
    multiple=True,
)
@admin_key_option
@click.option(
    "--api-key",
    cls=SettingOption,
    type=SECRET,
    metavar="KEY",
    envvar="WARMROUTE_API_KEY",
    help="The key for --replica, and for the router without an --admin-key. Better given as WARMROUTE_API_KEY.",
)
@option(
    "--for",
    "SECONDS",
    "How long to watch.",
    name="for_s",
    type=FiniteRange(min=0.5, max=3600),
    default=10.0,
    show_default="10",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with all figures.")
def doctor(
    which: str | None,
    replica_urls: tuple[str, ...],
    admin_key: str | None,
    api_key: str | None,
    for_s: float,
    as_json: bool,
) -> int:
    """Diagnose a router and its replicas from their live metrics, and name the setting to change.

    It reads the metrics of the router and its replicas twice, some seconds apart, and judges what
    happened in between, so run it during traffic. Replicas without readable metrics are judged by the router's
    data alone. vLLM and SGLang work, too. It changes nothing, and sends nothing to a model.

    Each finding has a section in docs/troubleshooting.md.

    \b
    Examples:
      warmroute doctor
      warmroute doctor 10.0.0.9:8000 --for 60
      warmroute doctor --replica http://10.0.0.1:8001 --json

    Exit status: 0 nothing is wrong, 1 there are findings, 2 no answer, or an invalid value.
    """
    try:
        router_url = None if which is None and replica_urls else locate_router(which)
        with (
            Asking(router_url, replica_urls, admin_key or api_key, api_key) as asking,
            progress("looking, s", int(for_s)) as tell,
        ):
            looks = watched(asking, for_s, tell)
    except click.ClickException as error:
        raise DoctorFailed(error.format_message()) from error
    figures = figures_of(*looks)
    found = findings(figures)
    click.echo(in_json(figures, found) if as_json else "\n".join(lines(figures, found)))
    return 1 if found else 0
