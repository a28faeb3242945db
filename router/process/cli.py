"""`warmroute router`, and `warmroute picker`, which is one. Their options are the rows of `router.process.settings`."""

import click

from api.process.lifeline import die_with_parent, parent_pid
from api.process.options import SettingsCommand
from router.process.configure import config_from
from router.process.settings import PICKER_TABLE, TABLE


@click.command(cls=SettingsCommand, table=TABLE)
@click.pass_context
def router(ctx: click.Context, /, **_: object) -> int:
    """Answer the OpenAI API from many replicas; send each request to a warm cache with a short queue.

    Every setting is also an environment variable, and a key of the --config file: --replica-limit is
    WARMROUTE_REPLICA_LIMIT there and replica_limit here. The command line wins over the environment, the environment
    over the file. Repeatable settings are lists in the file, and separated by spaces in the environment. Those that few
    change have no option; --set gives them.

    \b
    Examples:
      warmroute router --replica http://10.0.0.1:8001 --replica http://10.0.0.2:8001
      warmroute router --model-dir my-model=path/to/model \\
        --replica url=http://10.0.0.1:8000,engine=vllm,events=tcp://10.0.0.1:5557
      warmroute router --replicas-file replicas.toml --api-keys keys.toml --host 0.0.0.0
      warmroute router --kubernetes-pods app=vllm --host 0.0.0.0
      WARMROUTE_API_KEY=secret warmroute router --config router.toml

    SIGTERM and Ctrl-C let running requests finish, for as long as --drain-timeout says; a second one ends them.
    Exit status: 0 ended as asked, 1 could not start, 2 invalid setting.
    """
    return _run(ctx)


@click.command(cls=SettingsCommand, table=PICKER_TABLE)
@click.pass_context
def picker(ctx: click.Context, /, **_: object) -> int:
    """Pick the replica of each request that a gateway forwards: Envoy, or one of the Inference Extension.

    This is `warmroute router` with --picker-listen 127.0.0.1:9002, and has all of its settings: it answers HTTP, too.

    \b
    Examples:
      warmroute picker --replica http://10.0.0.1:8001 --replica http://10.0.0.2:8001
      warmroute picker --kubernetes-pool vllm --picker-listen 0.0.0.0:9002 --host 0.0.0.0

    Exit status: 0 ended as asked, 1 could not start, 2 invalid setting.
    """
    return _run(ctx)


def _run(ctx: click.Context) -> int:
    config = config_from(ctx)
    if config.die_with_parent:
        die_with_parent(parent_pid())
    if not (config.replicas or config.replicas_file or config.registry or config.kubernetes):
        click.echo("Note: there are no replicas yet; give --replica, or add some with POST /replicas", err=True)
    from router.process.server import serve  # a web framework: not needed to refuse a setting

    return serve(config)
