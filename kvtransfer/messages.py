"""What messages about KV name: shards, ranks and replicas, and what two replicas must share.

Files beside this one have the messages of each boundary: `peer_messages.py` between the engine cores of two
replicas (Peer link), `transfer_orders.py` and `transfer_reports.py` between an engine core and its ranks, and
`kv_events.py` from an engine core to the watchers of its cache. No tensors; ids are `str`, keys and landing
ids are `bytes`, sizes are bytes, times are seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtransfer.codec import Part

PROTOCOL_VERSION = 8
# Bytes of one element, by the dtype's name in a checkpoint, in the configuration, and in names of the store's
# spaces, where KV that was quantized on its way into the store is other KV than that of devices in 8 bits.
ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1,
    "stored-int8": 1, "stored-fp8": 1,
}  # fmt: skip


class Shard(Part, frozen=True):
    """The part of a model's KV that one rank holds: layers [start, end) and KV heads [start, end). Of
    latents, heads are the parts in which the tokens of a block are addressed: see `CompatibilityRecord`."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        """Number of KV heads of each layer."""
        return self.head_end - self.head_start


class KvGroup(Part, frozen=True):
    """Layers whose KV shares block tables and pools: their numbers among the layers of a model that have KV.
    They look back `window` tokens, the newest included; 0: over all.

    Layers with a `state_size` have no keys and values but a recurrent state of constant size: so many float32
    elements for each KV head of the model, in which ranks divide it. A block of these layers is their state
    behind its last token that was computed, so all that they need of what is before a token is the block of
    the token before: their window is `STATE_WINDOW`, and most blocks of a sequence are never there."""

    layers: tuple[int, ...]
    window: int
    state_size: int = 0


# The token that is computed, and the one before, whose block has the state.
STATE_WINDOW = 2
# States are float32, whatever activations are.
STATE_ITEM_BYTES = 4


class MovedBytes(NamedTuple):
    """KV of each token, in layers without a window; of each of the last `window` tokens, in layers with one;
    and the states."""

    token_bytes: int
    window_token_bytes: int
    window: int
    state_bytes: int


class BlockSpan(Part, frozen=True):
    """Consecutive blocks of one sequence in a group of layers: its block `first` and those that follow it. In
    a group with a window those before it are behind the window. In one with states, one block has it all."""

    first: int
    block_ids: tuple[int, ...]


class CompatibilityRecord(Part, frozen=True):
    """What two replicas must share before a byte of KV may pass between them.

    `model_fingerprint` is of the checkpoint as it lies on disk, `weight_dtype` the form in which its weights
    take part in products, `dtype` that of activations: KV computed with other weights is other KV. What
    follows `head_dim` says how KV is kept, as `kvtransfer.blocks.layout.BlockLayout` has it: `kv_dtype` "" is
    `dtype`. Without `groups` all layers are one; else the first of them has no window, and all others have.

    A block of latents, of which there is one a token, is addressed in `token_parts`: parts of equally many
    tokens, which count as KV heads do, so that ranks can divide a block by its tokens.
    """

    protocol: int
    model_fingerprint: bytes
    dtype: str
    weight_dtype: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = ""
    num_kinds: int = 2
    scale_bytes: int = 0
    groups: tuple[KvGroup, ...] = ()
    token_parts: int = 1

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the groups behind the first."""
        return tuple(group.window for group in self.groups[1:])

    @property
    def shard(self) -> Shard:
        """The KV of all layers and heads, or of all parts of the tokens of a block."""
        return Shard(0, self.num_layers, 0, self.num_kv_heads * self.token_parts)

    @property
    def kv_item_bytes(self) -> int:
        """Size of an element of KV; 0 for a dtype that is not known here."""
        return ITEM_BYTES.get(self.kv_dtype or self.dtype, 0)

    @property
    def is_given_on(self) -> bool:
        """Whether the ranks of a replica that hold copies of KV receive a part each, and give it to one
        another. Replicas of versions that do not would receive nothing of latents: they keep none."""
        return self.num_kinds == 1

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers and heads, without states, which do not grow with tokens."""
        if not self.groups:
            return self._layer_bytes * self.num_layers
        sizes = zip(self.groups, self.group_bytes, strict=True)
        return sum(size for group, size in sizes if not group.state_size)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """What each group keeps, over all heads: KV of one token, or the state of one sequence."""
        return tuple(
            len(group.layers) * (STATE_ITEM_BYTES * group.state_size * self.num_kv_heads or self._layer_bytes)
            for group in self.groups
        )

    @property
    def _layer_bytes(self) -> int:
        head_bytes = self.head_dim * (self.kv_item_bytes or 2) + self.scale_bytes
        return self.num_kinds * self.num_kv_heads * head_bytes

    @property
    def moved_bytes(self) -> MovedBytes:
        """What a sequence that moves to another replica takes along."""
        if not self.groups:  # asked for with every report of a load
            return MovedBytes(self.token_bytes, 0, 0, 0)
        groups = list(zip(self.groups, self.group_bytes, strict=True))
        windows = [(group.window, size) for group, size in groups if group.window and not group.state_size]
        window_token_bytes = sum(size for _, size in windows)
        return MovedBytes(
            self.token_bytes - window_token_bytes,
            window_token_bytes,
            max((window for window, _ in windows), default=0),
            self.state_bytes,
        )

    @property
    def state_bytes(self) -> int:
        """The recurrent states of a sequence over all layers and heads, however long it is."""
        sizes = (len(group.layers) * group.state_size for group in self.groups)
        return sum(sizes) * self.num_kv_heads * STATE_ITEM_BYTES

    def differences(self, other: CompatibilityRecord) -> list[str]:
        """Return one line per differing field; no lines when the two may exchange KV."""
        return [
            f"{field}: {getattr(self, field)!r} here, {getattr(other, field)!r} there"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]


class Endpoint(Part, frozen=True):
    """One way to reach a rank's KV: the transport's name ("shm", "tcp") and its address."""

    transport: str
    address: str


class RankEndpoints(Part, frozen=True):
    """How a rank's KV pool is reached. `host_id` is equal exactly where memory can be shared."""

    rank: int
    shard: Shard
    host_id: str
    endpoints: tuple[Endpoint, ...]


class ReplicaIdentity(Part, frozen=True):
    """A replica in one life: a restart has the same or a new id and always a new epoch."""

    replica_id: str
    epoch: int
