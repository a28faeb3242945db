"""`python -m tests.docs.retries`: write the router's table of retries in docs/failures.md."""

from router.proxy.retries import MAX_LOST, TABLE, Row
from tests.docs.parts import Part

PART = Part("failures.md", "retries")
TITLES = "what happens", "repeatable", "effects unknown", "bytes sent", "the replica's health learns", "retries"
NEXT = {
    "another": "another replica",
    "resume": "continue elsewhere",
    "wait": "wait",
    "pass on": "pass on",
    "break off": "break off",
}
LESSONS = {
    "nothing": "nothing",
    "busy": "busy",
    "rests": "takes nothing new",
    "fault": "a fault",
    "fault, busy": "a fault, busy",
    "opens": "a fault that opens its breaker",
    "unheard": "the same, until it is heard",
    "suspect": "suspected",
}
RETRIES = {"any": "no limit", "three": f"{MAX_LOST}", "budget": "the budget", "both": f"{MAX_LOST}, the budget"}


def table() -> str:
    rows = [TITLES, ("---",) * len(TITLES), *map(_cells, TABLE)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(row: Row) -> tuple[str, ...]:
    nexts = (NEXT[row.repeatable], NEXT[row.effects], NEXT[row.sent])
    return row.what, *nexts, LESSONS[row.lesson], RETRIES.get(row.retries, "")


if __name__ == "__main__":
    PART.write(table())
