"""A file of usage as a router keeps it, made up: weeks with quiet ends, and keys of very different sizes."""

import random
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from router.tenants.usage import Batch, Counts, Row, UsageFile, day_of

KEYS = ("support-bot", "code-review", "search", "translations", "nightly-evals", "alice", "bob", "")
MODELS = ("llama-3.3-70b", "qwen3-8b")
PREFILL_TOKENS_PER_S = 9000
WEEKEND = 5
SMALLEST = 0.02  # of the largest key


def made_up(path: Path, days: int, keys: tuple[str, ...] = KEYS, models: tuple[str, ...] = MODELS) -> None:
    """Write `days` days of usage that end today; the same for the same arguments."""
    chance = random.Random(1)
    today = day_of(time.time())
    with closing(UsageFile(str(path))) as file:
        for ago in reversed(range(days)):
            day = today - timedelta(days=ago)
            trend = (0.35 if day.weekday() >= WEEKEND else 1.0) * (1.0 - ago / days * 0.5)
            rows = [
                Row(day.isoformat(), key, model, counted(chance, trend * max(SMALLEST, 0.6**place) / (1 + rank)))
                for place, key in enumerate(keys)
                for rank, model in enumerate(models)
            ]
            file.write(Batch(rows.copy, number=ago + 1))


def counted(chance: random.Random, scale: float) -> Counts:
    requests = int(scale * chance.uniform(3000, 5000)) + 1
    prompt = requests * chance.randrange(2000, 4000)
    cached = int(prompt * chance.uniform(0.4, 0.85))
    errors = int(requests * chance.uniform(0, 0.01))
    return Counts(
        requests=requests,
        client_errors=errors,
        server_errors=errors // 4,
        computed_tokens=prompt - cached,
        cached_tokens=cached,
        generated_tokens=requests * chance.randrange(200, 400),
        first_tokens=requests - errors,
        first_token_s=requests * chance.uniform(0.15, 0.45),
        saved_s=cached / PREFILL_TOKENS_PER_S,
    )
