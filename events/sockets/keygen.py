"""`warmroute events keygen`."""

import click

from events.sockets.curve import write_keys


@click.command()
@click.argument("name")
def keygen(name: str) -> None:
    """Write a pair of CURVE keys: NAME.key, to give away, and NAME.key_secret, to keep.

    Both ends of an encrypted stream have a pair. The engine is given its own secret key and a folder with the public
    keys of the clients it lets in; a client is given its own secret key and the engine's public one.

    \b
    Examples:
      warmroute events keygen engine
      warmroute events keygen me
      warmroute events tail tcp://engine:5557 --curve-server engine.key --curve-secret me.key_secret
    """
    try:
        public, secret = write_keys(name)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{public}   public: give it to the other side")
    click.echo(f"{secret}   secret: keep it, readable by you alone")
