"""The processes that compute one model together (tensor parallelism), as the model sees them."""

from torch import Tensor

from replica.model.shares import WHOLE


class Ranks:
    """Each rank holds a part of every matrix; results are whole on all, except where noted. Here is only one."""

    share = WHOLE

    def cut(self, projection: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return this rank's part of an adapter's factors for a projection."""
        return down, up

    def look_up(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        """Return the embeddings, of which this rank holds those of its part of the vocabulary."""
        return embedding[token_ids]

    def add(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return partial

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor, which those of the others become."""
        return tensor

    def spread(self, hidden: Tensor) -> Tensor:
        """Return the first rank's rows, after it has told the others that there are some."""
        return hidden

    def join(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary on the first rank; the others get their own part."""
        return logits


ALONE = Ranks()
