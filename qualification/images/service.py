"""A Service as kube-proxy has it: rules in the kernel that give each new connection another destination."""

import subprocess
from collections.abc import Sequence

from qualification.images.played import Played


class Service:
    """An address of a pods' network; this machine's connections to it end at one of the pods, chosen at random.

    The kernel remembers the choice for as long as the connection is open, whoever leaves the Service meanwhile.
    """

    def __init__(self, name: str, address: str, port: int) -> None:
        self.url = f"http://{address}:{port}"
        self.pods: list[Played] = []
        self._table, self._address, self._port = f"ip {name}", address, port

    def send_to(self, pods: Sequence[Played]) -> None:
        """Replace the rules at once: there is no moment without any."""
        self.pods = [*pods]
        chosen = ", ".join(f"{turn} : {each.address}" for turn, each in enumerate(pods))
        _nft(
            *self._emptied,
            f"add table {self._table}",
            f"add chain {self._table} services {{ type nat hook output priority -100; }}",
            f"add rule {self._table} services ip daddr {self._address} tcp dport {self._port}"
            f" dnat to numgen random mod {len(pods)} map {{ {chosen} }}",
        )

    def close(self) -> None:
        _nft(*self._emptied)

    @property
    def _emptied(self) -> tuple[str, str]:
        return f"add table {self._table}", f"delete table {self._table}"


def _nft(*commands: str) -> None:
    script = "\n".join(commands)
    done = subprocess.run(["nft", "--file", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + script
