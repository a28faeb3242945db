"""Keeps a Ray of our own running: restarts a GCS that dies or hangs in place, on its state.

Without its raylet a Ray has no workers, so that the raylet's end is the end of all of it: `warmroute up` begins anew.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fleet.on_ray.local import GCS, RAYLET, raylet_lives, start_gcs_again

LOOK_S = 2.0
ANSWER_S = 3.0
MISSES = 10  # looks in a row without an answer: up to 50 s
MAX_STARTS = 3  # the starts of a GCS within a minute
STARTS_WITHIN_S = 60.0


class RayWatchdog:
    """`pids` are those of Ray's servers; `heal_controller` may block."""

    def __init__(self, pids: dict[str, int], heal_controller: Callable[[], None], say: Callable[[str], None]) -> None:
        self._pids = dict(pids)
        self._heal_controller = heal_controller
        self._say = say
        self._starts: list[float] = []
        self._over = threading.Event()

    async def until_over(self) -> str:
        """Keep it running; if that is impossible, return the part that has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[str] = asyncio.Queue()
        for name, pid in self._pids.items():
            self._watch(loop, name, pid, ended)
        for name in (GCS, RAYLET):
            if name not in self._pids:  # it has died before anybody could look
                return name
        threading.Thread(target=self._look_again_and_again, args=(loop, ended), daemon=True).start()
        try:
            while (name := await ended.get()) == GCS and self._may_start():
                self._say("Ray's GCS has died; it is started again, and nothing else is")
                self._pids[GCS] = start_gcs_again()
                self._watch(loop, GCS, self._pids[GCS], ended)
            return name
        except OSError as error:  # a full disk: its log cannot be made
            self._say(f"Ray's GCS cannot be started again: {error}")
            return GCS
        finally:
            self._over.set()

    def _may_start(self) -> bool:
        now_s = time.monotonic()
        self._starts = [each for each in self._starts if now_s - each < STARTS_WITHIN_S] + [now_s]
        return "RAY_gcs_storage" in os.environ and len(self._starts) <= MAX_STARTS

    @staticmethod
    def _watch(loop: asyncio.AbstractEventLoop, name: str, pid: int, ended: "asyncio.Queue[str]") -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            ended.put_nowait(name)
            return

        def gone() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            ended.put_nowait(name)

        loop.add_reader(descriptor, gone)

    # ---- what lives, and does not answer

    def _look_again_and_again(self, loop: asyncio.AbstractEventLoop, ended: "asyncio.Queue[str]") -> None:
        """Check Ray in a thread, as its calls block. Counts checks instead of time: this process may be paused, too."""
        misses = 0
        while not self._over.wait(LOOK_S):
            lives = raylet_lives(ANSWER_S)
            if self._over.is_set():  # and the loop may be closed
                return
            if lives is False:
                loop.call_soon_threadsafe(ended.put_nowait, f"{RAYLET} (it does not answer)")
                return
            misses = 0 if lives else misses + 1
            if misses == MISSES:
                self._say(f"Ray's GCS gives no answer; it is killed after {MISSES} questions")
                with suppress(ProcessLookupError):
                    os.kill(self._pids[GCS], signal.SIGKILL)
                misses = 0
            if lives:
                self._heal_controller()
