from collections import Counter

from router.placement.policy import Ring

NAMES = [f"replica-{number}" for number in range(8)]
SESSIONS = [f"session-{number}" for number in range(4000)]


def owners(ring: Ring) -> dict[str, str]:
    return {session: next(ring.walk(session)) for session in SESSIONS}


def test_every_replica_gets_about_its_share() -> None:
    shares = Counter(owners(Ring(NAMES)).values())
    assert set(shares) == set(NAMES)
    assert max(shares.values()) < 1.5 * len(SESSIONS) / len(NAMES)


def test_removing_a_replica_moves_only_its_sessions() -> None:
    before = owners(Ring(NAMES))
    after = owners(Ring(name for name in NAMES if name != NAMES[3]))
    assert all(after[session] == owner for session, owner in before.items() if owner != NAMES[3])
    assert NAMES[3] not in after.values()


def test_a_walk_names_every_replica_once() -> None:
    assert sorted(Ring(NAMES).walk("anyone")) == NAMES
    assert list(Ring().walk("anyone")) == []
