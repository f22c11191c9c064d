"""The cluster's configuration file: YAML, read once and checked as a whole; an error names the field by its
path.

model: models/tiny
pools:
  - {name: prefill, role: prefill, replicas: 1}
  - {name: decode, role: decode, replicas: 1}
"""

from __future__ import annotations

import itertools
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cluster.admission.config import AdmissionConfig
from cluster.debug_config import DebugConfig
from cluster.errors import ConfigError
from cluster.http.config import HttpConfig
from cluster.identity.config import AuthConfig
from cluster.metrics.config import CostConfig, LogConfig, RecordingConfig, TracingConfig
from cluster.model_source.config import DownloadConfig
from cluster.model_source.names import located_model
from cluster.model_source.source import ModelSource
from cluster.model_split import check_split
from cluster.parser_names import ReasoningParserName, ToolParserName
from cluster.scaling.config import ScalingConfig
from cluster.setting_errors import Location, setting_lines
from cluster.store_kv_dtype import check_store_kv_dtype
from kvtransfer.common.patterns import Matches
from kvtransfer.config import StoreConfig, TransferConfig
from kvtransfer.rpc.mutual_tls import TlsFiles
from kvtransfer.transports import TRANSPORTS
from router.config import RouterConfig
from workers.config import EngineSettings, Parallel
from workers.model.model_config import ModelConfig
from workers.model.quantization.weight_form import WeightDtype

Role = Literal["prefill", "decode", "both"]
Device = Literal["cpu", "cuda"]
DtypeName = Literal["fp32", "bf16", "fp16"]
# The largest number of ranks of a replica, in each direction: peers refuse replicas of more.
MAX_RANKS = 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SMALL_CONTEXT_TOKENS = 4096
_RAY_RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}


# Keys that had another name before.
_RENAMED: dict[Location, str] = {
    ("scaling", "lend_roles"): "is called change_roles now; rename it",
    ("scaling", "lend_after_s"): "is called role_change_after_s now; rename it",
    ("transfer", "max_moves"): "is called max_migrations now; rename it",
}


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _path_text(value: object) -> object:
    """Return the text of a path that comes from code: a file has texts alone."""
    return str(value) if isinstance(value, Path) else value


def _only_custom(resources: dict[str, float]) -> dict[str, float]:
    if taken := sorted(set(resources) & _RAY_RESOURCES):
        raise ValueError(f"{taken[0]} is Ray's own; only custom resources are asked here")
    return resources


# Amounts of resources besides CPUs and GPUs to request from Ray, by name, in units of at least 1/10000.
CustomResources = Annotated[dict[str, Annotated[float, Field(ge=1e-4)]], AfterValidator(_only_custom)]


# The name of a pool or an application.
Name = Annotated[
    str,
    Matches(
        r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
        "1 to 40 lower-case letters and digits, with dashes between them, such as decode-2",
    ),
]


