"""The clients, and what is tried of each.

A client has a program `<language>/with_<name>`, which reports in JUnit's XML, and a file of pinned requirements
beside it.
"""

from msgspec import Struct


class Client(Struct, frozen=True, kw_only=True):
    packages: tuple[str, ...]  # the first is the client itself
    tries: str
    language: str = "python"
    limit_s: float = 300.0


CLIENTS: dict[str, Client] = {
    "openai": Client(
        packages=("openai",),
        tries="chat, streams, completions, tools, structured outputs, responses, errors",
    ),
    "anthropic": Client(packages=("anthropic",), tries="messages, streams, tools, counting tokens, errors"),
}
