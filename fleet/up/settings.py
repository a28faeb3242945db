"""The settings of `warmroute up`."""

from typing import NamedTuple

FLEET_KEY = "WARMROUTE_FLEET_KEY"


class Settings(NamedTuple):
    """The command line's settings beside the plan."""

    host: str
    port: int
    ray: bool
    address: str | None
    namespace: str
    controller_port: int
    router: bool
    follow: bool
    log_dir: str | None
