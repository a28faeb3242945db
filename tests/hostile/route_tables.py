"""`python -m tests.hostile.route_tables`: write the tables of routes in docs/security.md."""

from pathlib import Path

from api.http.routes import Role, RouteTable
from fleet.control.app import TABLE as CONTROLLER
from replica.http.app import TABLE as REPLICA
from router.http.routes import TABLE as ROUTER

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- routes -->\n", "<!-- /routes -->\n"
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


def written() -> str:
    """Text between the page's marks."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    found, mark, _ = rest.partition(END)
    assert mark, f"{PAGE} lacks {BEGIN.strip()} ... {END.strip()}"
    return found


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + page() + END + rest.partition(END)[2])
