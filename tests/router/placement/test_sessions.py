"""Sessions wait to begin while those that have begun do not fit into the caches, and nobody is held before that."""

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.placement.ages import CacheAges, Reuse
from router.placement.cost import Candidate, Question, Tenant
from router.placement.outbox import PeerTurn
from router.placement.sessions import GONE_S, MAX_WAIT_S, Turn, WorkingSet, name_of

PAGE = 1024
CACHE = 64 * PAGE
PARTIES = ("ann", "bob", "eve")
NAMES = [f"s{number}" for number in range(8)]


def replica(tokens: float = CACHE) -> Candidate:
    candidate = Candidate("r0", 0, ages=CacheAges(Reuse()))
    assert candidate.ages is not None
    candidate.ages.describe(16, tokens)
    return candidate


class Scene:
    def __init__(self) -> None:
        self.it, self.candidates, self.now_s = WorkingSet(Reuse()), [replica()], 0.0
        self.candidates[0].assigned_tokens = 1e9  # it is busy

    def asks(self, session: str | None, tokens: int = 16 * PAGE, party: str = "ann", within: str = "") -> Question:
        tenant = Tenant(party)
        return Question(tokens, {}, session=session, within=within or None, tenant=tenant, now_s=self.now_s)

    def turn(self, question: Question, lost: float = 0.0) -> Turn:
        """Let a turn begin and end; `lost`: the part of what was computed before that was computed again."""
        turn = self.begin(question)
        turn.ended(self.now_s)
        self.it.computed(turn, round(lost * question.tokens), 0, self.now_s)
        return turn

    def begin(self, question: Question, page: int = 1) -> Turn:
        party = "" if question.tenant is None else question.tenant.name
        told = PeerTurn("m", party, name_of(question) if question.session else "", question.tokens, 0.0)
        return self.it.turn(told, [page, page + 1], question.tokens, "r0", self.now_s)

    def tick(self) -> list[str]:
        return self.it.tick(self.now_s, self.candidates)

    def crowd(self) -> list[Turn]:
        """Let sessions lose each other's KV until new ones are held; return their turns, which go on."""
        self.turn(self.asks("old"))
        self.tick()
        for number in range(40):
            self.turn(self.asks(f"old{number % 8}"), lost=0.5)
        running = [self.begin(self.asks(f"old{number}")) for number in range(8)]
        self.tick()
        assert self.it.is_on
        return running


def test_nobody_is_held_while_nothing_is_lost_however_many_there_are() -> None:
    scene = Scene()
    for number in range(200):
        question = scene.asks(f"s{number % 50}")
        scene.tick()
        assert scene.it.may_begin(question)
        scene.turn(question, lost=0.05)
    assert scene.it.bound_tokens == 0


def test_nobody_is_held_while_replicas_could_compute_far_more() -> None:
    for rate in (1e4, 1e5):
        scene = Scene()
        scene.candidates[0].assigned_tokens, scene.candidates[0].prefill_tokens_per_s = 0.0, rate
        for number in range(40):
            scene.now_s += 1.0  # a first token may be on its way all the time
            scene.tick()
            scene.turn(scene.asks("s"), lost=0.5)
            scene.begin(scene.asks(f"old{number % 8}"))
        assert scene.it.is_on is (rate == 1e4) and scene.it.lost == 0.5


