from cluster.proto.tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_ROLE_UNSPECIFIED: _ClassVar[ReplicaRole]
    REPLICA_ROLE_PREFILL: _ClassVar[ReplicaRole]
    REPLICA_ROLE_DECODE: _ClassVar[ReplicaRole]
    REPLICA_ROLE_BOTH: _ClassVar[ReplicaRole]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_LEAVING: _ClassVar[ReplicaState]
    REPLICA_STATE_CONNECTING: _ClassVar[ReplicaState]
    REPLICA_STATE_REFUSED: _ClassVar[ReplicaState]
REPLICA_ROLE_UNSPECIFIED: ReplicaRole
REPLICA_ROLE_PREFILL: ReplicaRole
REPLICA_ROLE_DECODE: ReplicaRole
REPLICA_ROLE_BOTH: ReplicaRole
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_LEAVING: ReplicaState
REPLICA_STATE_CONNECTING: ReplicaState
REPLICA_STATE_REFUSED: ReplicaState

class RecordingRequest(_message.Message):
    __slots__ = ("last_s",)
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    last_s: float
    def __init__(self, last_s: _Optional[float] = ...) -> None: ...

class RecordingPart(_message.Message):
    __slots__ = ("gateway_id", "requests", "block_tokens", "complete_since", "problem")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SINCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    block_tokens: int
    complete_since: float
    problem: str
    def __init__(self, gateway_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping[str, object]]]] = ..., block_tokens: _Optional[int] = ..., complete_since: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("arrived_at", "state", "code", "tenant", "service_class", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_samples", "max_output_tokens", "ttft_s", "e2e_s", "block_ids")
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    arrived_at: float
    state: str
    code: str
    tenant: str
    service_class: _inference_pb2.ServiceClass
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_samples: int
    max_output_tokens: int
    ttft_s: float
    e2e_s: float
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arrived_at: _Optional[float] = ..., state: _Optional[str] = ..., code: _Optional[str] = ..., tenant: _Optional[str] = ..., service_class: _Optional[_Union[_inference_pb2.ServiceClass, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("model", "replicas", "gateways", "uptime_s", "versions", "num_running_requests", "num_finished_requests", "num_failed_requests", "ready", "num_cancelled_requests", "stores", "pools", "scaling_changes", "traffic", "demand", "wall_time_s", "recent", "prefixes", "authentication", "app", "quotas")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TrafficEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SCALING_CHANGES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATION_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    model: _inference_pb2.Model
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    uptime_s: float
    versions: _containers.ScalarMap[str, str]
    num_running_requests: int
    num_finished_requests: int
    num_failed_requests: int
    ready: bool
    num_cancelled_requests: int
    stores: _containers.RepeatedCompositeFieldContainer[StoreMember]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    scaling_changes: _containers.RepeatedCompositeFieldContainer[ScalingChange]
    traffic: _containers.ScalarMap[str, float]
    demand: Demand
    wall_time_s: float
    recent: RecentRequests
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixReuse]
    authentication: str
    app: str
    quotas: _containers.RepeatedCompositeFieldContainer[TenantQuota]
    def __init__(self, model: _Optional[_Union[_inference_pb2.Model, _Mapping[str, object]]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping[str, object]]]] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping[str, object]]]] = ..., uptime_s: _Optional[float] = ..., versions: _Optional[_Mapping[str, str]] = ..., num_running_requests: _Optional[int] = ..., num_finished_requests: _Optional[int] = ..., num_failed_requests: _Optional[int] = ..., ready: _Optional[bool] = ..., num_cancelled_requests: _Optional[int] = ..., stores: _Optional[_Iterable[_Union[StoreMember, _Mapping[str, object]]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping[str, object]]]] = ..., scaling_changes: _Optional[_Iterable[_Union[ScalingChange, _Mapping[str, object]]]] = ..., traffic: _Optional[_Mapping[str, float]] = ..., demand: _Optional[_Union[Demand, _Mapping[str, object]]] = ..., wall_time_s: _Optional[float] = ..., recent: _Optional[_Union[RecentRequests, _Mapping[str, object]]] = ..., prefixes: _Optional[_Iterable[_Union[PrefixReuse, _Mapping[str, object]]]] = ..., authentication: _Optional[str] = ..., app: _Optional[str] = ..., quotas: _Optional[_Iterable[_Union[TenantQuota, _Mapping[str, object]]]] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("tenant", "used", "num_refused")
    class UsedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class NumRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    used: _containers.ScalarMap[str, float]
    num_refused: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., used: _Optional[_Mapping[str, float]] = ..., num_refused: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RecentRequests(_message.Message):
    __slots__ = ("num_requests", "window_s", "ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms", "slow_ttft_ms", "slow_queue_ms", "slow_prefill_ms", "slow_prompt_tokens", "slow_cached_tokens", "transfer_p90_ms", "num_retried")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P90_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P90_MS_FIELD_NUMBER: _ClassVar[int]
    SLOW_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLOW_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOW_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    SLOW_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOW_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_P90_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIED_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    window_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    slow_ttft_ms: float
    slow_queue_ms: float
    slow_prefill_ms: float
    slow_prompt_tokens: int
    slow_cached_tokens: int
    transfer_p90_ms: float
    num_retried: int
    def __init__(self, num_requests: _Optional[int] = ..., window_s: _Optional[float] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p90_ms: _Optional[float] = ..., tpot_p50_ms: _Optional[float] = ..., tpot_p90_ms: _Optional[float] = ..., slow_ttft_ms: _Optional[float] = ..., slow_queue_ms: _Optional[float] = ..., slow_prefill_ms: _Optional[float] = ..., slow_prompt_tokens: _Optional[int] = ..., slow_cached_tokens: _Optional[int] = ..., transfer_p90_ms: _Optional[float] = ..., num_retried: _Optional[int] = ...) -> None: ...

