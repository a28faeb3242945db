"""LiteLLM's proxy, with the router as the one deployment behind it, and OpenAI's and Anthropic's clients before it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

MODEL = os.environ["MODEL"]
KEY = "sk-of-the-proxy"
READY_S = 120.0
HELLO: Any = [{"role": "user", "content": "Hello"}]
CONFIG = {
    "model_list": [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"{provider}/{MODEL}",
                "api_base": f"{os.environ['ROUTER_URL']}{path}",
                "api_key": os.environ["OPENAI_API_KEY"],
            },
        }
        for name, provider, path in (
            ("ours", "openai", "/v1"),
            ("ours-as-vllm", "hosted_vllm", "/v1"),
            ("ours-as-claude", "anthropic", ""),
        )
    ],
    "router_settings": {"num_retries": 0, "allowed_fails": 1, "cooldown_time": 600},
    "general_settings": {"master_key": KEY},
}
TOOL: Any = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NAMES = pytest.mark.parametrize("name", ["ours", "ours-as-vllm", "ours-as-claude"])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("proxy")
    (folder / "config.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML, too
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(folder / "config.yaml")]
    with (folder / "log").open("w") as log:
        proxy = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
    try:
        wait_ready(f"http://127.0.0.1:{port}", proxy, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        proxy.send_signal(signal.SIGTERM)
        proxy.wait(30)


def wait_ready(address: str, proxy: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and proxy.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health/liveliness", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def claude(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=KEY, max_retries=0)


@NAMES
def test_chat(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=HELLO)
    assert answer.choices[0].message.content


@NAMES
def test_stream_of_chat(client: OpenAI, name: str) -> None:
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=name, messages=HELLO, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert any(chunk.usage is not None and chunk.usage.completion_tokens > 0 for chunk in chunks)


@NAMES
def test_tool(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name, messages=HELLO, tools=[{"type": "function", "function": TOOL}], tool_choice="required"
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls and all(set(json.loads(call.function.arguments)) == {"city"} for call in calls)


@NAMES
def test_message(claude: Anthropic, name: str) -> None:
    answer = claude.messages.create(model=name, max_tokens=50, messages=HELLO)
    assert answer.content[0].type == "text" and answer.content[0].text


@NAMES
def test_stream_of_a_message(claude: Anthropic, name: str) -> None:
    with claude.messages.stream(model=name, max_tokens=50, messages=HELLO) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")


def test_count_of_tokens(claude: Anthropic) -> None:
    assert claude.messages.count_tokens(model="ours-as-claude", messages=HELLO).input_tokens > 0


def test_response_and_its_continuation(client: OpenAI) -> None:
    first = client.responses.create(model="ours", input="Hello")
    then = client.responses.create(model="ours", input="And?", previous_response_id=first.id)
    assert first.output_text and then.output_text
    assert first.usage is not None and then.usage is not None
    assert then.usage.input_tokens > first.usage.input_tokens


def test_stream_of_a_response(client: OpenAI) -> None:
    events = list(client.responses.create(model="ours", input="Hello", stream=True))
    assert events[-1].type == "response.completed" and events[-1].response.output_text


def test_completion(client: OpenAI) -> None:
    assert client.completions.create(model="ours", prompt="Hello", max_tokens=10).choices[0].text


def test_clients_mistakes_do_not_put_the_deployment_aside(client: OpenAI, claude: Anthropic) -> None:
    for _ in range(5):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="ours", messages=[{"role": "user", "content": "so " * 20_000}])
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="ours", messages=HELLO, temperature=-1)
        with pytest.raises(anthropic.BadRequestError):
            claude.messages.create(model="ours-as-claude", max_tokens=5, messages=HELLO, extra_body={"top_p": 7})
    assert client.chat.completions.create(model="ours", messages=HELLO, max_tokens=5).choices
    assert claude.messages.create(model="ours-as-claude", max_tokens=5, messages=HELLO).content


def test_health_of_every_deployment(url: str) -> None:
    request = urllib.request.Request(f"{url}/health", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        health = json.load(answer)
    assert (health["healthy_count"], health["unhealthy_endpoints"]) == (3, [])
