"""`warmroute events view`: a local server for the page of a recording."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable

import click
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.errors import ApiError, invalid
from api.http.responses import error_response
from events.tool.options import StreamOptions, Target, is_endpoint, open_target
from events.tool.watch import load_decoder, tokenizer_option
from events.tool.words import Decode
from router.dashboard import static_files
from router.dashboard.recording import RecordingSummary, ShuttingDown, TreePlayback, about, never
from router.proxy.admission import is_local

PAGE = "recording.html"
LOOPBACK = "127.0.0.1"
Endpoint = Callable[[Request], Awaitable[Response]]


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--port", default=0, metavar="PORT", type=click.IntRange(0, 65535), help="Listen there; 0: any free port."
)
@tokenizer_option
def view(file: str, port: int, tokenizer: str | None) -> None:
    """Show a recording in a browser: the tree at any moment, gaps and restarts over time.

    FILE is a recording made by `record`. Only browsers on this machine can open the page. A redacted recording shows
    no text, nor does any without --tokenizer. Press Ctrl-C to stop.

    \b
    Examples:
      warmroute events view incident.wre
      warmroute events view incident.wre --tokenizer ~/models/qwen --port 8080
    """
    if is_endpoint(file):
        raise click.UsageError(f"{file} is a live stream; view shows a recording made by `warmroute events record`")
    target, decode = open_target(file, StreamOptions()), load_decoder(tokenizer)
    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise click.ClickException(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
    with listener:
        click.echo(f"{target.name} at http://{LOOPBACK}:{listener.getsockname()[1]}")
        serve(target, decode, listener)


def serve(target: Target, decode: Decode | None, listener: socket.socket) -> None:
    app = build_app(Pages(target, decode, lambda: server.should_exit))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # raised again after everything is closed
        return


def build_app(pages: "Pages") -> Starlette:
    routes = [
        Route("/", guarded(pages.index)),
        Route("/recording", guarded(pages.about)),
        Route("/recording/tree", guarded(pages.tree)),
        Route("/dashboard/{path:path}", guarded(pages.file)),
    ]
    return Starlette(routes=routes, exception_handlers={Exception: failed})


def guarded(endpoint: Endpoint) -> Endpoint:
    """Refuse pages of other sites: a recording holds prompts."""

    async def answer(request: Request) -> Response:
        client = request.client.host if request.client else None
        try:
            if not is_local(request.scope["headers"], client, request.scope["http_version"]):
                raise ApiError(403, "open this page on the machine that runs it, at 127.0.0.1 or localhost")
            return await endpoint(request)
        except ApiError as error:
            return error_response(error)
        except (ShuttingDown, asyncio.CancelledError):
            return error_response(ApiError(503, "the server is shutting down"))

    return answer


async def failed(_: Request, error: Exception) -> Response:
    """The response to an internal error, which the server logs too."""
    message = f"the recording could not be played: {type(error).__name__}: {error}"
    return error_response(ApiError(500, message, "server_error"))


class Pages:
    def __init__(self, target: Target, decode: Decode | None, is_ended: Callable[[], bool] = never) -> None:
        assert target.recording is not None
        self._recording = target.recording
        self._texts = decode is not None and not self._recording.header.redacted
        self._moments = TreePlayback(self._recording, decode if self._texts else None, is_ended)
        self._is_ended = is_ended
        self._about: RecordingSummary | None = None
        self._playing = asyncio.Lock()  # one replay in a thread at a time

    async def index(self, _: Request) -> Response:
        return shown(PAGE)

    async def file(self, request: Request) -> Response:
        return shown(request.path_params["path"])

    async def about(self, _: Request) -> Response:
        async with self._playing:
            if self._about is None:
                self._about = await asyncio.to_thread(
                    about, self._recording, texts=self._texts, is_ended=self._is_ended
                )
        return as_json(self._about)

    async def tree(self, request: Request) -> Response:
        try:
            at_s = float(request.query_params["at"])
        except (KeyError, ValueError):
            at_s = math.nan
        if not math.isfinite(at_s):
            raise invalid("say at=UNIX_TIME, a moment of the recording")
        async with self._playing:
            return as_json(await asyncio.to_thread(self._moments.at, at_s))


def shown(path: str) -> Response:
    found = static_files.find(path)
    if found is None:
        raise ApiError(404, f"there is no file {path[:100]!r}")
    return Response(found.content, headers=static_files.HEADERS, media_type=found.content_type)


def as_json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers={"Cache-Control": "no-store"})
