"""The messages between `warmroute up` and its launcher, one JSON line each. New fields go last, with a default."""

import msgspec
from msgspec import Struct

from fleet.on_ray.settings import NAMESPACE
from fleet.plan import FleetPlan


class Order(Struct, frozen=True, kw_only=True):
    plan: FleetPlan
    key: str  # the key for changing the fleet
    address: str | None = None  # the Ray to join; None: one of our own on this machine
    namespace: str = NAMESPACE
    port: int = 0  # the controller's port; 0: any free one, and the same one again after a restart
    temp_dir: str | None = None  # the folder of a local Ray; it is not removed
    again: bool = False  # a running controller keeps the orders that it has


class Launched(Struct, frozen=True, kw_only=True, tag=True):
    controller: str  # its URL
    logs: str | None = None  # the folder of the replicas' logs, if it is on this machine
    found: bool = False  # the controller was there, and has a new plan now
    address: str = ""  # the address of Ray's GCS


class Trouble(Struct, frozen=True, kw_only=True, tag=True):
    """An error that ends the fleet, in one line for the user."""

    message: str


encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Order).decode
decode_answer: msgspec.json.Decoder[Launched | Trouble] = msgspec.json.Decoder(Launched | Trouble)
