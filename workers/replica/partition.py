"""How a replica is split over ranks: their specifications, and which layers each stage gets. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kvtransfer.config import TransferConfig
from kvtransfer.faults import FaultRule
from kvtransfer.messages import ReplicaIdentity
from workers.config import EngineConfig, Parallel
from workers.messages import RankJoined, RankSpec, StageCost
from workers.model.config import read_model_config
from workers.model.ignored import ignored_keys
from workers.model.work import ModelWork
from workers.stages import Stages, given_layers, split_layers

_DECODE_PROBE_ROWS = 16
_DISTURBED = 1.7
_FOUR_BYTES = ("float32", "fp32")

_log = logging.getLogger("tandem.brain")


class Shape:
    """The tp x pp ranks of a replica. `stages` and `attention_ratio` are known when all ranks have joined."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        role: str,
        model_dir: str,
        dtype: str,
        parallel: Parallel,
        engine: EngineConfig,
        transfer: TransferConfig,
        secret: bytes,
        faults: Sequence[FaultRule],
    ) -> None:
        self.parallel = parallel
        self.stages: Stages = ()
        self.attention_ratio = 0.0
        self._name = identity.replica_id
        self._model_dir = model_dir
        self._item_bytes = 4 if dtype in _FOUR_BYTES else 2
        # Ranks of several stages measure a step: of a decode replica a small one, of which all rows sample,
        # else a chunk, of which one does.
        is_decode = role == "decode"
        num_rows = min(_DECODE_PROBE_ROWS, engine.max_sequences) if is_decode else engine.longest_chunk_tokens
        self.specs = [
            RankSpec(
                replica=identity,
                rank=rank,
                tp=parallel.tp,
                pp=parallel.pp,
                brain_address="",
                secret=secret,
                model_dir=model_dir,
                dtype=dtype,
                device=parallel.devices[rank // parallel.tp],
                num_threads=engine.num_threads,
                block_tokens=engine.block_tokens,
                num_kv_tokens=engine.kv_tokens,
                num_offload_tokens=engine.offload_tokens,
                max_batch_tokens=engine.max_batch_tokens,
                max_sequences=engine.max_sequences,
                transfer=transfer.settings(),
                probe_rows=num_rows if parallel.pp > 1 else 0,
                probe_sampled_rows=num_rows if is_decode else 1,
                faults=tuple(faults),
            )
            for rank in range(parallel.num_ranks)
        ]

    @property
    def work(self) -> ModelWork:
        """What the model's steps cost."""
        return ModelWork(read_model_config(Path(self._model_dir)), self._item_bytes)

    def plan_stages(self, joined: Sequence[RankJoined]) -> Stages:
        """The layers of each stage: as configured, or so that the slowest stage is as fast as it can be."""
        self.attention_ratio = median(rank.attention_ratio for rank in joined)
        num_layers = read_model_config(Path(self._model_dir)).num_layers
        for key, why in ignored_keys(Path(self._model_dir)).items():
            _log.warning("%s: %s of config.json is ignored: %s", self._name, key, why)
        if self.parallel.layers:
            self.stages = given_layers(num_layers, self.parallel.layers)
        else:
            devices = [spec.device for spec in self.specs]
            costs = _steady_costs(devices, [rank.cost for rank in joined])
            self.stages = split_layers(num_layers, costs[:: self.parallel.tp])
        if self.parallel.pp > 1:
            _log.info("%s: layers of the stages: %s", self._name, self.stages)
        return self.stages


def _steady_costs(devices: Sequence[str], costs: Sequence[StageCost]) -> list[StageCost]:
    """Of each rank. Ranks measure at once and disturb each other: on devices of one name they count as equal
    to the fastest, unless they are so much slower that the devices must differ."""
    best = {
        device: min((cost for name, cost in zip(devices, costs, strict=True) if name == device), key=_layer_s)
        for device in devices
    }
    return [
        best[device] if cost.layer_s <= _DISTURBED * best[device].layer_s else cost
        for device, cost in zip(devices, costs, strict=True)
    ]


def _layer_s(cost: StageCost) -> float:
    return cost.layer_s
