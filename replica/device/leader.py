"""A model on several GPUs of one machine: this process has the first, and each follower another one."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch

from api.process.own_folder import OwnFolder
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Span
from replica.device.build import Team, build_with
from replica.device.followers import NOTICED_AFTER_S, Followers
from replica.device.orders import (
    Build,
    Capture,
    Load,
    Logits,
    Measure,
    Meet,
    Order,
    decode_answer,
    decode_measured,
)
from replica.device.parts import Parts
from replica.device.ranks import NCCL, DeviceGroup, LeadingRanks, RankLostError
from replica.device.runner import DeviceRunner
from replica.device.steps import Computed, Steps
from replica.lora.adapter import Adapters
from replica.model.config import read_config
from replica.model.shares import OPTION, Share, refuse_what_does_not_divide

PROGRAM = "replica.device.follower"


def lead(config: EngineConfig) -> DeviceRunner:
    there = torch.cuda.device_count()
    if there < config.tensor_parallel_size:
        raise ValueError(
            f"{OPTION} {config.tensor_parallel_size}: this replica sees {there} GPUs (CUDA_VISIBLE_DEVICES); "
            f"give {there} or less, or let it see more"
        )
    return lead_with(config, Accelerator())


def lead_with(
    config: EngineConfig, accelerator: Accelerator, program: str = PROGRAM, backend: str = NCCL
) -> DeviceRunner:
    """Start the followers, and load what each of them computes."""
    leader = Leader(config, accelerator, program, backend)
    try:
        return build_with(config, accelerator, leader)
    except BaseException:
        leader.close()
        raise


class Leader(Team):
    def __init__(self, config: EngineConfig, accelerator: Accelerator, program: str, backend: str) -> None:
        """Start the followers, and wait until all have met. ValueError, OSError: they cannot."""
        model_config, share = read_config(Path(config.model_path)), Share(0, config.tensor_parallel_size)
        refuse_what_does_not_divide(model_config, share.size)
        with ExitStack() as undo:
            self._folder = undo.enter_context(closing(OwnFolder("warmroute-ranks-")))
            starts = [Load(config, rank) for rank in range(1, share.size)]
            self.followers = undo.enter_context(closing(Followers(program, starts)))
            self.followers.watch(NOTICED_AFTER_S)  # who waits for the others to meet hears of nothing else
            self.followers.answers(decode_answer)
            file = self._folder.path / "meeting"
            self.followers.tell(Meet(str(file)))
            try:
                self._group = DeviceGroup(share, file, accelerator, backend)
            except RuntimeError as error:
                raise OSError(f"the engine's {share.size} ranks cannot meet: {error}") from error
            undo.pop_all()
        self.ranks = LeadingRanks(share, model_config, self._group, lambda rows: self.followers.tell(Logits(rows)))

    def wait_loaded(self, adapters: Adapters) -> None:
        for other in self.followers.answers(decode_answer):
            for name, adapter in adapters.loaded.items():
                if other.adapters[name] != adapter.digest:
                    raise ValueError(f"the files of the adapter {name!r} changed while they were read; try again")
        self.followers.patience_s = 0.0

    def runner(self, parts: Parts, config: EngineConfig, accelerator: Accelerator, blocks: int) -> DeviceRunner:
        self.followers.tell(Build(blocks))
        steps, _ = parts.with_kv(blocks, config, accelerator, LeadingSteps)
        steps.leader = self
        self.followers.answers(decode_answer)
        return DeviceRunner(steps)

    def spans(self) -> list[Span]:
        self.followers.tell(Measure())
        return [answer.span for answer in self.followers.answers(decode_measured)]

    def close(self) -> None:
        self.followers.close()
        self._group.close()
        self._folder.close()


class LeadingSteps(Steps):
    leader: Leader

    def run(self, order: Order) -> Computed:
        self.leader.followers.tell(order)
        try:
            return super().run(order)
        except RankLostError as error:
            self.leader.followers.give_up(error)

    def capture(self, order: Capture) -> None:
        self.leader.followers.tell(order)
        super().capture(order)

    def close(self) -> None:
        self.leader.close()
