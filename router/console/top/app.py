"""`warmroute top`: a router watched in a terminal, or printed once."""

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.text import Text

from router.console.asking import Client
from router.console.formatting import plain_console
from router.console.table import Line, print_lines
from router.console.top.poller import REPLICAS, ROUTER, TIMEOUT_S, Poller
from router.console.top.screen import OVERVIEW, PATHS, Screen, heading

MOST = 10  # decisions that are printed
LOOK_S = 0.1  # the pause between looks for news of the poller
REDRAW_S = 1.0  # ages grow while nothing answers
ESCAPED = {"A": "up", "B": "down", "H": "home", "F": "end", "Z": "shift+tab"}
ESCAPED |= {"1~": "home", "4~": "end", "5~": "pageup", "6~": "pagedown"}
PLAIN = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x1b": "escape"}
_KEY = re.compile(r"\x1b[\[O]([\d;]*[^\d;])|(.)", re.DOTALL)


def once(router_url: str, admin_key: str | None, file: TextIO) -> None:
    """Poll and print; raise ClickException if the router does not answer."""
    with Client(router_url, admin_key, ROUTER, TIMEOUT_S) as client:
        poller = Poller(client, 0.0)
        seen = poller.require()
    screen, console = Screen(poller), plain_console(file)
    screen.show(seen)
    for line in heading(seen, poller.clock()):
        console.print(Text.assemble(*line), soft_wrap=True)
    has_events = any(one.events is not None for one in seen.replicas)
    for name in screen.tables if has_events else OVERVIEW:
        table = screen.tables[name]
        if name == "sessions" and not table.shown:
            continue
        console.print()
        if not table.shown:
            console.print(screen.empty(name), soft_wrap=True)
            continue
        head, *rows = table.lines(console.width, 1 + (len(table.shown) if PATHS[name] == REPLICAS else MOST))
        print_lines(console, [[(text, style or "dim") for text, style in head], *rows])


def watch(router_url: str, admin_key: str | None, interval_s: float) -> None:
    """Run the live view; raise ClickException if the first poll fails, as with a wrong address."""
    poller = Poller(Client(router_url, admin_key, ROUTER, TIMEOUT_S), interval_s)
    poller.require()
    Thread(target=poller.run, daemon=True).start()
    screen, console = Screen(poller), plain_console(sys.stdout)
    with suppress(KeyboardInterrupt), raw_terminal(console):
        drawn, shown = paint(console, [], screen), (id(poller.seen), console.size, 0)
        while not screen.ended:
            for key in keys():
                screen.press(key)
                drawn = paint(console, drawn, screen)
            now = id(poller.seen), console.size, int(time.monotonic() / REDRAW_S)
            if now[1] != shown[1]:
                drawn = []
            if not drawn or now != shown:
                drawn, shown = paint(console, drawn, screen), now


def paint(console: Console, drawn: list[Line], screen: Screen) -> list[Line]:
    """Write the lines that are not `drawn` yet, and return all."""
    width, lines = console.width, screen.lines(*console.size)
    with console:
        for y, line in enumerate(lines):
            if y >= len(drawn) or drawn[y] != line:
                console.control(Control.move_to(0, y))
                console.print(padded(line, width), end="")
    return lines


def padded(line: Line, width: int) -> Text:
    """The line from edge to edge."""
    text = Text.assemble(*line, no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    text.append(" " * (width - text.cell_len), line[-1][1] if line else "")
    return text


def keys() -> Iterator[str]:
    """Wait a moment for keys; letters are their own names."""
    if select.select([sys.stdin], [], [], LOOK_S)[0]:
        typed = os.read(sys.stdin.fileno(), 4096).decode(errors="ignore")
        if not typed:
            raise KeyboardInterrupt  # the terminal is gone
        yield from keys_in(typed)


def keys_in(typed: str) -> Iterator[str]:
    for escaped, letter in _KEY.findall(typed):
        key = ESCAPED.get(escaped, "") if escaped else PLAIN.get(letter, letter)
        if key and key.isprintable():
            yield key


@contextmanager
def raw_terminal(console: Console) -> Iterator[None]:
    """Get keys at once and without an echo, and have a screen of its own, until the end."""
    before = termios.tcgetattr(sys.stdin)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    tty.setcbreak(sys.stdin)
    try:
        console.set_alt_screen(True)
        console.show_cursor(False)
        yield
    finally:
        with suppress(OSError, termios.error):  # the terminal may be gone
            console.show_cursor(True)
            console.set_alt_screen(False)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
