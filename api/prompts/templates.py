"""Chat templates, rendered as transformers does, in Jinja's sandbox.

The sandbox keeps a template from Python's internals, and bounds the time and the text that clients can make it take.
"""

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.nodes
from msgspec import Struct

from api.errors import invalid
from api.prompts.sandbox import TooMuch, environment, grant

MAX_BYTES = 1024 * 1024  # the limit for a template; the largest in use have some ten thousand

# Stands where the text of a continued message ends: plain letters, which no filter escapes. Whether a template has
# trimmed the message shows at the space that ends this; a message that contains it harms only its own request.
_END_OF_MESSAGE = "END_OF_THE_CONTINUED_MESSAGE "


class Conversation(Struct, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}
    documents: list[Any] | None = None


class ChatTemplate:
    """A compiled template; raise ValueError with its name if the source is invalid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the chat template") -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_BYTES:
            raise ValueError(f"{name} has {len(source)} characters; at most {MAX_BYTES} are read")
        try:
            grant()
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of {name} is not Jinja: {error.message}") from error
        except Exception as error:
            # Jinja makes Python of it, which has limits of its own (20 nested loops), and computes constants.
            reason = str(error) or type(error).__name__
            raise ValueError(f"{name} cannot be compiled: {reason}; simplify it") from error
        # Refuse a template that cannot render any message.
        fields = dict.fromkeys(("tools", "documents")) | {"add_generation_prompt": True} | self._special_tokens
        try:
            grant()
            self._template.render(fields, messages=[{"role": "user", "content": "a"}])
        except (TooMuch, MemoryError) as error:
            raise ValueError(f"{name} cannot be used: {error}") from error
        except Exception:  # a template is a program: it may refuse this message for any other reason
            pass

    def render(self, conversation: Conversation) -> str:
        if conversation.tools and "tools" not in self.source:
            raise invalid("tools is set; this model's chat template has no place for them, leave it out", "tools")
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}
        if taken := conversation.kwargs.keys() & reserved:
            name = min(taken)
            raise invalid(f"chat_template_kwargs sets {name!r}; that is the server's to set", "chat_template_kwargs")
        if not conversation.continue_final_message:
            return self._render(conversation, conversation.messages)
        *earlier, last = conversation.messages
        text = self._render(conversation, [*earlier, last | {"content": last["content"] + _END_OF_MESSAGE}])
        end = text.rfind(_END_OF_MESSAGE.rstrip())
        if end < 0 or last["content"].strip() not in text:  # the template may have left out a part, as the thoughts
            reason = "the chat template does not show the last message as it is, so it cannot be continued"
            raise invalid(f"continue_final_message is set; {reason}", "continue_final_message")
        kept_spaces = text.startswith(_END_OF_MESSAGE, end)
        return text[:end] if kept_spaces else text[:end].rstrip()

    def parsed(self) -> jinja2.nodes.Template:
        return _ENVIRONMENT.parse(self.source)

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        try:
            grant()
            fields: dict[str, Any] = {
                **self._special_tokens,
                **conversation.kwargs,
                "tools": conversation.tools or None,
                "documents": conversation.documents,
                "add_generation_prompt": conversation.add_generation_prompt,
            }
            try:
                return self._template.render(fields, messages=messages)
            except jinja2.UndefinedError:
                # A message of calls alone has no content. Templates that cannot do without get an empty one.
                return self._template.render(fields, messages=[{"content": ""} | message for message in messages])
        except Exception as error:
            # A template is a program that runs on the client's data: it may fail in any way.
            raise invalid(f"the chat template refuses the messages: {error}", "messages") from error


_ENVIRONMENT = environment()
