"""The reconciler in a world where replicas come up, fail, are lost and vanish as they like, as do controllers."""

from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from fleet.control.reconcile import Begin, Kept, Reconciler, Replica, Stop
from fleet.host.report import Life, ReplicaAddress, Report
from fleet.plan import FleetPlan, ModelPlan

NAMES = ("m", "a/b", "a-b")  # the names of the last two's replicas fall together
ENOUGH = 100  # rounds for everything to come to rest

which = st.integers(0, 99)
plans = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.integers(0, 4), st.sampled_from(["", "", "--other"])), max_size=3
)


class One:
    """A replica as the world has it: written as plainly as possible."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.there = True  # False: it vanished, and is to be begun again
        self.old = False  # a restart was asked for, or its plan changed, since it was begun
        self.leaving = False
        self.stopped = False  # this controller said so
        self.life: Life | None = None  # as it was reported
        self.lost = False
        self.drained = False
        self.unheard = False  # by this controller

    @property
    def serves(self) -> bool:
        return self.there and self.life == "ready" and not (self.lost or self.drained or self.leaving)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.it = Reconciler()
        self.plans: dict[str, ModelPlan] = {}
        self.counts: dict[str, int] = {}
        self.surges: dict[str, int] = {}
        self.ones: dict[str, One] = {}
        self.ending = False
        self.want({"m": (3, "")})
        self.everything_goes_well()

    def of(self, model: str) -> list[One]:
        return [one for one in self.ones.values() if one.plan.name == model and not one.leaving]

    def count(self, model: str) -> int:
        return 0 if self.ending else self.counts.get(model, 0)

    def choose(self, which: int) -> tuple[str, One]:
        return list(self.ones.items())[which % len(self.ones)]

    # ---- what is wanted

    @rule(wanted=plans)
    def want(self, wanted: dict[str, tuple[int, str]]) -> None:
        before, self.plans = self.plans, {}
        for name, (count, option) in wanted.items():
            plan = ModelPlan(name=name, model="demo", replicas=count, options=(option,) if option else ())
            self.plans[name] = plan
            if name not in before or before[name].replicas != count:
                self.counts[name] = count
            if name in before and before[name].options != plan.options:
                self._all_are_old(name, 0)
        for name in before.keys() - wanted.keys():
            del self.counts[name]
            self.surges.pop(name, None)
            for one in self.of(name):
                one.leaving = True
        self.ending = False
        self.it.want(FleetPlan(models=tuple(self.plans.values())))

    @precondition(lambda self: self.plans)
    @rule(which=which, count=st.integers(0, 4))
    def scale(self, which: int, count: int) -> None:
        model = list(self.plans)[which % len(self.plans)]
        self.counts[model] = count
        self.it.scale(model, count)

    @precondition(lambda self: self.plans)
    @rule(which=which, surge=st.integers(0, 2))
    def restart(self, which: int, surge: int) -> None:
        model = list(self.plans)[which % len(self.plans)]
        self._all_are_old(model, surge)
        self.it.restart(model, surge)

    def _all_are_old(self, model: str, surge: int) -> None:
        self.surges[model] = surge
        for one in self.of(model):
            one.old = True

    @precondition(lambda self: self.ones)
    @rule(which=which, drained=st.booleans())
    def drain(self, which: int, drained: bool) -> None:
        name, one = self.choose(which)
        one.drained = drained
        self.it.drain(name, drained)

    @rule(really=st.integers(0, 5))
    def end(self, really: int) -> None:
        if not really:
            self.ending = True
            self.it.end()

    # ---- what becomes of them

    @precondition(lambda self: self.ones)
    @rule(which=which, life=st.sampled_from(["ready", "ready", "ready", "starting", "failing", "draining"]))
    def says(self, which: int, life: Any) -> None:
        name, one = self.choose(which)
        if one.there:
            one.life, one.lost, one.unheard = life, False, False
            place = ReplicaAddress(url=f"http://h/{name}", model="demo") if life in ("ready", "draining") else None
            self.it.reported(name, Report(name=name, host="h", life=life, place=place))

    @precondition(lambda self: self.ones)
    @rule(which=which)
    def does_not_answer(self, which: int) -> None:
        name, one = self.choose(which)
        if one.there:
            one.lost = True
            self.it.lost(name, "no answer")

    @precondition(lambda self: self.ones)
    @rule(which=which)
    def vanishes(self, which: int) -> None:
        name, one = self.choose(which)
        if not one.there:
            return
        self.it.gone(name)
        one.there, one.life, one.lost, one.unheard = False, None, False, False
        if one.leaving:
            del self.ones[name]

    @rule()
    def those_that_were_stopped_end(self) -> None:
        for name in [name for name, one in self.ones.items() if one.stopped]:
            self.it.gone(name)
            del self.ones[name]

    @rule()
    def another_controller_takes_over(self) -> None:
        """Nothing is decided without being kept afterwards, so that what vanished is known to be begun again."""
        self.decide()
        kept = self.it.kept()
        self.it = Reconciler(msgspec.json.decode(msgspec.json.encode(kept), type=Kept))
        assert msgspec.json.encode(self.it.kept()) == msgspec.json.encode(kept)
        for one in self.ones.values():
            one.stopped, one.unheard = False, True

    # ---- what is decided

    @rule()
    def decide(self) -> None:
        served = {model: sum(one.serves for one in self.of(model)) for model in NAMES}
        before = {model: [one for one in self.of(model) if one.there or not one.old] for model in NAMES}
        taken = dict.fromkeys(NAMES, 0)
        actions = self.it.decide()
        for action in actions:
            if isinstance(action, Begin):
                self._begun(action)
            else:
                one = self._stopped(action)
                taken[one.plan.name] += one in before[one.plan.name] and one.there and self._did_serve(one)
        for name in [name for name, one in self.ones.items() if not one.there]:
            del self.ones[name]  # it vanished, and was not wanted any more
        for model in NAMES:
            self._check_taken(model, before[model], served[model], taken[model])
        self._check_counts()

    def _begun(self, action: Begin) -> None:
        task = action.task
        known = self.ones.get(task.name)
        assert known is None or not known.there, f"{task.name} is started while it runs"
        assert task.plan == self.plans[task.plan.name], f"{task.name} is started from an old plan"
        if known is None or known.old or known.leaving or known.plan.name != task.plan.name:
            self.ones[task.name] = One(task.plan)
        else:  # it goes on under its name, drained if it was
            known.there = True

    def _stopped(self, action: Stop) -> One:
        one = self.ones[action.name]
        assert one.there and not one.stopped, f"{action.name} is stopped twice"
        one.leaving = one.stopped = True
        return one

    @staticmethod
    def _did_serve(one: One) -> bool:
        return one.life == "ready" and not (one.lost or one.drained)

    def _check_taken(self, model: str, before: list[One], served: int, taken: int) -> None:
        """Scaling down keeps the desired number serving; a restart stops one only while all others serve."""
        count, old = self.count(model), sum(one.old for one in before)
        surge = min(self.surges.get(model, 0), old)
        if old > count or len(before) > count + surge:
            known = not any(one.unheard for one in before)
            assert served - taken >= min(served, count) or not known, (
                f"{model}: {taken} of {served} serving replicas were stopped"
            )
        elif taken:
            assert taken == 1 and served == count + surge, f"{model}: one was stopped while only {served} served"

    def _check_counts(self) -> None:
        for model in NAMES:
            wanted = self.count(model)
            surge = min(self.surges.get(model, 0), sum(one.old for one in self.of(model)))
            assert len(self.of(model)) <= wanted + surge
            assert sum(not one.old for one in self.of(model)) <= wanted, "more new replicas than desired"
        assert {name for name, one in self.ones.items() if one.leaving} == {
            name for name, replica in self.it.replicas.items() if replica.leaving
        }

    # ---- how it ends

    @rule()
    def everything_goes_well(self) -> None:
        for round_ in range(ENOUGH):
            self.decide()
            stopping = [name for name, one in self.ones.items() if one.stopped]
            if not stopping and round_ and self._at_rest():
                break
            self.those_that_were_stopped_end()
            for number, one in enumerate(self.ones.values()):
                self.says(number, "ready")
                if one.drained:
                    self.drain(number, False)
        assert self._at_rest(), {name: vars(one) for name, one in self.ones.items()}
        members = self.it.members()
        assert sorted(member["name"] for member in members) == sorted(self.ones)
        assert not any(member["draining"] for member in members)

    def _at_rest(self) -> bool:
        """The fleet is exactly in its desired state."""
        return all(len(self.of(model)) == self.count(model) for model in NAMES) and all(
            one.serves and not one.old and one.plan.options == self.plans[one.plan.name].options
            for one in self.ones.values()
        )

    def teardown(self) -> None:
        self.everything_goes_well()


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=max(100, settings().max_examples))  # an example is over soon


def test_a_reconciler_that_takes_whoever_is_lost_for_dead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Replica, "serves", property(lambda replica: 2 * replica.ready))
    quick = settings(phases=(Phase.generate,), max_examples=500, derandomize=True, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(World, settings=quick)
