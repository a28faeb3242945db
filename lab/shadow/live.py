"""The lines that are printed while shadow watches."""

import socket
from collections import Counter

from lab.shadow.placing import Placing
from lab.shadow.sums import at_once_sums
from router.core import Router


def began_line(router: Router, listener: socket.socket | None) -> str:
    where = ""
    if listener is not None:
        host, port = listener.getsockname()[:2]
        where = f", copies of requests are taken at http://{f'[{host}]' if ':' in host else host}:{port}"
    return f"following {len(router.members)} replicas ({exact_trees(router)} trees exact){where}"


def live_line(router: Router, placing: Placing, skipped: Counter[str]) -> str:
    sums = at_once_sums(placing.records)
    parts = [f"{placing.seen:,} requests"]
    if sums.tokens:
        parts.append(
            f"cached where they went {sums.served_hit / sums.tokens:.1%}, "
            f"where warmroute would have sent each {sums.chosen_hit / sums.tokens:.1%}"
        )
    if len(placing.whereabouts):
        parts.append(f"{len(placing.whereabouts):,} on their way")
    if skipped:
        parts.append(f"{skipped.total():,} skipped")
    return "; ".join([*parts, f"{exact_trees(router)} of {len(router.members)} trees exact"])


def exact_trees(router: Router) -> int:
    return sum(router.doubt(member) is None for member in router.members)
