"""The routes of `vllm launch render`, without a socket: `rendering.py FOLDER...` answers questions on standard input.

A question is a line of JSON: the model's place among the folders, a path and a body. An answer is a line of JSON: the
status and the body.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from vllm import AsyncEngineArgs, envs
from vllm.config import VllmConfig
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.utils.argparse_utils import FlexibleArgumentParser


@asynccontextmanager
async def routes(folder: str) -> AsyncIterator[httpx.AsyncClient]:
    """The routes of a model, made as `vllm launch render` makes them."""
    options = ("--model", folder, "--served-model-name", "m", "--max-model-len", "4096")
    with_tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*options, *with_tools])
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(model_config=engine.create_model_config(), logging_config=engine.create_logging_config())
    app = build_app(args, ("render",))
    await init_render_app_state(config, app.state, args)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False)) as client:
        yield client


async def main(folders: list[str]) -> None:
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not mix with answers
    models: list[Any] = [routes(folder) for folder in folders]
    clients = [await model.__aenter__() for model in models]
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        model, path, body = json.loads(line)
        answer = await clients[model].post(
            f"http://vllm{path}", content=body.encode(), headers={"content-type": "application/json"}
        )
        answers.write(json.dumps([answer.status_code, answer.text]) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    asyncio.run(main(sys.argv[1:]))
