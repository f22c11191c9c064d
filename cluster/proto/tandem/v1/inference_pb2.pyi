from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_DEVELOPER: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_FILTER: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class ServiceClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_CLASS_UNSPECIFIED: _ClassVar[ServiceClass]
    SERVICE_CLASS_INTERACTIVE: _ClassVar[ServiceClass]
    SERVICE_CLASS_STANDARD: _ClassVar[ServiceClass]
    SERVICE_CLASS_BATCH: _ClassVar[ServiceClass]

class CacheControl(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_CONTROL_UNSPECIFIED: _ClassVar[CacheControl]
    CACHE_CONTROL_NO_STORE: _ClassVar[CacheControl]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]

class BlockFate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_FATE_UNSPECIFIED: _ClassVar[BlockFate]
    BLOCK_FATE_NEW: _ClassVar[BlockFate]
    BLOCK_FATE_REMOVED: _ClassVar[BlockFate]
    BLOCK_FATE_FORGOTTEN: _ClassVar[BlockFate]
    BLOCK_FATE_ELSEWHERE: _ClassVar[BlockFate]
    BLOCK_FATE_EXPECTED: _ClassVar[BlockFate]
    BLOCK_FATE_UNUSABLE: _ClassVar[BlockFate]
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_DEVELOPER: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CONTENT_FILTER: FinishReason
FINISH_REASON_ABORT: FinishReason
SERVICE_CLASS_UNSPECIFIED: ServiceClass
SERVICE_CLASS_INTERACTIVE: ServiceClass
SERVICE_CLASS_STANDARD: ServiceClass
SERVICE_CLASS_BATCH: ServiceClass
CACHE_CONTROL_UNSPECIFIED: CacheControl
CACHE_CONTROL_NO_STORE: CacheControl
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_CANCELLED: RequestState
REQUEST_STATE_FAILED: RequestState
BLOCK_FATE_UNSPECIFIED: BlockFate
BLOCK_FATE_NEW: BlockFate
BLOCK_FATE_REMOVED: BlockFate
BLOCK_FATE_FORGOTTEN: BlockFate
BLOCK_FATE_ELSEWHERE: BlockFate
BLOCK_FATE_EXPECTED: BlockFate
BLOCK_FATE_UNUSABLE: BlockFate

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: Role
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping[str, object]]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping[str, object]]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "name")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    name: str
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., name: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "tools", "tool_choice", "parallel_tool_calls", "template_args_json", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    template_args_json: str
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping[str, object]]]] = ..., add_generation_prompt: _Optional[bool] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping[str, object]]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping[str, object]]] = ..., parallel_tool_calls: _Optional[bool] = ..., template_args_json: _Optional[str] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tags")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAGS_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    structural_tags: StructuralTags
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping[str, object]]] = ..., grammar: _Optional[str] = ..., structural_tags: _Optional[_Union[StructuralTags, _Mapping[str, object]]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuralTags(_message.Message):
    __slots__ = ("tags", "triggers")
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TRIGGERS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedCompositeFieldContainer[StructuralTag]
    triggers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[_Union[StructuralTag, _Mapping[str, object]]]] = ..., triggers: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuralTag(_message.Message):
    __slots__ = ("begin", "json_schema", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: str
    json_schema: str
    end: str
    def __init__(self, begin: _Optional[str] = ..., json_schema: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "truncate_prompt_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "logprobs", "constraint", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop", "prompt_logprobs", "echo", "keep_special_tokens", "include_usage", "separate_reasoning", "priority", "tenant", "request_id", "resume", "pins", "resume_token", "service_class", "session_id", "cache_control")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    SEPARATE_REASONING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_CONTROL_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    truncate_prompt_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    n: int
    logprobs: int
    constraint: Constraint
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop: bool
    prompt_logprobs: int
    echo: bool
    keep_special_tokens: bool
    include_usage: bool
    separate_reasoning: bool
    priority: int
    tenant: str
    request_id: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumedSample]
    pins: Pins
    resume_token: str
    service_class: ServiceClass
    session_id: str
    cache_control: CacheControl
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping[str, object]]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping[str, object]]] = ..., truncate_prompt_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping[str, object]]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., echo: _Optional[bool] = ..., keep_special_tokens: _Optional[bool] = ..., include_usage: _Optional[bool] = ..., separate_reasoning: _Optional[bool] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumedSample, _Mapping[str, object]]]] = ..., pins: _Optional[_Union[Pins, _Mapping[str, object]]] = ..., resume_token: _Optional[str] = ..., service_class: _Optional[_Union[ServiceClass, str]] = ..., session_id: _Optional[str] = ..., cache_control: _Optional[_Union[CacheControl, str]] = ...) -> None: ...

