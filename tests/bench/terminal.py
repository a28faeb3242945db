"""Draw the pictures of docs/top.md: `warmroute top` on a fleet with traffic, as text and larger as a picture."""

import io
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from rich.console import Console

from router.console.asking import Client
from router.console.formatting import cut
from router.console.top.app import padded
from router.console.top.poller import Poller
from router.console.top.screen import Screen
from tests.bench.fleet import up

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "top.md", DOCS / "top.svg"
SCREEN = re.compile(r"(<!-- what tests/bench/terminal.py saw -->\n```text\n).*?(```)", re.DOTALL)
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # readers of the page should not load fonts from other sites
WARM_UP_S = 25.0
OPTIONS = ("--no-ray", "--simulated", "--replicas", "4", "--port", "8000", "--")
SPEED = ("--set=simulated_prefill_tokens_per_s=12000", "--set=simulated_decode_tokens_per_s=400")
REPLICA = ("--num-blocks", "600", *SPEED)
TALKERS = 16
ROLES = (
    "You are a support agent of Example Shop. Answer in two sentences, name the order, and be polite.",
    "You are a code reviewer. Say what is wrong with the patch, quote the line, and suggest a better one.",
    "You translate what you are given into French, and explain the words that are hard to translate.",
    "You are a librarian. Recommend three books, each with one sentence that makes somebody want to read it.",
)
TALK = "where is my parcel why does this loop never end which book has a lighthouse in it please tell me more"


def run(rounds: int) -> None:
    del rounds
    with up(*OPTIONS, *REPLICA) as (_, url, _began_s), traffic(url):
        screen = watched(url)
        PAGE.write_text(SCREEN.sub(lambda found: found[1] + text(screen) + found[2], PAGE.read_text()))
        PICTURE.write_text(picture(screen, (100, 32)))
    print(f"{PAGE} has a new screen, and {PICTURE} is drawn")


# ---- traffic


@contextmanager
def traffic(url: str) -> Iterator[None]:
    ended = threading.Event()
    talkers = [threading.Thread(target=talk, args=(url, number, ended)) for number in range(TALKERS)]
    for talker in talkers:
        talker.start()
    try:
        yield
    finally:
        ended.set()
        for talker in talkers:
            talker.join()


def talk(url: str, number: int, ended: threading.Event) -> None:
    """Conversations of one role, one after the other."""
    chance, role = random.Random(number), ROLES[number % len(ROLES)]
    with httpx2.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        while not ended.is_set():
            messages = [{"role": "system", "content": " ".join([role] * 6)}]
            for _ in range(chance.randint(2, 6)):
                messages.append({"role": "user", "content": " ".join(chance.choices(TALK.split(), k=60))})
                body = {"model": "demo", "max_tokens": 60, "messages": messages}
                answer = http.post("/v1/chat/completions", json=body).json()
                messages.append(answer["choices"][0]["message"])
                if ended.wait(chance.expovariate(0.8)):
                    return


# ---- pictures


def watched(url: str) -> Screen:
    """A screen whose router was polled for a while."""
    with Client(url) as client:
        poller = Poller(client, 1.0)
        for _ in range(round(WARM_UP_S)):
            poller.poll()
            time.sleep(1.0)
    return Screen(poller)


def text(screen: Screen) -> str:
    """The screen on a terminal of 80 columns and 24 lines."""
    lines = ["".join(part for part, _ in line) for line in screen.lines(80, 24)]
    return "".join(f"{cut(line, 80).rstrip()}\n" for line in lines)


def picture(screen: Screen, size: tuple[int, int]) -> str:
    console = Console(file=io.StringIO(), record=True, width=size[0], height=size[1], force_terminal=True)
    screen.lines(*size)
    screen.press("down")
    for line in screen.lines(*size):
        console.print(padded(line, size[0]))
    return FONTS.sub("", console.export_svg(title="warmroute top")).replace("Fira Code, ", "")