class PrefixReuse(_message.Message):
    __slots__ = ("tenant", "num_prompts", "num_prompt_tokens", "num_known_tokens", "num_finished_tokens", "num_finished_known_tokens", "num_cached_tokens", "diverge_at", "num_diverging", "num_tokens_behind", "num_repeated_behind")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIVERGE_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_DIVERGING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    NUM_REPEATED_BEHIND_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_prompts: int
    num_prompt_tokens: int
    num_known_tokens: int
    num_finished_tokens: int
    num_finished_known_tokens: int
    num_cached_tokens: int
    diverge_at: int
    num_diverging: int
    num_tokens_behind: int
    num_repeated_behind: int
    def __init__(self, tenant: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_known_tokens: _Optional[int] = ..., num_finished_tokens: _Optional[int] = ..., num_finished_known_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., diverge_at: _Optional[int] = ..., num_diverging: _Optional[int] = ..., num_tokens_behind: _Optional[int] = ..., num_repeated_behind: _Optional[int] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("num_arrived", "num_sequences", "num_prompts", "num_computed_tokens", "computed_tokens_squared", "num_ended", "num_output_tokens", "output_tokens_squared", "num_first_tokens", "num_late_first_tokens", "num_gaps", "num_late_gaps", "num_refused")
    NUM_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_SQUARED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_SQUARED_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GAPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_GAPS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_arrived: int
    num_sequences: int
    num_prompts: int
    num_computed_tokens: int
    computed_tokens_squared: float
    num_ended: int
    num_output_tokens: int
    output_tokens_squared: float
    num_first_tokens: int
    num_late_first_tokens: int
    num_gaps: int
    num_late_gaps: int
    num_refused: int
    def __init__(self, num_arrived: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_prompts: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., computed_tokens_squared: _Optional[float] = ..., num_ended: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., output_tokens_squared: _Optional[float] = ..., num_first_tokens: _Optional[int] = ..., num_late_first_tokens: _Optional[int] = ..., num_gaps: _Optional[int] = ..., num_late_gaps: _Optional[int] = ..., num_refused: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "role", "configured", "desired", "pinned", "min", "max", "num_ready", "num_reassigned", "num_recent_prompts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_REASSIGNED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: ReplicaRole
    configured: int
    desired: int
    pinned: bool
    min: int
    max: int
    num_ready: int
    num_reassigned: int
    num_recent_prompts: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[ReplicaRole, str]] = ..., configured: _Optional[int] = ..., desired: _Optional[int] = ..., pinned: _Optional[bool] = ..., min: _Optional[int] = ..., max: _Optional[int] = ..., num_ready: _Optional[int] = ..., num_reassigned: _Optional[int] = ..., num_recent_prompts: _Optional[int] = ...) -> None: ...