class ResumedSample(_message.Message):
    __slots__ = ("sample", "token_ids", "finish_reason")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sample: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    def __init__(self, sample: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Pins(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "finished", "prompt")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    delta: Delta
    finished: Finished
    prompt: PromptPart
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping[str, object]]] = ..., delta: _Optional[_Union[Delta, _Mapping[str, object]]] = ..., finished: _Optional[_Union[Finished, _Mapping[str, object]]] = ..., prompt: _Optional[_Union[PromptPart, _Mapping[str, object]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "seed", "num_prompt_tokens", "resume_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    num_prompt_tokens: int
    resume_token: str
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., resume_token: _Optional[str] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("first_index", "token_ids", "text", "logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping[str, object]]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("sample", "first_index", "token_ids", "text", "logprobs", "finish_reason", "reasoning", "tool_calls", "matched_stop", "usage")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    sample: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: FinishReason
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    matched_stop: MatchedStop
    usage: Usage
    def __init__(self, sample: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping[str, object]]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping[str, object]]]] = ..., matched_stop: _Optional[_Union[MatchedStop, _Mapping[str, object]]] = ..., usage: _Optional[_Union[Usage, _Mapping[str, object]]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class MatchedStop(_message.Message):
    __slots__ = ("text", "token_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_id: int
    def __init__(self, text: _Optional[str] = ..., token_id: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top", "token_id", "text", "token_bytes")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    token_id: int
    text: str
    token_bytes: bytes
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping[str, object]]]] = ..., token_id: _Optional[int] = ..., text: _Optional[str] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text", "token_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: str
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("samples", "usage", "timing", "prefill_replica", "decode_replica")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REPLICA_FIELD_NUMBER: _ClassVar[int]
    DECODE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleEnd]
    usage: Usage
    timing: Timing
    prefill_replica: str
    decode_replica: str
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleEnd, _Mapping[str, object]]]] = ..., usage: _Optional[_Union[Usage, _Mapping[str, object]]] = ..., timing: _Optional[_Union[Timing, _Mapping[str, object]]] = ..., prefill_replica: _Optional[str] = ..., decode_replica: _Optional[str] = ...) -> None: ...

class SampleEnd(_message.Message):
    __slots__ = ("sample", "finish_reason", "num_tokens")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    finish_reason: FinishReason
    num_tokens: int
    def __init__(self, sample: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached", "completion_tokens", "capped_max_tokens", "reasoning_tokens", "resumed_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPPED_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached: CachedTokens
    completion_tokens: int
    capped_max_tokens: int
    reasoning_tokens: int
    resumed_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached: _Optional[_Union[CachedTokens, _Mapping[str, object]]] = ..., completion_tokens: _Optional[int] = ..., capped_max_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., resumed_tokens: _Optional[int] = ...) -> None: ...

class CachedTokens(_message.Message):
    __slots__ = ("device", "dram", "nvme", "remote")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    device: int
    dram: int
    nvme: int
    remote: int
    def __init__(self, device: _Optional[int] = ..., dram: _Optional[int] = ..., nvme: _Optional[int] = ..., remote: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "ttft_ms", "e2e_ms", "transfer_gb_s", "transport", "transfer_bytes", "attempts")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_GB_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    ttft_ms: float
    e2e_ms: float
    transfer_gb_s: float
    transport: str
    transfer_bytes: int
    attempts: int
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., transfer_gb_s: _Optional[float] = ..., transport: _Optional[str] = ..., transfer_bytes: _Optional[int] = ..., attempts: _Optional[int] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping[str, object]]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "normalize", "dimensions", "truncate_prompt_tokens", "priority", "tenant", "request_id", "service_class")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    normalize: bool
    dimensions: int
    truncate_prompt_tokens: int
    priority: int
    tenant: str
    request_id: str
    service_class: ServiceClass
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping[str, object]]]] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., service_class: _Optional[_Union[ServiceClass, str]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "usage", "request_id")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    usage: Usage
    request_id: str
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping[str, object]]]] = ..., usage: _Optional[_Union[Usage, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "continuations", "priority", "tenant", "request_id", "service_class")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    continuations: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    priority: int
    tenant: str
    request_id: str
    service_class: ServiceClass
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping[str, object]]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping[str, object]]] = ..., continuations: _Optional[_Iterable[_Union[EmbedInput, _Mapping[str, object]]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., service_class: _Optional[_Union[ServiceClass, str]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "usage", "request_id")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[ContinuationScore]
    usage: Usage
    request_id: str
    def __init__(self, scores: _Optional[_Iterable[_Union[ContinuationScore, _Mapping[str, object]]]] = ..., usage: _Optional[_Union[Usage, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ContinuationScore(_message.Message):
    __slots__ = ("logprob", "num_tokens", "is_greedy", "tokens")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_GREEDY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    num_tokens: int
    is_greedy: bool
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., num_tokens: _Optional[int] = ..., is_greedy: _Optional[bool] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping[str, object]]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping[str, object]]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "keep_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., keep_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping[str, object]]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_context_tokens", "vocab_size", "has_chat_template", "fingerprint", "block_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    vocab_size: int
    has_chat_template: bool
    fingerprint: str
    block_tokens: int
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "state", "decisions", "timeline", "reason", "tenant", "gateway_id", "prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    timeline: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    reason: str
    tenant: str
    gateway_id: str
    prompt: PromptReuse
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping[str, object]]]] = ..., timeline: _Optional[_Iterable[_Union[TimelineEvent, _Mapping[str, object]]]] = ..., reason: _Optional[str] = ..., tenant: _Optional[str] = ..., gateway_id: _Optional[str] = ..., prompt: _Optional[_Union[PromptReuse, _Mapping[str, object]]] = ...) -> None: ...

