"""What stands in Redis for the index: its keys, its values, and the scripts that change them.

    <namespace>:{<tag>}:<space><block key> -> entries of 29 bytes, one for each (node, shard) that has it
    <namespace>:{nodes}:<node number>      -> "<epoch> <sequence> <address> <node id>", for the node's lease

The tag is a part of the chain's first key, so that a chain is one slot of a Redis Cluster and one MGET.
Entries hold nothing of the block itself: blocks with the same holders have equal values, which readers
decode once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import Tier

TIERS: tuple[Tier, ...] = ("dram", "nvme", "remote")
# The unit of an entry's stamp: coarse, so that the values of a chain stay equal.
STAMP_S = 600
# An entry that was not announced again for this number of stamps is dropped at the next change of the value:
# else a value that is kept alive by its other holders would collect the nodes of the past.
STALE_STAMPS = 12

_TAG_BYTES = 4
_ENTRY = struct.Struct(">8s4HBIQ")
_SHARD = struct.Struct(">4H")
_GONE = 255

# KEYS: block keys of one tag. ARGV: node number, epoch (8 bytes), stamp, stale stamps, TTL in ms, then for
# each key its changes, 9 bytes each: shard and tier, 255: gone. In place where there is an entry already, so
# that values stay equal. Deterministic, so that 6.2 may replicate the script itself.
UPDATE_SCRIPT = """
local node, epoch, stamp, stale = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local packed_stamp = ''
for _ = 1, 4 do
  packed_stamp = string.char(stamp % 256) .. packed_stamp
  stamp = math.floor(stamp / 256)
end
stamp = tonumber(ARGV[3])
local values = redis.call('MGET', unpack(KEYS))
for i, key in ipairs(KEYS) do
  local changes, tiers, entries = ARGV[5 + i], {}, {}
  for at = 1, #changes, 9 do tiers[changes:sub(at, at + 7)] = changes:sub(at + 8, at + 8) end
  local value = values[i] or ''
  if #value % 29 ~= 0 then value = '' end
  for at = 1, #value, 29 do
    local shard = value:sub(at + 8, at + 15)
    if value:sub(at, at + 7) == node then
      local tier = tiers[shard]
      if tier == nil and value:sub(at + 21, at + 28) == epoch then
        entries[#entries + 1] = value:sub(at, at + 28)
      elseif tier and tier:byte() ~= 255 then
        entries[#entries + 1] = node .. shard .. tier .. packed_stamp .. epoch
        tiers[shard] = '\\255'
      end
    else
      local a, b, c, d = value:byte(at + 17, at + 20)
      if math.abs(((a * 256 + b) * 256 + c) * 256 + d - stamp) <= stale then
        entries[#entries + 1] = value:sub(at, at + 28)
      end
    end
  end
  for at = 1, #changes, 9 do
    local shard = changes:sub(at, at + 7)
    if tiers[shard]:byte() ~= 255 then
      entries[#entries + 1] = node .. shard .. tiers[shard] .. packed_stamp .. epoch
      tiers[shard] = '\\255'
    end
  end
  if #entries == 0 then
    redis.call('DEL', key)
  else
    redis.call('SET', key, table.concat(entries), 'PX', ARGV[5])
  end
end
return #KEYS
"""

# KEYS: the node's. ARGV: the record, its lease in ms. Returns the record that was there and replaces it, but
# not one of a later owner. Epochs are padded decimals, so their order is that of the text in any locale.
RENEW_SCRIPT = """
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 20) <= ARGV[1]:sub(1, 20) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return old
"""

# KEYS: the node's. ARGV: the epoch. Deletes the record when it is that owner's.
LEAVE_SCRIPT = """
local old = redis.call('GET', KEYS[1])
if old and old:sub(1, 20) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class Entry(NamedTuple):
    """One holder as it stands in a value; `stamp` is when it was announced, in units of `STAMP_S`."""

    node: bytes
    shard: Shard
    tier: Tier
    stamp: int
    epoch: int


class NodeRecord(NamedTuple):
    """A node that lives. `sequence` counts its renewals: an older one means that Redis lost something."""

    epoch: int
    sequence: int
    address: str
    node_id: str


def key_prefix(namespace: str, chain: bytes, space: bytes) -> bytes:
    """Return the prefix of a block's key, for all blocks of the chain that begins with the block `chain`."""
    return b"%s:{%s}:%s" % (namespace.encode(), chain[:_TAG_BYTES].hex().encode(), space)


def node_number(node_id: str) -> bytes:
    """Return the 8 bytes that stand for the node in entries."""
    return hashlib.sha256(node_id.encode()).digest()[:8]


def node_key(namespace: str, number: bytes) -> bytes:
    return b"%s:{nodes}:%s" % (namespace.encode(), number.hex().encode())


def encode_change(shard: Shard, tier: Tier | None) -> bytes:
    """Return one change of a block's value, as `UPDATE_SCRIPT` takes it."""
    packed = _SHARD.pack(shard.layer_start, shard.layer_end, shard.head_start, shard.head_end)
    return packed + bytes((_GONE if tier is None else TIERS.index(tier),))


def encode_epoch(epoch: int) -> bytes:
    """As in entries."""
    return struct.pack(">Q", epoch)


def decode_entries(value: bytes) -> Iterator[Entry]:
    """Yield the entries of a value; nothing of one that is not ours."""
    if len(value) % _ENTRY.size:
        return
    for node, *numbers, tier, stamp, epoch in _ENTRY.iter_unpack(value):
        if tier < len(TIERS):
            yield Entry(node, Shard(*numbers), TIERS[tier], stamp, epoch)


def encode_node(record: NodeRecord) -> bytes:
    """Return the value of a node's key."""
    return f"{padded(record.epoch)} {record.sequence} {record.address} {record.node_id}".encode()


def decode_node(value: bytes) -> NodeRecord:
    """Decode the value of a node's key; `StoreError` for one that is not ours."""
    try:
        epoch, sequence, address, node_id = value.decode().split(" ", 3)
        return NodeRecord(int(epoch), int(sequence), address, node_id)
    except ValueError as error:
        raise StoreError(f"the index has a node record that cannot be read: {value[:200]!r}") from error


def padded(epoch: int) -> str:
    """As node records begin: 20 digits."""
    return f"{epoch:020d}"
