"""The hit that is expected at the replica chosen for a prompt, and the one that its engine reports; of both halves."""

from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from router.members.feed import Moment
from router.members.members import Member
from router.placement.classes import Outlook
from router.placement.decision import Decision, Prediction
from router.placement.elsewhere import Split
from router.placement.index import APPROXIMATE
from router.prompts.prompt import Prompt


class Exactness(Struct, frozen=True, gc=False):
    """The parts of a prediction that are exact, each said by itself."""

    tokens: bool = False  # the prompt's
    index: bool = False  # the chosen replica's cache
    prediction: bool = False  # the tokens cached there: both are, and by confirmed events alone
    why_not: str | None = None


ALL_EXACT = Exactness(True, True, True)
UNSURE = "it rests on prompts just sent there that no event has confirmed"
LOWER = "it counts on lower media, from which the replica may load less"
PULLED = "the replica may read more from a neighbour, if that comes in time"
SEVERAL = "it asks for several choices: later ones find the first one's blocks, and the replica tells the hit of one"
UNPREDICTED = (
    "no hit is predicted: engines compute a prompt to score it, its form is not verified there, or its KV was fetched "
    "from another replica"
)
_UNSET: Any = None  # until a replica was looked for


class PredictedHit(Struct, eq=False):
    prompt: Prompt = _UNSET
    decision: Decision = _UNSET  # the last one
    member: Member | None = None  # the last choice
    prediction: Prediction | None = None  # its cached blocks there; None: only guessed, or not looked for
    predicted_at: Moment | None = None  # the moment in the replica's stream
    index_doubt: str | None = None  # why the index may have differed from the replica's cache
    reported_tokens: int | None = None
    outlook: Outlook | None = None  # its expected beginning; None: it has no class

    @property
    def cached_tokens(self) -> int:
        """The tokens that the replica had cached: as it reports, else as was predicted."""
        if self.reported_tokens is not None:
            return self.reported_tokens
        return 0 if self.prediction is None else self.prediction.blocks * self.prediction.block_size

    @property
    def block_size(self) -> int:
        return self.member.block_size if self.member is not None and self.prompt.exact else APPROXIMATE

    @property
    def is_comparable(self) -> bool:
        """True if the report is about the prompt of the prediction, and that alone."""
        return self.prediction is not None and self.reported_tokens is not None and self.prompt.choices == 1

    @property
    def exactness(self) -> Exactness:
        prompt, prediction = self.prompt, self.prediction
        tokens = prompt.exact and prompt.doubt is None
        known = tokens and self.index_doubt is None
        if known and prediction is not None and prediction.sure and prompt.choices == 1:
            return ALL_EXACT
        if known:
            why: str | None = UNPREDICTED
            if prompt.choices > 1:
                why = SEVERAL
            elif prediction is not None and prediction.pulls:
                why = PULLED
            elif prediction is not None:
                why = LOWER if prediction.claimed_blocks == prediction.blocks else UNSURE
        else:
            why = self.index_doubt if tokens else prompt.why_not or prompt.doubt
        return Exactness(tokens, self.index_doubt is None, False, why)


# How the half at the other replica ended: its KV was handed over; the replica refused, was lost or took too long; its
# answer had no parameters; its KV could not be read; the client left.
PrefillOutcome: TypeAlias = Literal["handed", "refused", "lost", "late", "nothing", "unread", "left"]


class PrefillHalf(Struct, eq=False):
    """The choice where a prompt is computed, and what became of it at another replica."""

    split: Split | None = None  # the last choice
    outcome: PrefillOutcome | None = None  # None: none was sent, or it is under way
    duration_s: float = 0.0
    at_replica: PredictedHit = field(default_factory=PredictedHit)

    @property
    def hit(self) -> PredictedHit | None:
        """The hit there, if the last choice was another replica."""
        is_sent = self.at_replica.member is not None and self.split is not None and self.split.prefill is not None
        return self.at_replica if is_sent else None
