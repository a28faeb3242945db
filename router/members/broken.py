"""A request that a replica will not answer, and whose fault that is."""

import errno

from api.errors import ApiError

# Faults of the network, not of the replica.
NETWORK_FAULTS = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ETIMEDOUT})
# Shortages of this machine, no fault of the replica to connect to.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class Broken(Exception):
    """No answer, or no more of it, will come.

    `refused`: the request cannot have reached the replica. `silent`: nothing was heard from it, which is no sign that
    it has died. `late`: it has had all the time that there is for this request. `ours`: the router itself is the cause.
    """

    def __init__(
        self, reason: str, *, refused: bool = False, silent: bool = False, late: bool = False, ours: bool = False
    ) -> None:
        super().__init__(reason)
        self.refused = refused
        self.silent = silent
        self.late = late
        self.ours = ours


def is_one_of(error: Exception | None, numbers: frozenset[int]) -> bool:
    return isinstance(error, OSError) and error.errno in numbers


def no_replica(why: str) -> ApiError:
    headers = {"Retry-After": "1"}
    return ApiError(503, f"{why}; try again", "service_unavailable", code="no_replica", headers=headers)
