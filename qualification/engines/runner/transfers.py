"""The worker's side of vLLM's OffloadingConnector: its own, but blocks are copied at once and without bytes."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Transfers that have finished as soon as they are submitted."""

    def __init__(self) -> None:
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ARG002
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        return self.submit_store(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class Transfers:
    """Runs vLLM's own order of a step: loads, then the stores of the step before, then what has finished."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        spec = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, kv_cache_config))
        self._connector = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)
        self._connector.worker = Copies()

    def step(self, scheduled: Any) -> KVConnectorOutput:
        """Carry out a step's transfers."""
        jobs = scheduled.kv_connector_metadata
        if jobs.jobs_to_flush:
            self._connector.handle_preemptions(jobs)
        self._connector.start_kv_transfers(jobs)
        self._connector.prepare_store_kv(jobs)
        sent, received = self._connector.get_finished(scheduled.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_worker_meta=self._connector.build_connector_worker_meta(),
        )
