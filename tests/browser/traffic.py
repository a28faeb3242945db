"""Conversations with three applications, so that prompts share what prompts share: instructions, and what was said.

    python -m tests.browser.traffic URL SECONDS

keeps asking for so long.
"""

import asyncio
import random
import sys
from typing import Any

import httpx2

SUPPORT = (
    "You are a support agent of Example Shop. Answer in two sentences, name the order, and say what happens next. "
    "Never promise a refund before the order was looked up. If the parcel is late, say when it was handed over, "
    "who carries it, and how the customer can follow it. Be kind, and do not repeat the question. "
)
REVIEWER = (
    "You are a code reviewer. Say what is wrong with the patch, quote the line, and suggest a better one. "
    "Begin with what would break, then what is slow, and leave taste to the end. One paragraph for each finding; "
    "if there is nothing to say, say so. Names are part of the code: mind them. "
)
TRANSLATOR = (
    "Translate what the user writes from German to English. Keep numbers, names and line breaks as they are, and add "
    "nothing of your own. Where a word has several meanings, take the one that a newspaper would mean. "
)
APPLICATIONS = ((SUPPORT, 6), (REVIEWER, 3), (TRANSLATOR, 1))  # and how often each is asked
DOCUMENTS = tuple(
    f"{title} " + words * 12
    for title, words in (
        ("Order 1 of last week:", "one lamp, blue, one chair, broken on arrival, the customer wants another one. "),
        ("Order 2 of last week:", "two cups, lost by the carrier, paid by card, to be sent again tomorrow. "),
        ("Order 3 of last week:", "a table, delivered to the neighbour, who knows nothing of it at all. "),
    )
)
QUESTIONS = (
    "Where is it now?",
    "And if it does not come by Friday?",
    "Can it be changed to another colour?",
    "What did you say about the price?",
    "Thank you. Is there anything else to know?",
)


async def talk(http: Any, chance: random.Random, turns: int, output_tokens: int) -> None:
    """One conversation, its answers in the next prompt; it is given up when the router is gone."""
    [system] = chance.choices([text for text, _ in APPLICATIONS], [weight for _, weight in APPLICATIONS])
    messages = [{"role": "system", "content": system + chance.choice(DOCUMENTS)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": chance.choice(QUESTIONS)})
        body = {"model": "demo", "messages": messages, "max_tokens": output_tokens}
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return
        messages.append(answer.json()["choices"][0]["message"])


async def ask(
    url: str, talks: int, *, clients: int = 3, seed: int = 1, turns: int = 3, output_tokens: int = 24
) -> None:
    """So many conversations, some at a time."""
    waiting = iter(range(talks))

    async def client(http: Any) -> None:
        for number in waiting:
            await talk(http, random.Random(f"{seed} {number}"), turns, output_tokens)

    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))


async def ask_for(url: str, seconds: float, clients: int = 3) -> None:
    loop = asyncio.get_running_loop()
    end_s, seed = loop.time() + seconds, 0
    while loop.time() < end_s:
        try:
            await ask(url, clients, clients=clients, seed=seed)
        except httpx2.TransportError:
            await asyncio.sleep(0.5)
        seed += 1


if __name__ == "__main__":
    asyncio.run(ask_for(sys.argv[1], float(sys.argv[2])))