class ScalingChange(_message.Message):
    __slots__ = ("at", "pool", "before", "after", "by", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: float
    pool: str
    before: int
    after: int
    by: str
    reason: str
    def __init__(self, at: _Optional[float] = ..., pool: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "epoch", "pool", "role", "address", "state", "note", "process_id", "rank_process_ids", "load", "tp", "stage_layers", "home_role", "role_epoch", "held", "ep")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_PROCESS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    STAGE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HOME_ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    epoch: int
    pool: str
    role: ReplicaRole
    address: str
    state: ReplicaState
    note: str
    process_id: int
    rank_process_ids: _containers.RepeatedScalarFieldContainer[int]
    load: Load
    tp: int
    stage_layers: _containers.RepeatedScalarFieldContainer[int]
    home_role: ReplicaRole
    role_epoch: int
    held: Held
    ep: int
    def __init__(self, replica_id: _Optional[str] = ..., epoch: _Optional[int] = ..., pool: _Optional[str] = ..., role: _Optional[_Union[ReplicaRole, str]] = ..., address: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., note: _Optional[str] = ..., process_id: _Optional[int] = ..., rank_process_ids: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[Load, _Mapping[str, object]]] = ..., tp: _Optional[int] = ..., stage_layers: _Optional[_Iterable[int]] = ..., home_role: _Optional[_Union[ReplicaRole, str]] = ..., role_epoch: _Optional[int] = ..., held: _Optional[_Union[Held, _Mapping[str, object]]] = ..., ep: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("num_prompts", "num_tokens", "num_sequences")
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_prompts: int
    num_tokens: int
    num_sequences: int
    def __init__(self, num_prompts: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_landings", "num_backlog_tokens", "num_free_blocks", "num_cached_blocks", "num_quarantined_blocks", "num_total_blocks", "num_leaked_blocks", "prefill_tok_s", "decode_step_ms", "num_steps", "num_checksum_failures", "num_preemptions", "transfer_gb_s", "age_s", "num_stored_blocks", "num_unstored_blocks", "num_loaded_tokens", "load_tok_s", "num_store_checksum_failures", "num_offloaded_blocks", "num_waiting_landings", "backend", "expert_imbalance", "expert_rank_imbalance", "num_idle_experts", "hottest_expert_layer", "hottest_expert", "hottest_expert_share", "expert_uncopied_imbalance", "num_expert_copies", "layers_token_bytes", "layers_sequence_bytes", "num_layers_blocks", "num_free_layers_blocks", "num_cached_layers_blocks", "num_snapshot_hits", "num_snapshot_misses", "num_recomputed_tokens", "num_stored_states", "num_evicted_snapshot_tokens", "prefill_token_s", "attention_token_s", "decode_base_s", "decode_sequence_s", "decode_context_s", "max_sequences", "max_batch_tokens", "num_context_tokens", "tpot_objective_s")
    class NumUnstoredBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumLoadedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LoadTokSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LayersTokenBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LayersSequenceBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumLayersBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumFreeLayersBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumCachedLayersBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_LANDINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOK_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_GB_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STORE_CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_LANDINGS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANK_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_IDLE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_EXPERT_LAYER_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_EXPERT_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_EXPERT_SHARE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_UNCOPIED_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_COPIES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SEQUENCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_LAYERS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_LAYERS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_SNAPSHOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_landings: int
    num_backlog_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    num_total_blocks: int
    num_leaked_blocks: int
    prefill_tok_s: float
    decode_step_ms: float
    num_steps: int
    num_checksum_failures: int
    num_preemptions: int
    transfer_gb_s: float
    age_s: float
    num_stored_blocks: int
    num_unstored_blocks: _containers.ScalarMap[str, int]
    num_loaded_tokens: _containers.ScalarMap[str, int]
    load_tok_s: _containers.ScalarMap[str, float]
    num_store_checksum_failures: int
    num_offloaded_blocks: int
    num_waiting_landings: int
    backend: str
    expert_imbalance: float
    expert_rank_imbalance: float
    num_idle_experts: int
    hottest_expert_layer: int
    hottest_expert: int
    hottest_expert_share: float
    expert_uncopied_imbalance: float
    num_expert_copies: int
    layers_token_bytes: _containers.ScalarMap[str, int]
    layers_sequence_bytes: _containers.ScalarMap[str, int]
    num_layers_blocks: _containers.ScalarMap[str, int]
    num_free_layers_blocks: _containers.ScalarMap[str, int]
    num_cached_layers_blocks: _containers.ScalarMap[str, int]
    num_snapshot_hits: int
    num_snapshot_misses: int
    num_recomputed_tokens: int
    num_stored_states: int
    num_evicted_snapshot_tokens: int
    prefill_token_s: float
    attention_token_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_context_s: float
    max_sequences: int
    max_batch_tokens: int
    num_context_tokens: int
    tpot_objective_s: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_landings: _Optional[int] = ..., num_backlog_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_leaked_blocks: _Optional[int] = ..., prefill_tok_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_checksum_failures: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., transfer_gb_s: _Optional[float] = ..., age_s: _Optional[float] = ..., num_stored_blocks: _Optional[int] = ..., num_unstored_blocks: _Optional[_Mapping[str, int]] = ..., num_loaded_tokens: _Optional[_Mapping[str, int]] = ..., load_tok_s: _Optional[_Mapping[str, float]] = ..., num_store_checksum_failures: _Optional[int] = ..., num_offloaded_blocks: _Optional[int] = ..., num_waiting_landings: _Optional[int] = ..., backend: _Optional[str] = ..., expert_imbalance: _Optional[float] = ..., expert_rank_imbalance: _Optional[float] = ..., num_idle_experts: _Optional[int] = ..., hottest_expert_layer: _Optional[int] = ..., hottest_expert: _Optional[int] = ..., hottest_expert_share: _Optional[float] = ..., expert_uncopied_imbalance: _Optional[float] = ..., num_expert_copies: _Optional[int] = ..., layers_token_bytes: _Optional[_Mapping[str, int]] = ..., layers_sequence_bytes: _Optional[_Mapping[str, int]] = ..., num_layers_blocks: _Optional[_Mapping[str, int]] = ..., num_free_layers_blocks: _Optional[_Mapping[str, int]] = ..., num_cached_layers_blocks: _Optional[_Mapping[str, int]] = ..., num_snapshot_hits: _Optional[int] = ..., num_snapshot_misses: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_stored_states: _Optional[int] = ..., num_evicted_snapshot_tokens: _Optional[int] = ..., prefill_token_s: _Optional[float] = ..., attention_token_s: _Optional[float] = ..., decode_base_s: _Optional[float] = ..., decode_sequence_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ..., max_sequences: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., tpot_objective_s: _Optional[float] = ...) -> None: ...

class PathsRequest(_message.Message):
    __slots__ = ("replica_ids",)
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReplicaPaths(_message.Message):
    __slots__ = ("replica_id", "epoch", "paths")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    epoch: int
    paths: _containers.RepeatedCompositeFieldContainer[Path]
    def __init__(self, replica_id: _Optional[str] = ..., epoch: _Optional[int] = ..., paths: _Optional[_Iterable[_Union[Path, _Mapping[str, object]]]] = ...) -> None: ...

class Path(_message.Message):
    __slots__ = ("peer_replica_id", "rank", "peer_rank", "transport", "gb_s", "latency_us", "device", "instead_of")
    PEER_REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GB_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_FIELD_NUMBER: _ClassVar[int]
    peer_replica_id: str
    rank: int
    peer_rank: int
    transport: str
    gb_s: float
    latency_us: float
    device: str
    instead_of: str
    def __init__(self, peer_replica_id: _Optional[str] = ..., rank: _Optional[int] = ..., peer_rank: _Optional[int] = ..., transport: _Optional[str] = ..., gb_s: _Optional[float] = ..., latency_us: _Optional[float] = ..., device: _Optional[str] = ..., instead_of: _Optional[str] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "epoch", "address", "process_id", "console", "admin", "num_running_requests", "num_finished_requests", "num_failed_requests", "num_cancelled_requests", "note", "has_tls", "unheard", "quota_note", "admission", "outcomes")
    class UnheardEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    CONSOLE_FIELD_NUMBER: _ClassVar[int]
    ADMIN_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    HAS_TLS_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    QUOTA_NOTE_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    epoch: int
    address: str
    process_id: int
    console: str
    admin: str
    num_running_requests: int
    num_finished_requests: int
    num_failed_requests: int
    num_cancelled_requests: int
    note: str
    has_tls: bool
    unheard: _containers.ScalarMap[str, str]
    quota_note: str
    admission: AdmissionStatus
    outcomes: _containers.RepeatedCompositeFieldContainer[TenantOutcomes]
    def __init__(self, gateway_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., process_id: _Optional[int] = ..., console: _Optional[str] = ..., admin: _Optional[str] = ..., num_running_requests: _Optional[int] = ..., num_finished_requests: _Optional[int] = ..., num_failed_requests: _Optional[int] = ..., num_cancelled_requests: _Optional[int] = ..., note: _Optional[str] = ..., has_tls: _Optional[bool] = ..., unheard: _Optional[_Mapping[str, str]] = ..., quota_note: _Optional[str] = ..., admission: _Optional[_Union[AdmissionStatus, _Mapping[str, object]]] = ..., outcomes: _Optional[_Iterable[_Union[TenantOutcomes, _Mapping[str, object]]]] = ...) -> None: ...

class TenantOutcomes(_message.Message):
    __slots__ = ("tenant", "service_class", "num_requests")
    class NumRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    service_class: _inference_pb2.ServiceClass
    num_requests: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., service_class: _Optional[_Union[_inference_pb2.ServiceClass, str]] = ..., num_requests: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AdmissionStatus(_message.Message):
    __slots__ = ("rung", "rung_name", "pressure", "num_waiting_bytes", "waiting_s", "num_capped", "classes", "changes", "flows")
    RUNG_FIELD_NUMBER: _ClassVar[int]
    RUNG_NAME_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CAPPED_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    rung: int
    rung_name: str
    pressure: float
    num_waiting_bytes: int
    waiting_s: float
    num_capped: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassStatus]
    changes: _containers.RepeatedCompositeFieldContainer[RungChange]
    flows: _containers.RepeatedCompositeFieldContainer[FlowStatus]
    def __init__(self, rung: _Optional[int] = ..., rung_name: _Optional[str] = ..., pressure: _Optional[float] = ..., num_waiting_bytes: _Optional[int] = ..., waiting_s: _Optional[float] = ..., num_capped: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassStatus, _Mapping[str, object]]]] = ..., changes: _Optional[_Iterable[_Union[RungChange, _Mapping[str, object]]]] = ..., flows: _Optional[_Iterable[_Union[FlowStatus, _Mapping[str, object]]]] = ...) -> None: ...