class PromptReuse(_message.Message):
    __slots__ = ("num_tokens", "num_cached_tokens", "num_relative_tokens", "num_shared_tokens", "relative_id", "block_tokens")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_cached_tokens: int
    num_relative_tokens: int
    num_shared_tokens: int
    relative_id: str
    block_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_relative_tokens: _Optional[int] = ..., num_shared_tokens: _Optional[int] = ..., relative_id: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("attempt", "policy", "prefill", "decode", "prefill_cached_tokens", "decode_cached_tokens", "candidates", "reason", "ttft_s", "step_s", "limit_wait_s", "limit_ttft_s", "missed", "achievable_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    ACHIEVABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    policy: str
    prefill: str
    decode: str
    prefill_cached_tokens: int
    decode_cached_tokens: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    reason: str
    ttft_s: float
    step_s: float
    limit_wait_s: float
    limit_ttft_s: float
    missed: _containers.RepeatedCompositeFieldContainer[MissedBlocks]
    achievable_tokens: int
    def __init__(self, attempt: _Optional[int] = ..., policy: _Optional[str] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping[str, object]]]] = ..., reason: _Optional[str] = ..., ttft_s: _Optional[float] = ..., step_s: _Optional[float] = ..., limit_wait_s: _Optional[float] = ..., limit_ttft_s: _Optional[float] = ..., missed: _Optional[_Iterable[_Union[MissedBlocks, _Mapping[str, object]]]] = ..., achievable_tokens: _Optional[int] = ...) -> None: ...

class MissedBlocks(_message.Message):
    __slots__ = ("first", "num_blocks", "fate", "places", "reason", "least_age_s", "most_age_s")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MOST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_blocks: int
    fate: BlockFate
    places: _containers.RepeatedCompositeFieldContainer[BlockPlace]
    reason: str
    least_age_s: float
    most_age_s: float
    def __init__(self, first: _Optional[int] = ..., num_blocks: _Optional[int] = ..., fate: _Optional[_Union[BlockFate, str]] = ..., places: _Optional[_Iterable[_Union[BlockPlace, _Mapping[str, object]]]] = ..., reason: _Optional[str] = ..., least_age_s: _Optional[float] = ..., most_age_s: _Optional[float] = ...) -> None: ...

class BlockPlace(_message.Message):
    __slots__ = ("replica_id", "tier", "is_expected")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    IS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    tier: str
    is_expected: bool
    def __init__(self, replica_id: _Optional[str] = ..., tier: _Optional[str] = ..., is_expected: _Optional[bool] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("replica_id", "side", "matched_tokens", "uncached_tokens", "note", "queue_s", "prefill_s", "load_s", "transfer_s", "pressure_s", "step_s", "cost_s", "once_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    ONCE_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    side: str
    matched_tokens: int
    uncached_tokens: int
    note: str
    queue_s: float
    prefill_s: float
    load_s: float
    transfer_s: float
    pressure_s: float
    step_s: float
    cost_s: float
    once_s: float
    def __init__(self, replica_id: _Optional[str] = ..., side: _Optional[str] = ..., matched_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., note: _Optional[str] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., load_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., pressure_s: _Optional[float] = ..., step_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., once_s: _Optional[float] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("at_ms", "name", "detail")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    name: str
    detail: str
    def __init__(self, at_ms: _Optional[float] = ..., name: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "missing")
    class MissingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    missing: _containers.ScalarMap[str, str]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping[str, object]]]] = ..., missing: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "tenant", "state", "reason", "age_s", "ttft_ms", "e2e_ms", "num_prompt_tokens", "num_output_tokens", "attempts", "prefill", "decode", "gateway_id", "num_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    state: RequestState
    reason: str
    age_s: float
    ttft_ms: float
    e2e_ms: float
    num_prompt_tokens: int
    num_output_tokens: int
    attempts: int
    prefill: str
    decode: str
    gateway_id: str
    num_cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., gateway_id: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...
