"""The split of a replica over ranks: their specifications, and how the costs that they report
decide the layers of each stage. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvtransfer.common.faults import FaultRule
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ITEM_BYTES, ReplicaIdentity
from kvtransfer.rpc.trust import TrustFiles
from workers.config import EngineConfig, Parallel
from workers.errors import CheckpointError
from workers.messages.rank_channel import RankJoined, RankSpec, StageCost, StepPace
from workers.model.gguf.gguf_checkpoint import checkpoint_of
from workers.model.ignored_keys import ignored_keys
from workers.model.kv_form import KvForm, ScaledParts
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.quantization.form_on_device import form_on_device
from workers.model.rank_memory import RankShape
from workers.model.sizes import ModelWork, last_stage_limit, refuse_stages
from workers.model.weight_bytes import WeightBytes
from workers.replica.expert_copies import ExpertCopies
from workers.replica.layer_split import Stages, given_layers, split_layers

_DECODE_PROBE_ROWS = 16
_DISTURBED = 1.7
_NO_LIMITS = GroupShares()

_log = logging.getLogger("tandem.engine_core")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """The specification that a replica is started with."""

    identity: ReplicaIdentity
    pool: str
    role: str
    # The folder of the model's checkpoint.
    model_dir: str
    dtype: str
    # As in `RankSpec`.
    weight_dtype: str = "auto"
    parallel: Parallel
    engine: EngineConfig
    # Above 0, `engine.kv_tokens` is the most, and ranks on CUDA take what is left of this share of their
    # device's memory.
    kv_share: float = 0.0
    # The KV blocks that each sharing group may use.
    group_shares: GroupShares = _NO_LIMITS
    transfer: TransferConfig
    trust: TrustFiles
    # The address at which it listens for gateways, peers and its ranks.
    host: str = "127.0.0.1"
    # The socket of the node's store (None: there is none).
    store: str | None = None
    # As in `RankSpec`.
    store_kv_dtype: str = "auto"
    faults: Sequence[FaultRule] = ()
    pace: StepPace | None = None
    # As in `RankSpec`.
    gguf_file: str = ""
    model_cache: str = ""
    frees_windows: bool = False


class Shape:
    """The tp x pp ranks of a replica. `stages` and `attention_ratio` are known when all ranks have joined."""

    def __init__(self, spec: ReplicaSpec) -> None:
        parallel, engine = spec.parallel, spec.engine
        self.parallel = parallel
        self.stages: Stages = ()
        self.attention_ratio = 0.0
        self._name = spec.identity.replica_id
        self._model_dir = spec.model_dir
        self._item_bytes, self._kv_dtype = ITEM_BYTES[spec.dtype], engine.kv_dtype
        self._spec = spec
        # Ranks of several stages measure a step: of a decode replica a small one, of which all rows sample,
        # else a chunk, of which one does.
        is_decode = spec.role == "decode"
        num_rows = min(_DECODE_PROBE_ROWS, engine.max_sequences) if is_decode else engine.longest_chunk_tokens
        self.specs = [
            RankSpec(
                replica=spec.identity,
                rank=rank,
                tp=parallel.tp,
                pp=parallel.pp,
                engine_core_address="",
                trust=spec.trust,
                model_dir=spec.model_dir,
                dtype=spec.dtype,
                device=parallel.devices[rank // parallel.tp],
                num_threads=engine.num_threads,
                block_tokens=engine.block_tokens,
                num_kv_tokens=engine.kv_tokens,
                kv_share=spec.kv_share,
                num_offload_tokens=engine.offload_tokens,
                max_batch_tokens=engine.max_batch_tokens,
                max_sequences=engine.max_sequences,
                transfer=spec.transfer.settings(),
                probe_rows=num_rows if parallel.pp > 1 else 0,
                probe_sampled_rows=num_rows if is_decode else 1,
                deterministic=engine.deterministic,
                faults=tuple(spec.faults),
                pace=spec.pace,
                gguf_file=spec.gguf_file,
                model_cache=spec.model_cache,
                expert_offload=engine.expert_offload,
                ep=parallel.ep,
                frees_windows=spec.frees_windows,
                expert_copies=engine.expert_copies,
                kv_dtype=engine.kv_dtype,
                weight_dtype=spec.weight_dtype,
                state_snapshots=engine.num_state_snapshots,
                store_kv_dtype=spec.store_kv_dtype if spec.store else "auto",
                latent_kv=engine.latent_kv,
                mixed_graphs=engine.mixed_graphs,
            )
            for rank in range(parallel.num_ranks)
        ]

    @property
    def records(self) -> KvForm | None:
        """The form of KV in the store; None: that of the device."""
        engine, config = self._spec.engine, read_model_config(Path(self._model_dir))
        form = ScaledParts.in_store(config, self._spec.store_kv_dtype, engine.kv_dtype)
        return None if form is None else form.record_form

    @property
    def work(self) -> ModelWork:
        """The costs of the model's steps, where weights have the form of the first rank's."""
        config = read_model_config(Path(self._model_dir))
        return ModelWork(config, self._item_bytes, self._kv_dtype, self._weight_bytes(config))

    def _weight_bytes(self, config: ModelConfig) -> WeightBytes:
        """Return the mean bytes of weights at a rank, as stored floats where their files are not on this
        host."""
        spec, parallel, engine = self._spec, self.parallel, self._spec.engine
        rank = RankShape(
            config,
            0,
            config.num_layers,
            tp=parallel.tp,
            ep=parallel.ep,
            expert_offload=engine.expert_offload,
            expert_copies=engine.expert_copies,
        )
        form = form_on_device(spec.weight_dtype, parallel.devices[0].partition(":")[0])
        try:
            checkpoint = checkpoint_of(Path(spec.gguf_file or spec.model_dir))
        except CheckpointError:
            return WeightBytes.of_floats(self._item_bytes)
        return checkpoint.mean_bytes(rank, self._item_bytes, form)

    def expert_copies(self, num_slots: int, now: float) -> ExpertCopies:
        """Return the orders of copies of experts, with `num_slots` for them in each layer of each rank."""
        config = read_model_config(Path(self._model_dir))
        return ExpertCopies.of(config, self.parallel.ep, num_slots, self._item_bytes, now)

    def plan_stages(self, joined: Sequence[RankJoined]) -> Stages:
        """Return the layers of each stage: as configured, or so that the slowest stage is as fast as it can
        be."""
        self.attention_ratio = median(rank.attention_ratio for rank in joined)
        config = read_model_config(Path(self._model_dir))
        num_layers = config.num_layers
        refuse_stages(config, self.parallel.pp, self.parallel.layers)
        for key, why in ignored_keys(Path(self._model_dir)).items():
            _log.warning("%s: %s of config.json is ignored: %s", self._name, key, why)
        if self.parallel.layers:
            self.stages = given_layers(num_layers, self.parallel.layers)
        else:
            devices = [spec.device for spec in self.specs]
            costs = _steady_costs(devices, [rank.cost for rank in joined])
            self.stages = split_layers(num_layers, costs[:: self.parallel.tp], last_stage_limit(config))
        if self.parallel.pp > 1:
            _log.info("%s: layers of the stages: %s", self._name, self.stages)
        return self.stages


def _steady_costs(devices: Sequence[str], costs: Sequence[StageCost]) -> list[StageCost]:
    """Return the costs of each rank. Ranks measure at once and disturb each other: on devices of one name
    they count as equal to the fastest, unless the difference is too large for equal devices."""
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
