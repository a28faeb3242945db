"""The tokens in vLLM's answers of the Responses API, which alone tell whether the engine gave an answer up.

vLLM ends such an answer with the status `completed`, like one that came to its end. Only its last token tells: one that
ends answers, or any. So the router asks for the tokens (`enable_response_messages`), and takes them out again.
"""

from collections.abc import Collection

ASK = b',"enable_response_messages":true'
FIELD = b'"enable_response_messages"'

# Within a string the quotes would stand behind backslashes, so these are found only as members.
_FIRST, _LAST = b'"input_messages":[{"message":"', b'"output_messages":'
_END = b',"type":"raw_message_tokens"}]'
_NONE = b"[]"
_COMPLETED = b'"status":"completed"'
NOTHING = b'"input_messages":null,"output_messages":null'


def without_tokens(answer: bytes, ends: Collection[int]) -> tuple[bytes, bool]:
    """The answer, or its last event, as it is if nobody asks for tokens; and whether its engine has given it up.

    `ends`: tokens that end an answer.
    """
    first, last = answer.rfind(_FIRST), answer.rfind(_LAST)
    if first < 0 or last < first:
        return answer, False
    start, completed = last + len(_LAST), _COMPLETED in answer
    if answer.startswith(_NONE, start):
        return answer[:first] + NOTHING + answer[start + len(_NONE) :], completed
    end = answer.rfind(_END)
    if end < start:
        return answer, False
    tokens_end = answer.rfind(b"]", start, end)
    final = answer[
        max(answer.rfind(b",", start, tokens_end), answer.rfind(b"[", start, tokens_end)) + 1 : tokens_end + 1
    ]
    token = final.rstrip(b"]").strip()
    gives_up = completed and token.isdigit() and int(token) not in ends
    return answer[:first] + NOTHING + answer[end + len(_END) :], gives_up
