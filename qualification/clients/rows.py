"""The clients, and what is tried of each.

A client has a program `<language>/with_<name>`, which reports in JUnit's XML, and a file of pinned requirements
beside it. The router before the model demands a key, so each of its clients shows that it sends one.
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
    "langchain-openai": Client(
        packages=("langchain-openai", "langchain"),
        tries="invoke, streams, tools, structured output by its three methods, responses, an agent",
    ),
    "langchain-anthropic": Client(
        packages=("langchain-anthropic", "langchain"), tries="invoke, streams, tools, structured output, an agent"
    ),
    "pydantic-ai": Client(
        packages=("pydantic-ai-slim[openai,anthropic]",),
        tries="text, streams, tools, output by tool, by schema and by prompt, over three APIs",
    ),
    "instructor": Client(
        packages=("instructor[anthropic]",), tries="all modes for OpenAI, tools for Anthropic, streams"
    ),
    "litellm": Client(packages=("litellm", "mcp"), tries="chat, streams, tools, messages, responses"),
    "litellm-proxy": Client(
        packages=("litellm[proxy]", "openai", "anthropic"),
        tries="chat, messages and responses through its proxy, health, no cooldown",
    ),
    "llm": Client(packages=("llm",), tries="prompts, schemas, tools, conversations on the command line"),
    "lm-eval": Client(packages=("lm-eval[api]",), tries="generation, log-likelihood, multiple choice"),
    "guidellm": Client(packages=("guidellm",), tries="a small benchmark"),
    "aiperf": Client(packages=("aiperf",), tries="a small benchmark"),
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
