"""Sample answers of a router: replicas and decisions."""

from typing import Any

import msgspec

from router.responses import Considered, DecisionRecord, FeedState, Index, Load, ReplicaStatus, Served


def a_replica(name: str = "r0", **changes: Any) -> ReplicaStatus:
    usual = ReplicaStatus(
        name=name,
        url=f"http://{name}:8000",
        engine="warmroute",
        models=["demo"],
        state="exact",
        block_size=16,
        load=Load(prefill_tokens_per_s=8000.0, total_blocks=1000),
        index=Index(blocks={"GPU": 250}, prompt_blocks={"GPU": 250}),
        standing="exact",
        events=FeedState(seq=10),
        heard_age_s=0.1,
        served=Served(),
    )
    return msgspec.structs.replace(usual, **changes)


def a_decision(**changes: Any) -> DecisionRecord:
    usual = DecisionRecord(
        ts=0.0,
        request_id="req-1",
        model="demo",
        policy="cost",
        chosen="r0",
        prompt_tokens=1200,
        predicted_cached_tokens=1024,
        reported_cached_tokens=1030,
        estimated_ttft_s=0.01,
        ttft_s=0.05,
        duration_s=1.5,
        status=200,
        candidates=[Considered("r0", 1024, 0.05), Considered("r1", 0, 0.25)],
    )
    return msgspec.structs.replace(usual, **changes)
