"""A watched request is placed by what a file says of it."""

from collections import Counter

import msgspec
from msgspec import Raw

from lab.shadow.incoming import Incoming
from lab.shadow.placing import Placing
from tests.router.scripted import chat, named, served


async def test_a_replica_is_known_by_its_name_and_the_name_it_gives_itself() -> None:
    replica = named("r0")
    async with served(replica) as running:
        member = running.member("r0")
        member.spec = msgspec.structs.replace(member.spec, topic="kv@demo-0@m")
        placing = Placing(running.router, Counter())
        for told in ("r0", "demo-0", "demo-1", "demo-1"):
            request = Incoming(raw_body=Raw(msgspec.json.encode(chat())), replica=told)
            await placing.take(request)
        found = [(one.replica, one.source) for one in placing.records]
        assert found == [("r0", "told"), ("r0", "told"), (None, None), (None, None)]
        assert placing.unnamed == {"demo-1": 2}
