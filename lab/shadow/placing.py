"""Makes a record of each request that comes: its prompt, and warmroute's choice by the caches of this moment."""

import logging
import re
import time
from array import array
from collections import Counter

from api.errors import ApiError
from api.generation_apis import PATHS
from lab.shadow.incoming import Incoming
from lab.shadow.record import AtOnce, Record, Records
from lab.shadow.whereabouts import Whereabouts
from router.core import Router
from router.http.explaining import api_of, read_prompt
from router.members.members import Member, ServedModel
from router.placement.decision import Decision
from router.placement.index import APPROXIMATE
from router.prompts.prompt import Peek, Prompt
from router.proxy.admission import Admitted
from router.proxy.headers import session_of

LATE_S = 1.0  # after that, the caches may have changed, by this very request for one
SCHEME = re.compile("^https?://")
MOST_WHY = 64  # reasons that are told apart
OWN_MISTAKE = "failed here"

log = logging.getLogger(__name__)


class Placing:
    def __init__(self, router: Router, skipped: Counter[str]) -> None:
        self.records = Records()
        self.seen = 0
        self.late = 0
        self.approximate: Counter[str] = Counter()  # prompts by reason
        self.unnamed: Counter[str] = Counter()  # requests by a told replica that is not here
        self._router = router
        self._skipped = skipped
        self.whereabouts = Whereabouts(self._holders, self._name_of)

    async def take(self, incoming: Incoming) -> None:
        """Place a request, and keep its record; count it as skipped if it cannot be placed."""
        self.seen += 1
        path = PATHS.get(incoming.path)
        try:
            api = api_of(None if path is None else path.name, incoming.body)
            peek, prompt = await read_prompt(self._router, incoming.body, Admitted(incoming.request_id), api)
            model = self._router.members.model(peek.model)
            self._keep(incoming, peek, prompt, model)
        except ApiError as error:
            self._skipped[error.code or f"status {error.status}"] += 1
        except Exception:  # a mistake of our own costs only this request
            if not self._skipped[OWN_MISTAKE]:  # logged once
                log.exception("A request could not be placed; more of them are only counted")
            self._skipped[OWN_MISTAKE] += 1

    def _keep(self, incoming: Incoming, peek: Peek, prompt: Prompt, model: ServedModel) -> None:
        if not prompt.exact:
            known = len(self.approximate) < MOST_WHY
            self.approximate[(prompt.why_not or "") if known else "other reasons"] += 1
        size = max(model.slots, default=APPROXIMATE) if prompt.exact else APPROXIMATE
        record = Record(
            ts=incoming.ts,
            request_id=incoming.request_id or f"#{self.seen}",
            model=prompt.model,
            tokens=prompt.tokens,
            block_tokens=size,
            keys=array("Q", prompt.keys(size)),
            exact=prompt.exact,
            cached_tokens=incoming.cached_tokens,
            output_tokens=incoming.output_tokens,
            ttft_s=incoming.ttft_s,
        )
        self.records.add(record)
        self._locate(record, incoming.replica, is_late := time.time() - incoming.ts > LATE_S)
        if is_late:
            self.late += 1
        elif prompt.exact:
            session = session_of(incoming.headers, peek.prompt_cache_key)
            decision, _ = self._router.decide(model, prompt, None if session is None else session.key)
            record.at_once = at_once(decision)

    def _locate(self, record: Record, told: str | None, is_late: bool) -> None:
        """Note where it went if that is told; else look for it, if it has only just come."""
        member = None if told is None else self._named(told)
        if member is not None:
            record.replica, record.source = member.name, "told"
            return
        if told is not None and (told in self.unnamed or len(self.unnamed) < MOST_WHY):
            self.unnamed[told] += 1
        if not is_late and record.block_tokens != APPROXIMATE:
            self.whereabouts.seek(record, self._router.now_s())

    def _named(self, told: str) -> Member | None:
        """The replica of this name or address, or that gives itself this name in its topic, as those of a fleet do."""
        members = self._router.members
        found = members.by_name.get(SCHEME.sub("", told).rstrip("/"))
        return found or next((one for one in members if (one.spec.topic or "").split("@")[1:2] == [told]), None)

    def _holders(self, block_size: int, key: int) -> int:
        [mask] = self._router.placement.index_of(block_size).holders([key])
        return mask

    def _name_of(self, slot: int) -> str | None:
        return next((member.name for member in self._router.members if member.slot == slot), None)


def at_once(decision: Decision) -> AtOnce | None:
    """The choice, with the tokens of the prompt that each replica need not compute; None if no replica takes it."""
    if decision.chosen is None:
        return None
    tokens = decision.question.tokens
    hits = {
        one.name: max(0.0, tokens - decision.portions_of(index)[-1].tokens)
        for index, one in enumerate(decision.candidates)
    }
    return AtOnce(decision.chosen.name, hits)