def test_only_new_sessions_with_a_name_are_held() -> None:
    scene = Scene()
    scene.crowd()
    assert not scene.it.may_begin(scene.asks("new"))
    assert scene.it.may_begin(scene.asks("old3")), "it has begun"
    assert scene.it.may_begin(scene.asks("its agent", within="old3"))
    assert not scene.it.may_begin(scene.asks("an agent", within="new"))
    assert not scene.it.may_begin(scene.asks("old3", party="bob")), "another tenant calls its own like that"
    assert scene.it.may_begin(scene.asks(None))
    assert scene.it.may_begin(scene.asks("chat", tokens=CACHE // 200))


def test_a_session_begins_when_others_were_silent_for_long_and_its_client_is_told_when_to_come() -> None:
    scene = Scene()
    running = scene.crowd()
    scene.it.wait(scene.asks("new"), until_s=30.0)
    scene.it.wait(scene.asks("newer"), until_s=1e9)
    scene.now_s = 30.0
    assert scene.tick() == []
    assert 1.0 <= scene.it.come_again_s("ann/new", scene.now_s) <= MAX_WAIT_S
    for turn in running:
        turn.ended(scene.now_s)
    scene.now_s += 2 * MAX_WAIT_S
    assert scene.tick() == ["ann/newer"], "the other one's client is not there"
    assert not scene.it.waiting, "and its place in the line is lost by now"
    assert scene.it.may_begin(scene.asks("new"))


def test_the_tenant_with_the_least_goes_first_whoever_floods() -> None:
    scene = Scene()
    running = scene.crowd()  # all of them are ann's
    for number in range(30):
        scene.it.wait(scene.asks(f"ann{number}"), until_s=1e9)
    scene.now_s += 1
    for number in range(3):
        scene.it.wait(scene.asks(f"bob{number}", party="bob"), until_s=1e9)
    for turn in running[:4]:
        turn.ended(scene.now_s)
    scene.now_s += 60.0
    assert scene.tick() == ["bob/bob0"]


def test_beside_a_flood_each_other_tenant_begins_within_as_many_begins_as_there_are_tenants() -> None:
    scene, others = Scene(), [f"tenant{number}" for number in range(9)]
    scene.crowd()
    for number in range(100):
        scene.it.wait(scene.asks(f"s{number}", party="eve"), until_s=1e9)
    begun, came = ["ann"], dict[str, int]()
    while scene.it.waiting:
        for party in set(others[: len(begun) // 2]) - came.keys():  # they come when more and more of eve's have begun
            scene.it.wait(scene.asks("own", party=party), until_s=1e9)
            came[party] = len(begun)
        scene.now_s += GONE_S + 1  # what has begun is silent, and what runs goes on
        begun += [name.partition("/")[0] for name in scene.tick()]
        for session in scene.it.sessions.values():
            session.running = 0
    assert begun.count("eve") == 100
    assert all(begun.index(party) - came[party] <= len(others) + 1 for party in others)


class Sessions(RuleBasedStateMachine):
    """Whatever comes, a session that has begun goes on, and what is counted is what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.begun: set[str] = set()
        self.running: list[Turn] = []

    @rule(
        name=strategies.sampled_from(NAMES),
        party=strategies.sampled_from(PARTIES),
        tokens=strategies.integers(1, 2 * CACHE),
    )
    def ask(self, name: str, party: str, tokens: int) -> None:
        it, question = self.scene.it, self.scene.asks(name, tokens, party)
        may_begin = it.may_begin(question)
        assert may_begin or f"{party}/{name}" not in self.begun, "a session was stopped in the middle"
        if may_begin:
            self.begun.add(f"{party}/{name}")
            self.running.append(self.scene.begin(question, tokens))
        else:
            it.wait(question, self.scene.now_s + 30.0)

    @rule(page=strategies.integers(0, 5), tokens=strategies.integers(1, CACHE))
    def ask_without_a_name(self, page: int, tokens: int) -> None:
        question = self.scene.asks(None, tokens)
        assert self.scene.it.may_begin(question)
        self.running.append(self.scene.begin(question, page))

    @precondition(lambda self: self.running)
    @rule(draw=strategies.data(), lost=strategies.floats(0, 1))
    def end(self, draw: strategies.DataObject, lost: float) -> None:
        turn = self.running.pop(draw.draw(strategies.integers(0, len(self.running) - 1)))
        turn.ended(self.scene.now_s)
        self.scene.it.computed(turn, round(lost * turn.tokens), 0, self.scene.now_s)

    @rule(seconds=strategies.sampled_from((0.25, 20.0, 2 * GONE_S)))
    def tick(self, seconds: float) -> None:
        self.scene.now_s += seconds
        waited = set(self.scene.it.waiting)
        begun = self.scene.tick()
        assert set(begun) <= waited and waited >= set(self.scene.it.waiting)
        self.begun.update(begun)

    @rule(name=strategies.sampled_from(NAMES), party=strategies.sampled_from(PARTIES))
    def send_away(self, name: str, party: str) -> None:
        assert 1.0 <= self.scene.it.come_again_s(f"{party}/{name}", self.scene.now_s) <= MAX_WAIT_S

    @invariant()
    def holds(self) -> None:
        it = self.scene.it
        assert not self.begun & set(it.waiting)
        assert it.active_tokens >= 0 and it.bound > 0
        assert all(one.running >= 0 for one in it.sessions.values())
        rows = it.rows(self.scene.now_s, 100)["sessions"]
        assert len(rows) == min(100, len(it.waiting)) + min(100, len(it.sessions))
        assert all((row.get("gap_s") or 0.0) >= 0 for row in rows)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(deadline=None)