class ClassStatus(_message.Message):
    __slots__ = ("service_class", "num_waiting", "wait_s", "num_released", "num_refused")
    class NumRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    service_class: _inference_pb2.ServiceClass
    num_waiting: int
    wait_s: float
    num_released: int
    num_refused: _containers.ScalarMap[str, int]
    def __init__(self, service_class: _Optional[_Union[_inference_pb2.ServiceClass, str]] = ..., num_waiting: _Optional[int] = ..., wait_s: _Optional[float] = ..., num_released: _Optional[int] = ..., num_refused: _Optional[_Mapping[str, int]] = ...) -> None: ...

class FlowStatus(_message.Message):
    __slots__ = ("tenant", "service_class", "served_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SERVED_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    service_class: _inference_pb2.ServiceClass
    served_s: float
    def __init__(self, tenant: _Optional[str] = ..., service_class: _Optional[_Union[_inference_pb2.ServiceClass, str]] = ..., served_s: _Optional[float] = ...) -> None: ...

class RungChange(_message.Message):
    __slots__ = ("at", "before", "after", "pressure")
    AT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    at: float
    before: str
    after: str
    pressure: float
    def __init__(self, at: _Optional[float] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., pressure: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("replicas", "dry_run")
    class ReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.ScalarMap[str, int]
    dry_run: bool
    def __init__(self, replicas: _Optional[_Mapping[str, int]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("pools", "free", "free_known", "shortages", "unsized_pools")
    class FreeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POOLS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    FREE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    SHORTAGES_FIELD_NUMBER: _ClassVar[int]
    UNSIZED_POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolChange]
    free: _containers.ScalarMap[str, float]
    free_known: bool
    shortages: _containers.RepeatedScalarFieldContainer[str]
    unsized_pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolChange, _Mapping[str, object]]]] = ..., free: _Optional[_Mapping[str, float]] = ..., free_known: _Optional[bool] = ..., shortages: _Optional[_Iterable[str]] = ..., unsized_pools: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolChange(_message.Message):
    __slots__ = ("name", "before", "after", "num_running", "states", "needed")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NeededEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: int
    after: int
    num_running: int
    states: _containers.ScalarMap[str, int]
    needed: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., num_running: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., needed: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pools: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrafficRequest(_message.Message):
    __slots__ = ("weights",)
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.ScalarMap[str, float]
    def __init__(self, weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TrafficResponse(_message.Message):
    __slots__ = ("shares",)
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.ScalarMap[str, float]
    def __init__(self, shares: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StoreMember(_message.Message):
    __slots__ = ("node_id", "epoch", "address", "process_id", "host")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    address: str
    process_id: int
    host: str
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., process_id: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class StoreFilter(_message.Message):
    __slots__ = ("sharing_group", "model")
    SHARING_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    sharing_group: str
    model: str
    def __init__(self, sharing_group: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class StoreStatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStatResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[StoreNodeStat]
    def __init__(self, nodes: _Optional[_Iterable[_Union[StoreNodeStat, _Mapping[str, object]]]] = ...) -> None: ...

class StoreNodeStat(_message.Message):
    __slots__ = ("member", "error", "tiers", "index", "bytes_by_sharing_group", "num_sessions")
    class BytesBySharingGroupEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_BY_SHARING_GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    member: StoreMember
    error: str
    tiers: _containers.RepeatedCompositeFieldContainer[StoreTier]
    index: StoreIndex
    bytes_by_sharing_group: _containers.ScalarMap[str, int]
    num_sessions: int
    def __init__(self, member: _Optional[_Union[StoreMember, _Mapping[str, object]]] = ..., error: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[StoreTier, _Mapping[str, object]]]] = ..., index: _Optional[_Union[StoreIndex, _Mapping[str, object]]] = ..., bytes_by_sharing_group: _Optional[_Mapping[str, int]] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class StoreTier(_message.Message):
    __slots__ = ("tier", "num_bytes", "capacity_bytes", "num_records", "num_hits", "num_misses", "num_hit_bytes", "num_put_bytes", "num_written_bytes", "num_evictions", "num_refused", "num_checksum_failures", "num_io_errors", "num_queued", "num_leases", "num_quarantined", "read_gb_s", "write_gb_s", "latency_ms", "note")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_IO_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    READ_GB_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_GB_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_bytes: int
    capacity_bytes: int
    num_records: int
    num_hits: int
    num_misses: int
    num_hit_bytes: int
    num_put_bytes: int
    num_written_bytes: int
    num_evictions: int
    num_refused: int
    num_checksum_failures: int
    num_io_errors: int
    num_queued: int
    num_leases: int
    num_quarantined: int
    read_gb_s: float
    write_gb_s: float
    latency_ms: float
    note: str
    def __init__(self, tier: _Optional[str] = ..., num_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., num_records: _Optional[int] = ..., num_hits: _Optional[int] = ..., num_misses: _Optional[int] = ..., num_hit_bytes: _Optional[int] = ..., num_put_bytes: _Optional[int] = ..., num_written_bytes: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_checksum_failures: _Optional[int] = ..., num_io_errors: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., read_gb_s: _Optional[float] = ..., write_gb_s: _Optional[float] = ..., latency_ms: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class StoreIndex(_message.Message):
    __slots__ = ("state", "num_lookups", "num_late", "num_errors", "num_announced", "num_dropped", "num_rebuilds", "latency_ms", "note")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_REBUILDS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    state: str
    num_lookups: int
    num_late: int
    num_errors: int
    num_announced: int
    num_dropped: int
    num_rebuilds: int
    latency_ms: float
    note: str
    def __init__(self, state: _Optional[str] = ..., num_lookups: _Optional[int] = ..., num_late: _Optional[int] = ..., num_errors: _Optional[int] = ..., num_announced: _Optional[int] = ..., num_dropped: _Optional[int] = ..., num_rebuilds: _Optional[int] = ..., latency_ms: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class StoreListRequest(_message.Message):
    __slots__ = ("filter", "limit")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    filter: StoreFilter
    limit: int
    def __init__(self, filter: _Optional[_Union[StoreFilter, _Mapping[str, object]]] = ..., limit: _Optional[int] = ...) -> None: ...

class StoreListResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[StoreNodeList]
    def __init__(self, nodes: _Optional[_Iterable[_Union[StoreNodeList, _Mapping[str, object]]]] = ...) -> None: ...

class StoreNodeList(_message.Message):
    __slots__ = ("member", "error", "records", "num_matching")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHING_FIELD_NUMBER: _ClassVar[int]
    member: StoreMember
    error: str
    records: _containers.RepeatedCompositeFieldContainer[StoreRecord]
    num_matching: int
    def __init__(self, member: _Optional[_Union[StoreMember, _Mapping[str, object]]] = ..., error: _Optional[str] = ..., records: _Optional[_Iterable[_Union[StoreRecord, _Mapping[str, object]]]] = ..., num_matching: _Optional[int] = ...) -> None: ...

class StoreRecord(_message.Message):
    __slots__ = ("key", "parent", "sharing_group", "model", "layer_start", "layer_end", "head_start", "head_end", "num_bytes", "tiers", "num_hits")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SHARING_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    key: str
    parent: str
    sharing_group: str
    model: str
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    num_bytes: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    num_hits: int
    def __init__(self, key: _Optional[str] = ..., parent: _Optional[str] = ..., sharing_group: _Optional[str] = ..., model: _Optional[str] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., num_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., num_hits: _Optional[int] = ...) -> None: ...

class StoreVerifyRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: StoreFilter
    def __init__(self, filter: _Optional[_Union[StoreFilter, _Mapping[str, object]]] = ...) -> None: ...

class StoreVerifyResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[StoreNodeVerified]
    def __init__(self, nodes: _Optional[_Iterable[_Union[StoreNodeVerified, _Mapping[str, object]]]] = ...) -> None: ...

class StoreNodeVerified(_message.Message):
    __slots__ = ("member", "error", "num_read", "num_bad", "num_bytes", "seconds")
    class NumReadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumBadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_BAD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    member: StoreMember
    error: str
    num_read: _containers.ScalarMap[str, int]
    num_bad: _containers.ScalarMap[str, int]
    num_bytes: int
    seconds: float
    def __init__(self, member: _Optional[_Union[StoreMember, _Mapping[str, object]]] = ..., error: _Optional[str] = ..., num_read: _Optional[_Mapping[str, int]] = ..., num_bad: _Optional[_Mapping[str, int]] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StorePurgeRequest(_message.Message):
    __slots__ = ("filter", "all")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    filter: StoreFilter
    all: bool
    def __init__(self, filter: _Optional[_Union[StoreFilter, _Mapping[str, object]]] = ..., all: _Optional[bool] = ...) -> None: ...

class StorePurgeResponse(_message.Message):
    __slots__ = ("nodes", "replicas")
    NODES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[StoreNodePurged]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaPurged]
    def __init__(self, nodes: _Optional[_Iterable[_Union[StoreNodePurged, _Mapping[str, object]]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaPurged, _Mapping[str, object]]]] = ...) -> None: ...

class ReplicaPurged(_message.Message):
    __slots__ = ("replica_id", "error", "num_blocks", "num_held", "num_requests")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    error: str
    num_blocks: int
    num_held: int
    num_requests: int
    def __init__(self, replica_id: _Optional[str] = ..., error: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_held: _Optional[int] = ..., num_requests: _Optional[int] = ...) -> None: ...

class StoreNodePurged(_message.Message):
    __slots__ = ("member", "error", "num_records", "num_bytes", "num_pending")
    class NumRecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    member: StoreMember
    error: str
    num_records: _containers.ScalarMap[str, int]
    num_bytes: _containers.ScalarMap[str, int]
    num_pending: int
    def __init__(self, member: _Optional[_Union[StoreMember, _Mapping[str, object]]] = ..., error: _Optional[str] = ..., num_records: _Optional[_Mapping[str, int]] = ..., num_bytes: _Optional[_Mapping[str, int]] = ..., num_pending: _Optional[int] = ...) -> None: ...
