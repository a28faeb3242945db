"""`python -m tests.hostile.route_tables`: write the tables of routes in docs/security.md."""

from api.http.routes import Role, RouteTable
from fleet.control.app import TABLE as CONTROLLER
from replica.http.app import TABLE as REPLICA
from router.http.routes import TABLE as ROUTER
from tests.docs.parts import Part

PART = Part("security.md", "routes")
ROUTER_CALLERS = {
    Role.ANYONE: "anyone",
    Role.CLIENT: "a client's key",
    Role.READER: "a client's key; an administrator sees more",
    Role.ADMINISTRATOR: "an administrator",
}
ONE_KEY = dict.fromkeys(Role, "the replica's key") | {Role.ANYONE: "anyone"}
FLEET_KEY = dict.fromkeys(Role, "the fleet's key") | {Role.ANYONE: "anyone"}


def page() -> str:
    servers = (("The router", ROUTER, ROUTER_CALLERS), ("A replica", REPLICA, ONE_KEY))
    return "\n".join(_section(*server) for server in (*servers, ("A fleet's controller", CONTROLLER, FLEET_KEY)))


def _section(title: str, table: RouteTable, callers: dict[Role, str]) -> str:
    rows = [f"| `{', '.join(route.methods)} {route.template}` | {callers[route.who]} |" for route in table.routes]
    return "\n".join([f"### {title}", "", "| route | open to |", "| --- | --- |", *rows, ""])


if __name__ == "__main__":
    PART.write(page())
