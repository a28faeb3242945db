"""The pods of an overlay as processes here: their own arguments, an address each, and an end as kubelets make it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx2

from tests.events.processes import DEADLINE_S
from tests.k8s.rendered import Pod

VARIABLE = "$(POD_IP)", "$(POD_NAME)"


class PodHere:
    """Its first container, on a loopback address of its own, so that pods have the same ports."""

    def __init__(self, pod: Pod, name: str, address: str, models: Path, more: tuple[str, ...] = ()) -> None:
        self.name, self.address, self.grace_s = name, address, float(pod.spec["terminationGracePeriodSeconds"])
        self._container = pod.spec["containers"][0]
        self._init = [each["args"] for each in pod.spec.get("initContainers", ()) if "restartPolicy" not in each]
        self._models = models
        self._more = (f"--host={address}", *more)
        self._process: asyncio.subprocess.Process | None = None
        self._log = models / f"{name}.log"
        [self.port] = [port["containerPort"] for port in self._container["ports"] if port["name"] == "http"]
        assert "lifecycle" not in self._container, "this harness does not run preStop hooks"

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    async def start(self) -> None:
        """Until its readiness probe goes well."""
        for arguments in self._init:
            process = await self._run(arguments)
            assert await process.wait() == 0, self.said
        self._process = await self._run([*self._container["args"], *self._more])
        path = self._container["readinessProbe"]["httpGet"]["path"]
        async with httpx2.AsyncClient(base_url=self.url, trust_env=False) as http, asyncio.timeout(DEADLINE_S):
            while not await self._well(http, path):
                assert self._process.returncode is None, self.said
                await asyncio.sleep(0.05)

    @staticmethod
    async def _well(http: httpx2.AsyncClient, path: str) -> bool:
        with suppress(httpx2.HTTPError):
            return (await http.get(path)).status_code == 200
        return False

    async def end(self) -> float:
        """Send SIGTERM and return the seconds to the end; fail where a kubelet would kill."""
        assert self._process is not None
        began_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(self.grace_s):
            assert await self._process.wait() == 0, self.said
        return time.monotonic() - began_s

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def said(self) -> str:
        return self._log.read_text()

    async def _run(self, arguments: list[str]) -> asyncio.subprocess.Process:
        words = [self._here(word) for word in arguments]
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fleet", *words, stdout=log, stderr=log, env=os.environ | self._environment()
            )

    def _environment(self) -> Mapping[str, str]:
        given = {each["name"]: self._here(each["value"]) for each in self._container["env"] if "value" in each}
        return given | {"HOME": str(self._models)}

    def _here(self, text: str) -> str:
        for variable, value in zip(VARIABLE, (self.address, self.name), strict=True):
            text = text.replace(variable, value)
        return text.replace("/models", str(self._models))


class Balancer:
    """A Service as kube-proxy has it: a new connection goes to any pod behind it, and those that are open stay."""

    def __init__(self) -> None:
        self.pods: list[PodHere] = []
        self.port = 0
        self._turn = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        pod = self.pods[self._turn % len(self.pods)]
        try:
            behind_reader, behind_writer = await asyncio.open_connection(pod.address, pod.port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pipe(reader, behind_writer), _pipe(behind_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        writer.close()
