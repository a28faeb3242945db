"""`python -m tests.docs.traces KIND FILE`: a small trace of Mooncake's kind, as pages take for granted."""

import gzip
import json
import sys
from pathlib import Path

from tests.lab.traffic import agents, conversations

KINDS = {"agents": agents, "conversations": conversations}


def write(kind: str, path: Path, requests: int = 200) -> None:
    lines = [
        {
            "timestamp": round(request.at_s * 1000),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.blocks),
        }
        for request in KINDS[kind](requests).requests
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
