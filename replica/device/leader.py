"""A model on several GPUs of one machine: this process has the first, and each follower another one."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch

from api.process.own_folder import OwnFolder
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Span
from replica.device.build import Team, build_with
from replica.device.collectives import NCCL, DeviceGroup
from replica.device.orders import Build, Capture, Load, Measure, Meet, Order, decode_measured
from replica.device.parts import Parts
from replica.device.ranks_memory import Lane, RanksMemory
from replica.device.runner import DeviceRunner
from replica.device.steps import Computed, Steps
from replica.lora.adapter import Adapters
from replica.model.config import read_config
from replica.parallel.adapters import OthersAdapters, refuse_other_files
from replica.parallel.followers import NOTICED_AFTER_S, Followers, Start
from replica.parallel.group import RankLostError
from replica.parallel.messages import Logits, decode_answer
from replica.parallel.ranks import LeadingRanks
from replica.parallel.shares import OPTION, Share, refuse_what_does_not_divide

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
        runner = build_with(config, accelerator, leader)
    except BaseException:
        leader.close()
        raise
    runner.adapters.others = OthersAdapters(leader.followers)
    return runner


class Leader(Team):
    def __init__(self, config: EngineConfig, accelerator: Accelerator, program: str, backend: str) -> None:
        """Start the followers, and wait until all have met. ValueError, OSError: they cannot."""
        model_config, self.share = read_config(Path(config.model_path)), Share(0, config.tensor_parallel_size)
        refuse_what_does_not_divide(model_config, self.share.size)
        part_bytes = config.block_size * self.share.own(model_config).kv_bytes_per_token(config.dtype)
        with ExitStack() as undo:
            self._folder = undo.enter_context(closing(OwnFolder("warmroute-ranks-")))
            self._lanes = [undo.enter_context(closing(Lane(self.share.size - 1, part_bytes))) for _ in range(2)]
            ends = zip(*(lane.ends for lane in self._lanes), strict=True)
            starts = [Start(Load(config, rank, *both), [*both[0], *both[1]]) for rank, both in enumerate(ends, start=1)]
            self.followers = undo.enter_context(closing(Followers(program, starts)))
            for lane in self._lanes:
                lane.give()
            self.followers.watch(NOTICED_AFTER_S)  # who waits for the others to meet hears of nothing else
            self.followers.answers(decode_answer)
            file = self._folder.path / "meeting"
            self.followers.tell(Meet(str(file)))
            try:
                self._group = DeviceGroup(self.share, file, accelerator, backend)
            except RuntimeError as error:
                raise OSError(f"the engine's {self.share.size} ranks cannot meet: {error}") from error
            undo.pop_all()
        self.ranks = LeadingRanks(self.share, model_config, self._group, lambda rows: self.followers.tell(Logits(rows)))

    def wait_loaded(self, adapters: Adapters) -> None:
        refuse_other_files(adapters, self.followers.answers(decode_answer))
        self.followers.patience_s = 0.0

    def runner(self, parts: Parts, config: EngineConfig, accelerator: Accelerator, blocks: int) -> DeviceRunner:
        self.followers.tell(Build(blocks))
        steps, memory = parts.with_kv(blocks, config, accelerator, LeadingSteps)
        steps.leader = self
        self.followers.answers(decode_answer)
        return DeviceRunner(steps, RanksMemory(memory, *self._lanes))

    def spans(self) -> list[Span]:
        self.followers.tell(Measure())
        return [answer.span for answer in self.followers.answers(decode_measured)]

    def close(self) -> None:
        self.followers.close()
        self._group.close()
        self._folder.close()
        for lane in self._lanes:
            lane.close()


class LeadingSteps(Steps):
    """Each step is also an order to the followers."""

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
