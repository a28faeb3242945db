"""Fair shares: how far a tenant's next prompt stands back because the tenant was given more than its share.

A tenant leads by the tokens that it was given beyond its share of the replicas: its lead grows with what its requests
compute and generate, and shrinks at the speed of its share, which depends on how many others have asked lately. A
prompt counts as come later by the time in which the others could catch up. So tenants within their shares come first,
a tenant beyond still gets its share, and nobody whose prompts need not wait notices anything.

A replica computes by what it was told with each prompt. So a tenant that is alone for the moment leaves room for one
more. Bursts are no matter: only a lead that keeps all replicas busy for a while counts.
"""

from collections.abc import Sequence
from math import inf

from msgspec import Struct

from router.placement.cost import ASSUMED_TOKENS_PER_S, COMPUTE_WEIGHT, FLOODED_WEIGHT, Candidate, Tenant

BURST_S = 2.0  # a lead of this much work for all replicas at once is nobody's business
ACTIVE_S = 10.0  # after its last request a tenant takes part in the shares
GENERATED_WEIGHT = 2.0  # a generated token costs this many computed ones
COLD = 0.1  # prompts of which less than this was asked for before do not come again
COLD_PAGES = 128.0  # so much is known by about that many pages
MAX_TENANTS = 4096  # the most tenants of one model; others are not counted


class Lead(Struct, gc=False):
    """One tenant's lead at a moment."""

    weight: float
    tokens: float
    at_s: float
    asked_s: float
    again: float = 1.0  # the part of its prompts' pages that were asked for before, of late


class _Leads(Struct):
    """The leads of one model's tenants."""

    of: dict[str, Lead] = {}  # leads by tenant
    active: dict[str, Lead] = {}  # tenants that have asked lately; who asked last is last
    weight: float = 0.0  # the weights of the active ones, added up
    cold_s: float = -inf  # the last cold prompt

    def asked(self, name: str, lead: Lead, weight: float, now_s: float) -> None:
        self._leaves(name)
        lead.weight, lead.asked_s = weight, now_s
        self.active[name] = lead
        self.weight += weight

    def weight_beside(self, name: str, now_s: float) -> float:
        """The weight of all others that have asked lately."""
        while self.active:
            first, lead = next(iter(self.active.items()))
            if lead.asked_s > now_s - ACTIVE_S:
                break
            self._leaves(first)
        own = self.active.get(name)
        return self.weight if own is None else self.weight - own.weight if len(self.active) > 1 else 0.0

    def _leaves(self, name: str) -> None:
        lead = self.active.pop(name, None)
        if lead is not None:
            self.weight = self.weight - lead.weight if self.active else 0.0

    def forget(self, now_s: float) -> None:
        self.weight_beside("", now_s)
        self.of = dict(self.active)


class Shares:
    def __init__(self) -> None:
        self.routers = 1  # routers that place requests of the same tenants, as a load balancer deals them
        self.others_may_come = False  # there are several tenants, though they may not have asked yet
        self._leads: dict[str, _Leads] = {}  # each model's

    def behind_s(self, tenant: Tenant, candidates: Sequence[Candidate], now_s: float) -> float:
        """Return how much later than its arrival a prompt of this tenant counts as come."""
        leads = self._leads.get(tenant.model)
        if leads is None or (len(leads.of) < 2 and not self.others_may_come):
            return 0.0
        lead = leads.of.get(tenant.name)
        if lead is None or not lead.tokens:
            return 0.0
        if not any(candidate.queue_positions.waiting or candidate.waiting for candidate in candidates):
            lead.tokens = 0.0  # there is room for everybody: nobody is given what another one lacks
            return 0.0
        others = leads.weight_beside(tenant.name, now_s)
        rate = sum(one.prefill_tokens_per_s or ASSUMED_TOKENS_PER_S for one in candidates) / self.routers
        shrunk = max(0.0, now_s - lead.at_s) * rate * lead.weight / (lead.weight + others)
        lead.tokens, lead.at_s = max(0.0, lead.tokens - shrunk), now_s
        if not others and self.others_may_come:
            others = lead.weight  # a tenant who may come
        return max(0.0, lead.tokens / rate - BURST_S) * others / lead.weight

    def asked(self, tenant: Tenant, tokens: float, now_s: float) -> None:
        leads = self._leads.get(tenant.model)
        if leads is None:
            leads = self._leads[tenant.model] = _Leads()
        lead = leads.of.get(tenant.name)
        if lead is None:
            if len(leads.of) >= MAX_TENANTS:
                leads.forget(now_s)
            if len(leads.of) >= MAX_TENANTS:
                return
            lead = leads.of[tenant.name] = Lead(tenant.weight, 0.0, now_s, now_s)
        leads.asked(tenant.name, lead, tenant.weight, now_s)
        lead.tokens += tokens

    def found(self, tenant: Tenant, pages: int, again: int) -> None:
        """Note how many pages of a prompt were asked for before."""
        lead = self._lead(tenant)
        if lead is not None and pages:
            lead.again += (again / pages - lead.again) * min(1.0, pages / COLD_PAGES)

    def is_cold(self, tenant: Tenant, now_s: float) -> bool:
        """Tell whether what its prompt computes will not be asked for again, as far as those before it tell."""
        lead = self._lead(tenant)
        if lead is None or lead.again >= COLD:
            return False
        self._leads[tenant.model].cold_s = now_s
        return True

    def weight(self, model: str, now_s: float) -> float:
        """The weight of a token to compute, for all tenants."""
        leads = self._leads.get(model)
        return COMPUTE_WEIGHT if leads is None or leads.cold_s <= now_s - ACTIVE_S else FLOODED_WEIGHT

    def used(self, tenant: Tenant, computed: int, generated: int) -> None:
        """Count tokens of an answer that has ended, and those of its prompt that nobody had foreseen."""
        self._add(tenant, computed + GENERATED_WEIGHT * generated)

    def spared(self, tenant: Tenant, tokens: float) -> None:
        """Take back tokens that were never computed."""
        self._add(tenant, -tokens)

    def _add(self, tenant: Tenant, tokens: float) -> None:
        lead = self._lead(tenant)
        if lead is not None:
            lead.tokens = max(0.0, lead.tokens + tokens)

    def _lead(self, tenant: Tenant) -> Lead | None:
        leads = self._leads.get(tenant.model)
        return None if leads is None else leads.of.get(tenant.name)
