"""Forms (RFC 7578) go on as they came: a field that only the router may set is refused, and so is any second reading.

vLLM reads `vllm_xargs` of a transcription as JSON, and takes `kv_transfer_params` from there.
"""

import re
from collections.abc import Collection

from api.errors import invalid, quoted
from router.proxy.withheld import NESTING, TRANSFER

FORM = b"multipart/form-data"
MOST_PARTS = 2000  # as many as Starlette takes: 1,000 fields and 1,000 files
MOST_BEFORE = 64  # line ends before the first part
# The charset would be that of names, too; a second boundary would make another form of it.
_TYPE = re.compile(
    rb"""multipart/form-data *; *boundary=("?)([\w'()+,./:=?-]{1,70})\1(?: *; *charset="?utf-8"?)?""", re.IGNORECASE
)
_OTHERS = rb"(?:content-(?:type|length|transfer-encoding|id):[^\r\n]*\r\n)*"
_NAMED = rb"""content-disposition: *form-data; *name=("?)([\w.\[\]-]+)\1"""
_FILE = rb"""(?:; *filename(?:\*?=[^\r\n";]*|="[^\r\n"]*"))*\r\n"""
_HEAD = re.compile(rb"\r\n" + _OTHERS + _NAMED + _FILE + _OTHERS + rb"\r\n", re.IGNORECASE)


def check_form(content_type: bytes, body: bytes, withheld: Collection[str]) -> None:
    """Raise ApiError 400 unless every reader finds the same fields in this form, and none of these among them."""
    if (told := _TYPE.fullmatch(content_type)) is None:
        shown = quoted(content_type.decode("latin-1"))
        raise invalid(f"the Content-Type is {shown}; a form's is multipart/form-data with a boundary, and nothing else")
    refused = {*withheld, *NESTING} if TRANSFER[0] in withheld else set(withheld)
    mark = b"--" + told[2]
    at, parts = body.find(mark), 0
    if at < 0 or at > MOST_BEFORE or body[:at].strip(b"\r\n"):
        raise invalid("the body is no form: it does not begin with the boundary that the Content-Type names")
    while at >= 0:
        at, parts = at + len(mark), parts + 1
        if not body.startswith(b"--", at):
            head = _HEAD.match(body, at)
            if head is None or parts > MOST_PARTS:
                why = f"it begins with no Content-Disposition and a plain name, or there are more than {MOST_PARTS}"
                raise invalid(f"part {parts} of the form cannot be read: {why}")
            if (name := head[2].decode()) in refused:
                raise invalid(f"the form sets {name}, which only the router may; leave it out", name)
            at = head.end()
        at = body.find(mark, at)