class PoolConfig(_Settings):
    """Configures the equal replicas of one phase: one Ray Serve deployment named `Pool-<name>`."""

    name: Name
    role: Role
    replicas: int = Field(default=1, ge=1)
    # Parts of the experts of a layer (expert parallelism), each on other ranks of a stage.
    ep: int = Field(default=1, ge=1, le=MAX_RANKS)
    # Ranks that share every layer (tensor parallelism), `ep` by default; those of a stage are on one node.
    tp: int = Field(default_factory=lambda before: before.get("ep", 1), ge=1, le=MAX_RANKS)
    # Stages, each with a range of the layers (pipeline parallelism); they may be on several nodes.
    pp: int = Field(default=1, ge=1, le=MAX_RANKS)
    # How many layers each stage gets; empty: by what a layer and the head cost on each stage's device,
    # measured at start.
    layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    device: Device = "cpu"
    # The device of each stage, where they differ; empty: `device` for all.
    devices: tuple[Device, ...] = ()
    # The dtype of activations and KV. `auto`: that of the checkpoint, but on CPUs bf16 for 16 bits where all
    # nodes compute it without emulation (x86 with AVX2, Arm with BF16), else fp32 (`cluster.dtypes`).
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # The form of weights in products, which is part of the KV's identity. `auto`: as they are stored, where
    # the device has kernels for it; `dtype`: dequantized; int8, int4, fp8: rounded to it as they are read,
    # the embedding and the head of int4 to int8.
    weight_dtype: WeightDtype = "auto"
    # CPUs that each rank asks of Ray; None: a share of what the cluster has (`cluster.serve.capacity`).
    cpus_per_rank: float | None = Field(default=None, gt=0)
    # GPUs that each rank asks of Ray; None: 1 with device cuda, else 0.
    gpus_per_rank: float | None = Field(default=None, ge=0)
    # Custom Ray resources that a replica asks once for its engine core and once for each stage: ties the pool
    # to the nodes that have them.
    resources: CustomResources = {}
    health_check_period_s: float = Field(default=2.0, gt=0)
    health_check_timeout_s: float = Field(default=5.0, gt=0)
    # How long a leaving replica lets its streams finish.
    drain_s: float = Field(default=10.0, ge=0)
    # A rolling update starts each new replica before the one it replaces leaves, which takes resources for
    # one more; false: the old one leaves first.
    surge: bool = True
    engine: EngineSettings = EngineSettings()

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def parallel(self) -> Parallel:
        """The ranks of a replica."""
        return Parallel(self.tp, self.pp, self.stage_devices, self.layers, self.ep)

    @property
    def num_gpus_per_rank(self) -> float:
        if self.gpus_per_rank is not None:
            return self.gpus_per_rank
        return 1.0 if "cuda" in self.stage_devices else 0.0

    @property
    def stage_devices(self) -> tuple[Device, ...]:
        return self.devices or (self.device,) * self.pp

    @property
    def device_kv_share(self) -> float:
        """The share of a GPU's memory that a rank may use where it decides its KV by it; 0: it does not."""
        if self.engine.kv_tokens != "auto" or "cuda" not in self.stage_devices:
            return 0.0
        return self.engine.memory_share * min(self.num_gpus_per_rank, 1.0)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}")
        if "cuda" in self.stage_devices and self.gpus_per_rank == 0:
            raise ValueError("device cuda needs gpus_per_rank above 0")
        for field in ("layers", "devices"):
            entries = getattr(self, field)
            if entries and len(entries) != self.pp:
                raise ValueError(
                    f"{field} needs one entry for each of the pp = {self.pp} stages, not {len(entries)}"
                )
        if self.weight_dtype in ("fp32", "bf16", "fp16") and self.weight_dtype != self.dtype:
            raise ValueError(
                f"weight_dtype {self.weight_dtype} with dtype {self.dtype}: weights of floats have the dtype "
                "of KV; leave weight_dtype out, or name the same dtype, or int8, int4 or fp8"
            )
        if self.engine.deterministic:
            self._refuse_nondeterministic()
        return self

    def _refuse_nondeterministic(self) -> None:
        remedy = "or set engine.deterministic: false"
        if self.dtype == "fp16" and "cpu" in self.stage_devices:
            raise ValueError(
                f"engine.deterministic is not available in fp16 on cpu: use bf16 or fp32, {remedy}"
            )
        if self.tp > 2 and self.ep > 1:
            raise ValueError(
                f"engine.deterministic is not available with tp {self.tp} and ep {self.ep}: rows are sent to "
                f"the ranks of their experts in steps of many rows alone; use ep 1, or tp 2, {remedy}"
            )

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` where the model cannot be split as configured."""
        check_split(model, self.name, self.parallel, self.engine)


class GatewayConfig(_Settings):
    """Configures the gateways. Requests that exceed a size limit are refused with RESOURCE_EXHAUSTED or
    INVALID_ARGUMENT, never truncated."""

    # The address to listen on, and the one announced to clients; `auto`: all of the node's, announced by
    # the node's own.
    host: str = "127.0.0.1"
    # 0: a free port.
    port: int = Field(default=8780, ge=0, le=65535)
    # Where the operator's console listens, on `host`; 0: a free one; None: no console. Where another
    # `port` than its default is set and this is not: a free one.
    console_port: int | None = Field(default=8781, ge=0, le=65535)
    # Where operators' calls (`tandem.v1.Admin`) are answered, on `host`; 0: a free one. As for the console, a
    # free one where another `port` is set and this is not.
    admin_port: int = Field(default=8782, ge=0, le=65535)
    # The HTTP port next to `port`.
    http: HttpConfig = HttpConfig()
    # Where the other gateways ask this one, on `transfer.data_host`; 0: a free one, which a gateway also has
    # while it takes over from another one on its host.
    fleet_port: int = Field(default=0, ge=0, le=65535)
    # Host names under which browsers may reach the console; addresses and localhost always may.
    console_hosts: tuple[str, ...] = ()
    # Gateways; several on one host need port 0.
    replicas: int = Field(default=1, ge=1)
    # How long a leaving gateway lets its streams finish while other gateways take new requests; streams that
    # still run then end with UNAVAILABLE. When the whole application stops, streams have the time of the
    # replicas that compute them.
    drain_s: float = Field(default=120.0, ge=0)
    # A rolling update starts each new gateway before the one it replaces leaves: where `port` is fixed, at
    # the same port of the same host. It takes resources for one more; false: the old one leaves first.
    surge: bool = True
    # Custom Ray resources that each gateway asks: ties gateways to the nodes that have them.
    resources: CustomResources = {}
    # PEM chain of the servers; with it only TLS is spoken on `port`, `admin_port`, `console_port` and
    # `http.port`. Read again when it changes.
    tls_cert_file: Path | None = None
    # PEM key of `tls_cert_file`.
    tls_key_file: Path | None = None
    # A second port with nothing but gRPC health, without TLS, for probes that cannot speak it.
    health_port: int | None = Field(default=None, ge=0, le=65535)
    # Connections are closed at this age, which moves clients from a leaving gateway to the next, to new
    # gateways and to a renewed certificate, without a failed call; running streams stay where they are.
    # None: never.
    max_connection_age_s: float | None = Field(default=60.0, gt=0)
    # The name that clients use; "": that of the model's folder, or of its GGUF file without the ending.
    model_name: str = ""
    # Replica pairs tried for one request before it is UNAVAILABLE; those that left or broke do not count.
    max_attempts: int = Field(default=5, ge=1)
    # Requests in flight; more are refused with RESOURCE_EXHAUSTED and a time to retry. Resumed streams are
    # taken until there are twice as many.
    max_requests: int = Field(default=1024, ge=1)
    # The largest gRPC message accepted from a client; `auto`: what the model's context has use for, at most
    # half of `admission.max_caller_reading_mb`.
    max_message_bytes: Annotated[int, Field(ge=1 << 16)] | Literal["auto"] = "auto"
    # How long the message of a call may take to arrive.
    message_timeout_s: float = Field(default=30.0, gt=0)
    # The largest `n` of one request.
    max_samples: int = Field(default=16, ge=1)
    # `max_tokens` of a request that names none.
    default_max_tokens: int = Field(default=256, ge=1)
    # A request that asks for more `max_tokens` than the context, or its tenant's share of a replica's KV, has
    # room for after the prompt: `cap` serves it with what fits, and its usage says so; `refuse` refuses it.
    max_tokens_beyond_context: Literal["cap", "refuse"] = "cap"
    # How tool calls stand in the model's answers; `auto`: as its chat template writes them.
    tool_parser: ToolParserName = "auto"
    # Between which marks reasoning stands in them; `auto`: those of the chat template.
    reasoning_parser: ReasoningParserName = "auto"
    # What the text of a special token is in messages, tools and results: `plain` text, or the token.
    special_tokens_in_content: Literal["plain", "special"] = "plain"

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file are given together, or neither")
        return self

    @model_validator(mode="before")
    @classmethod
    def _others_beside_the_port(cls, fields: Any) -> Any:
        """Default to free ports for console, operators and HTTP where `port` is set: the fixed ports of two
        gateways would collide."""
        default = cls.model_fields["port"].default
        if isinstance(fields, dict) and fields.get("port", default) != default:
            http = fields.get("http", {})
            if isinstance(http, dict):
                http = {"port": 0, **http}
            return {"console_port": 0, "admin_port": 0, **fields, "http": http}
        return fields

    @property
    def listed_ports(self) -> dict[str, int]:
        """The ports to listen on by the names of their settings; 0: a free one."""
        ports = {
            "gateway.port": self.port,
            "gateway.console_port": self.console_port,
            "gateway.admin_port": self.admin_port,
            "gateway.http.port": self.http.port,
            "gateway.health_port": self.health_port,
        }
        return {name: port for name, port in ports.items() if port is not None}

    @property
    def takes_over(self) -> bool:
        """Whether a new gateway shares its port with the one that it replaces for a while."""
        return self.surge and self.port != 0

    def at(self, host: str | None, port: int | None, admin_port: int | None = None) -> Self:
        """Return a copy at another host, port and port for operators; None: unchanged."""
        changes = {"host": host, "port": port, "admin_port": admin_port}
        changed = {name: value for name, value in changes.items() if value is not None}
        return self.model_validate({**self.model_dump(exclude_unset=True), **changed})


class InnerTlsConfig(_Settings):
    """Configures TLS, with a certificate on both sides, of the connections between the cluster's processes on
    several hosts (docs/architecture.md, "Trust"). Every node has these PEM files at the same paths. They are
    read again when they change."""

    # The chain of the processes' certificate, for both uses: server and client.
    cert_file: Path
    # Its key, without a password.
    key_file: Path
    # The authority that signs these certificates and no others: whoever has one of its certificates, and the
    # cluster secret, is a part of the cluster.
    ca_file: Path

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(str(self.cert_file), str(self.key_file), str(self.ca_file))

    def located(self, folder: Path) -> Self:
        """Return a copy whose paths are relative to the folder no more."""
        return self.model_copy(update={name: folder / path for name, path in self})


class ClusterConfig(_Settings):
    """Represents the whole configuration of `tandem serve`."""

    # The Ray Serve application's name; two applications can share a Ray cluster.
    app: Name = "tandem"
    # A folder in Hugging Face layout or a GGUF file (of a split one the first part), relative to the file
    # that names it; or a download: `org/name`, `org/name@revision`, `org/name:file.gguf`, or a URL.
    model: Annotated[str, Field(min_length=1), BeforeValidator(_path_text)]
    # How a model that is no folder is downloaded.
    download: DownloadConfig = DownloadConfig()
    # Where each host keeps the folders that it makes of GGUF files; None: `$XDG_CACHE_HOME/tandem/models`, or
    # `~/.cache/tandem/models`. Relative to the file that names it.
    model_cache: Path | None = None
    pools: tuple[PoolConfig, ...] = Field(min_length=1)
    router: RouterConfig = RouterConfig()
    admission: AdmissionConfig = AdmissionConfig()
    transfer: TransferConfig = TransferConfig()
    # Where finished KV is kept; `nvme_path` is relative to the file that names it.
    store: StoreConfig = StoreConfig()
    gateway: GatewayConfig = GatewayConfig()
    scaling: ScalingConfig = ScalingConfig()
    logs: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    recording: RecordingConfig = RecordingConfig()
    costs: CostConfig = CostConfig()
    auth: AuthConfig = AuthConfig()
    # Holds the cluster secret, at the same path on every node; None: drawn at start, which serves one host.
    # Relative to the file that names it.
    secret_file: Path | None = None
    # None: what passes between hosts is not encrypted, and needs a private network. Paths are relative to the
    # file that names them.
    inner_tls: InnerTlsConfig | None = None
    debug: DebugConfig = DebugConfig()

    @property
    def model_name(self) -> str:
        """The name by which clients ask for the model."""
        return self.gateway.model_name or self.model_source.served_name

    @property
    def frees_windows(self) -> bool:
        """Whether layers with a window keep KV of their window alone. Between a GPU and a store only blocks
        of all layers are copied."""
        is_on_gpu = any(device != "cpu" for pool in self.pools for device in pool.stage_devices)
        return not (self.store.dram_gb and is_on_gpu)

    @property
    def model_source(self) -> ModelSource:
        """What `model` means on this host."""
        return ModelSource(model=self.model, download=self.download)

    @property
    def model_path(self) -> Path:
        """The model's folder on this host, where `model_source.fetch` has returned."""
        return self.model_source.path

    def with_model(self, source: ModelSource) -> Self:
        """Return a copy that serves this model."""
        return self.model_copy(update={"model": source.model})

    def with_redis_url(self, url: str, file: Path | None = None) -> Self:
        """Return a copy whose store keeps its index on this server, or on that whose URL is in the file."""
        index = {"redis_url": url, "redis_url_file": file}
        return self.model_copy(update={"store": self.store.model_copy(update=index)})

    def with_secret_file(self, path: Path | None) -> Self:
        """Return a copy whose processes read the cluster secret from this file."""
        return self.model_copy(update={"secret_file": path})

    def with_key_root_file(self, path: Path | None) -> Self:
        """Return a copy whose gateways read the roots of block keys from this file."""
        return self.model_copy(update={"auth": self.auth.model_copy(update={"key_root_file": path})})

    @model_validator(mode="after")
    def _pools_work_together(self) -> Self:
        names = Counter(pool.name for pool in self.pools)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"pools: the name {repeated[0]!r} is used more than once")
        if all(pool.role == "prefill" for pool in self.pools):
            raise ValueError("pools: at least one needs the role decode or both")
        for section, given in (("scaling", self.scaling.pools), ("costs", self.costs.pools)):
            if unknown := sorted(set(given) - set(names)):
                raise ValueError(f"{section}.pools.{unknown[0]}: there is no pool of this name")
        for pool in self.pools:
            check_store_kv_dtype(self.store.kv_dtype, pool.name, pool.engine)
        for field in ("engine.block_tokens", "engine.kv_dtype", "dtype", "weight_dtype"):
            if len(values := {attrgetter(field)(pool) for pool in self.pools}) > 1:
                raise ValueError(
                    f"pools: {field} must be equal in all pools, which exchange KV; found {sorted(values)}"
                )
        return self

    @model_validator(mode="after")
    def _callers_are_known(self) -> Self:
        self.check_exposure()
        if self.auth.certificates is not None and self.gateway.tls_cert_file is None:
            raise ValueError(
                "auth.certificates: clients show certificates in TLS only; set gateway.tls_cert_file and "
                "gateway.tls_key_file"
            )
        return self

    @model_validator(mode="after")
    def _requests_can_be_read(self) -> Self:
        most = min(self.admission.max_caller_reading_mb, self.admission.max_reading_mb) * 1e6
        for field, size in (
            ("gateway.max_message_bytes", self.gateway.max_message_bytes),
            ("gateway.http.max_body_bytes", self.gateway.http.max_body_bytes),
        ):
            if size != "auto" and size > most:
                raise ValueError(
                    f"{field}: {size} bytes could never be read, as a caller may have {most:.0f} read at "
                    "once; lower it, or raise admission.max_caller_reading_mb and admission.max_reading_mb"
                )
        return self

    def check_exposure(self) -> None:
        """Raise `ValueError` where others than this host could call without authentication."""
        is_open = self.auth.mode == "none" and not self.auth.insecure
        if is_open and self.gateway.host not in LOOPBACK:
            raise ValueError(
                f"gateway.host: {self.gateway.host} can be reached from other hosts, and nobody is "
                "authenticated; set auth.mode: required, or auth.insecure: true (`tandem serve --insecure`) "
                "to serve whoever reaches it"
            )

    @model_validator(mode="after")
    def _pools_share_a_transport(self) -> Self:
        """Check that one of the allowed transports suits the memory of each pair of pools that exchange
        KV."""
        for writer, target in itertools.permutations(self.pools, 2):
            if writer.role == "decode" or target.role == "prefill":
                continue
            for devices in itertools.product(writer.stage_devices, target.stage_devices):
                if not any(_suits_all(name, devices) for name in self.transfer.transports):
                    raise ValueError(
                        f"transfer.transports: none of {', '.join(self.transfer.transports)} moves KV from "
                        f"{devices[0]} (pool {writer.name}) to {devices[1]} (pool {target.name}); add tcp"
                    )
        return self


def load_config(path: Path) -> ClusterConfig:
    """Read and check the file; `ConfigError` names the file and each bad field."""
    return located_config(read_mapping(path), str(path), path.resolve().parent)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the file without checking its fields; `ConfigError` where it holds no mapping."""
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date of month 13
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping with the keys model and pools")
    return raw


def located_config(raw: dict[str, Any], source: str, folder: Path) -> ClusterConfig:
    """Check the mapping as `parse_config` does; its relative paths are relative to the folder."""
    config = parse_config(raw, source)
    located: dict[str, Any] = {
        "model": located_model(config.model, folder),
        "download": config.download.located(folder),
    }
    if config.model_cache is not None:
        located["model_cache"] = folder / config.model_cache
    if config.secret_file is not None:
        located["secret_file"] = folder / config.secret_file
    if config.inner_tls is not None:
        located["inner_tls"] = config.inner_tls.located(folder)
    places = {name: getattr(config.store, name) for name in ("nvme_path", "redis_url_file", "redis_ca_file")}
    located["store"] = config.store.model_copy(
        update={name: folder / path for name, path in places.items() if path is not None}
    )
    if config.gateway.tls_cert_file is not None and config.gateway.tls_key_file is not None:
        files = {
            "tls_cert_file": folder / config.gateway.tls_cert_file,
            "tls_key_file": folder / config.gateway.tls_key_file,
        }
        located["gateway"] = config.gateway.model_copy(update=files)
    located["auth"] = config.auth.located(folder)
    return config.model_copy(update=located)


def parse_config(raw: dict[str, Any], source: str) -> ClusterConfig:
    """Check a configuration that is already a mapping; `source` begins each line of the error."""
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        lines = setting_lines(error, ClusterConfig, _RENAMED)
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from error


def default_config(
    model: Path | str,
    *,
    prefill: int = 1,
    decode: int = 1,
    host: str | None = None,
    port: int | None = None,
    admin_port: int | None = None,
    insecure: bool = False,
    context_tokens: int = 0,
    nvme: tuple[Path, float] | None = None,
) -> ClusterConfig:
    """Return the configuration that the command line serves without a file. `prefill` 0 makes one pool of the
    role `both`.

    `insecure` lets it listen on other addresses than loopback without authentication. `context_tokens` is the
    model's context length (0: unknown): small models get small blocks. `nvme` is a folder and how many 1e9
    bytes of its disk the store may use.
    """
    raw = default_mapping(located_model(str(model), Path().resolve()), prefill, decode, context_tokens)
    gateway = {"host": host, "port": port, "admin_port": admin_port}
    raw["gateway"] = {name: value for name, value in gateway.items() if value is not None}
    if insecure:
        raw["auth"] = {"insecure": True}
    if nvme is not None:
        folder, num_gb = nvme
        raw["store"] = {"nvme_path": folder.resolve(), "nvme_gb": num_gb}
    return parse_config(raw, "command line")


def default_mapping(model: str, prefill: int, decode: int, context_tokens: int) -> dict[str, Any]:
    """Return the model and the pools of `default_config`, as a file would have them."""
    block_tokens = 16 if 0 < context_tokens <= _SMALL_CONTEXT_TOKENS else 64
    counts = {"both": decode} if prefill == 0 else {"prefill": prefill, "decode": decode}
    pools = [
        {"name": role, "role": role, "replicas": count, "engine": {"block_tokens": block_tokens}}
        for role, count in counts.items()
    ]
    return {"model": model, "pools": pools}


def _suits_all(transport: str, devices: tuple[Device, ...]) -> bool:
    """Whether the transport suits memory on each of the devices, at least on one host."""
    return not any(TRANSPORTS[transport].unsuited(device, is_same_host=True) for device in devices)
