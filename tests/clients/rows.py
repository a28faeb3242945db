"""The clients, and what is tried of each.

A client has a program `<language>/with_<name>`, which reports in JUnit's XML, and a file of pinned requirements
beside it.
"""

from typing import Literal

from msgspec import Struct


class Client(Struct, frozen=True, kw_only=True):
    packages: tuple[str, ...]  # the first is the client itself
    tries: str
    language: Literal["python", "node"] = "python"
    served_by: Literal["model", "script"] = "model"
    limit_s: float = 300.0


CLIENTS: dict[str, Client] = {
    "openai": Client(
        packages=("openai",),
        tries="chat, streams, completions, tools, structured outputs, responses, errors",
    ),
    "anthropic": Client(packages=("anthropic",), tries="messages, streams, tools, counting tokens, errors"),
    "openai-node": Client(
        packages=("openai", "zod"), tries="chat, streams, tools, structured outputs, responses, errors", language="node"
    ),
    "anthropic-node": Client(
        packages=("@anthropic-ai/sdk", "zod"),
        tries="messages, streams, tools, structured outputs, models, errors",
        language="node",
    ),
    "ai-sdk": Client(
        packages=("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
        tries="text, objects, tools and their streams, over three providers",
        language="node",
    ),
    "codex": Client(
        packages=("@openai/codex",),
        tries="an agent that writes a file by a command and by a patch, over responses",
        language="node",
        served_by="script",
    ),
    "opencode": Client(
        packages=("opencode-ai",), tries="an agent that writes a file, over chat", language="node", served_by="script"
    ),
    "claude-code": Client(
        packages=("@anthropic-ai/claude-code",),
        tries="an agent that writes a file, over messages",
        language="node",
        served_by="script",
    ),
    "aider": Client(
        packages=("aider-chat",), tries="an agent that writes a file without tools, over chat", served_by="script"
    ),
}
