"""A conversation, typed line by line."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
from rich.text import Text

from events.tool.words import printable
from fleet.display import has_cursor
from lab.chat.answers import Message, Page, Place, answered, figures
from router.console.formatting import plain_console

MAX_FILE_BYTES = 1024 * 1024
MAX_CHARACTERS = 4 * 1024 * 1024  # a question may have, and a whole conversation
TOO_LONG = (400, 413)  # statuses for a prompt that does not fit
PROMPT = "> "
HELP = """\
/file FILE  begin again, with this document in front of every question
/new        begin again
/help       show this
Ctrl-C ends an answer. Between answers it leaves, as Ctrl-D does. A question may begin with / after a space."""


class Conversation:
    def __init__(self, place: Place, *, decorated: bool) -> None:
        """`decorated`: with a clock and a line of figures, for a terminal."""
        self._place = place
        self._decorated = decorated
        self._messages: list[Message] = []

    def take(self, line: str) -> None:
        """Answer a question or obey a command; click errors say what is wrong."""
        command, _, rest = line.partition(" ")
        if len(line) > MAX_CHARACTERS:
            raise click.ClickException(f"the question is longer than {MAX_CHARACTERS:,} characters; use /file")
        if command == "/file":
            text = read_document(rest.strip())
            self._messages = [{"role": "system", "content": f"Answer from this document:\n\n{text}"}]
            self.say(f"A new conversation about {rest.strip()}, {len(text):,} characters.")
        elif command == "/new":
            self._messages = []
            self.say("A new conversation.")
        elif command == "/help":
            click.echo(HELP)
        elif command.startswith("/"):
            raise click.ClickException(f"{command} is no command; /help lists them")
        elif line.strip():
            self._ask(line.strip())

    def _ask(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
            raise click.ClickException(f"the conversation has over {MAX_CHARACTERS:,} characters; /new begins again")
        has_clock = self._decorated and has_cursor(plain_console(sys.stdout))
        page = Page((lambda seconds: f"{seconds:.1f} s") if has_clock else None)
        try:
            answer = answered(self._place, messages, page.frame)
        finally:
            page.end()
        if answer.stopped and not self._decorated:  # Ctrl-C ends a script, not only this answer
            raise KeyboardInterrupt
        outcome = answer.outcome
        if outcome.error is not None:
            said = f"{self._place.target.url}: {outcome.error}: {printable(outcome.detail)}"
            if outcome.status in TOO_LONG and self._messages:
                said += "; if the conversation is too long for the model, /new begins again"
            raise click.ClickException(said)
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.say(figures(answer))

    def say(self, text: str) -> None:
        if self._decorated and text:
            plain_console(sys.stdout).print(Text(printable(text), "dim"), soft_wrap=True)


def read_document(name: str) -> str:
    if not name:
        raise click.ClickException("/file needs a name: /file FILE")
    path = Path(name).expanduser()
    try:
        if not path.is_file():  # reading a pipe or a device would not end
            raise click.ClickException(f"{name!r} is not a file; name one that is there")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise click.ClickException(f"{name!r} is larger than {MAX_FILE_BYTES:,} bytes; choose a smaller file")
        return content.decode()
    except UnicodeDecodeError:
        raise click.ClickException(f"{name!r} is not text in UTF-8; convert it first") from None
    except (OSError, RuntimeError) as error:  # no permission, or a ~ without a home
        raise click.ClickException(f"cannot read {name!r}: {error}") from error


def typed() -> Iterator[str]:
    """Yield the lines that somebody types, until Ctrl-D, or Ctrl-C between two answers."""
    with suppress(ImportError):  # a line can be typed without it, but not edited
        import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return


def piped() -> Iterator[str]:
    while line := sys.stdin.readline(MAX_CHARACTERS + 2):
        yield line.removesuffix("\n")
