"""Sample a token for each row of logits in two kernels, without a synchronization: what
`workers.rank.sampler` does, for slots whose parameters are on the device.

The first kernel reads every logit once, in pieces of a fixed length: bias, penalties, minimum length, mask,
temperature, then noise and the best token of the piece. A row with top-k, top-p or min-p leaves the largest
values of the piece instead. The second takes the best of all pieces. For a row with filters it finds the
value that the last kept token has (all three filters keep the tokens that are at least as likely as one) and
draws from the pieces that reach it. The largest values of all pieces nearly always contain that token; else
the pieces with more are read again. Logits are not changed.

In kernels, a key is an int32 whose order is that of the float32 it stands for, and a row's scratch has, for
each piece, [best score or key of the largest value, its token id or the mass, keys of the largest values]."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from workers.errors import WorkerError
from workers.model import noise

# The number of logits of a piece, and of its largest values that are kept.
_PIECE, _CANDIDATES = 1024, 32
# The most registers of a thread that draws from a row. By itself ptxas gives it 64 and spills 31, though few
# such programs run at a time.
_ROWS_REGISTERS = 128
# The arguments of which a program reads few items, and whose alignments differ from step to step.
_INDICES = ["slots", "masks"]
# The most logit biases and end tokens of a slot.
MOST_BIASES, MOST_ENDS = 1024, 256
# The fields of a slot's record that kernels read, one word each after two of the key.
_FIELDS = (
    "num_output", "min_tokens", "num_bias", "num_ends", "top_k",
    "temperature", "top_p", "log_min_p", "repetition", "presence", "frequency",
)  # fmt: skip
RECORD_WORDS = 2 + len(_FIELDS)


class DeviceSlots:
    """The sampling parameters of every slot, on the device, in tensors that are never reallocated: what
    `workers.rank.logits.SlotTable` has on the host.

    `records` int32 [max_slots, RECORD_WORDS] are those that `record_words` makes, and change by one copy a
    step. Only slots with biases, end tokens or penalties have `start_tokens` called after their start.
    `lists` [max_slots, 2 * MOST_BIASES + MOST_ENDS] holds ids and values of biases, and ids of end tokens;
    `counts` [max_slots, vocab_size] 0 for a token that is not penalized, else one more than its number in the
    output."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.records = torch.zeros((max_slots, RECORD_WORDS), dtype=torch.int32, device=device)
        num_listed = 2 * MOST_BIASES + MOST_ENDS
        self.lists = torch.zeros((max_slots, num_listed), dtype=torch.int32, device=device)
        self.counts = torch.zeros((max_slots, vocab_size), dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(max_slots: int, vocab_size: int) -> int:
        """Return how much memory of the device the slots take."""
        return 4 * max_slots * (RECORD_WORDS + 2 * MOST_BIASES + MOST_ENDS + vocab_size)

    def start(self, slots: Tensor, words: Tensor) -> None:
        """Set the records of `slots` [num_slots] to `words` [num_slots, RECORD_WORDS], both on the device."""
        self.records.index_copy_(0, slots.long(), words)

    def lift_minimum(self, slot: int) -> None:
        """Set a slot's minimum of tokens to 0."""
        self.records[slot, 2 + _FIELDS.index("min_tokens")] = 0

    def start_tokens(
        self,
        slot: int,
        bias_ids: NDArray[np.int32],
        bias_values: NDArray[np.float32],
        end_ids: NDArray[np.int32],
        ids: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> None:
        """Set the tokens that a slot treats specially: `ids` are penalized, and `counts` times in the output.

        Raises WorkerError for too many."""
        if len(bias_ids) > MOST_BIASES or len(end_ids) > MOST_ENDS:
            raise WorkerError(
                f"{len(bias_ids)} logit biases and {len(end_ids)} end tokens; at most {MOST_BIASES} and "
                f"{MOST_ENDS} are possible on this device"
            )
        listed = np.zeros(self.lists.shape[1], np.int32)
        listed[: len(bias_ids)] = bias_ids
        listed[MOST_BIASES : MOST_BIASES + len(bias_ids)] = bias_values.view(np.int32)
        listed[2 * MOST_BIASES : 2 * MOST_BIASES + len(end_ids)] = end_ids
        self.lists[slot] = self._upload(listed)
        self.counts[slot].zero_()
        if len(ids):
            self.counts[slot, self._upload(ids.astype(np.int64))] = self._upload(counts + 1)

    def _upload(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.records.is_cuda:  # copies from other memory wait for the device
            tensor = tensor.pin_memory()
        return tensor.to(self.records.device, non_blocking=True)


def record_words(records: NDArray[np.void]) -> NDArray[np.int32]:
    """Return the words [num_records, RECORD_WORDS] that kernels read of records of
    `workers.rank.logits.SLOT`."""
    words = np.empty((len(records), RECORD_WORDS), np.int32)
    words[:, :2] = np.ascontiguousarray(records["key"]).view(np.int32).reshape(-1, 2)
    for index, name in enumerate(_FIELDS, 2):
        words[:, index] = np.ascontiguousarray(records[name]).view(np.int32)
    return words


def sample(
    logits: Tensor,
    table: DeviceSlots,
    slots: Tensor,
    masks: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row of float32 `logits` [num_rows, vocab_size], and count it as output of its
    slot. Each slot of `slots` int32 [num_rows] may be given once; a row of slot -1 is left out, and its token
    is 0. `masks` int32 [num_rows, ceil(vocab_size / 32)] may allow only some tokens: bit i of word w is that
    of token 32 w + i. `last_tokens` int32 [max_slots] takes the slots' tokens. Returns int32 [num_rows]."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert vocab_size == table.vocab_size
    assert logits.stride(1) == 1
    assert slots.shape == (num_rows,)
    assert masks is None or (masks.shape == (num_rows, triton.cdiv(vocab_size, 32)) and masks.stride(1) == 1)
    num_pieces = triton.cdiv(vocab_size, _PIECE)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return tokens
    scratch = tokens.new_empty((num_rows, num_pieces, 2 + _CANDIDATES))
    arguments = (
        logits, masks, table.records, table.lists, table.counts, slots, scratch,
        logits.stride(0), masks.stride(0) if masks is not None else 0, vocab_size,
    )  # fmt: skip
    sizes = {
        "HAS_MASKS": masks is not None,
        "PIECE": _PIECE,
        "CANDIDATES": _CANDIDATES,
        "enable_fp_fusion": False,
    }
    _pieces_kernel[(num_pieces, num_rows)](*arguments, **sizes, num_warps=4)
    _rows_kernel[(num_rows,)](
        *arguments, tokens, last_tokens, **sizes,
        HAS_LAST=last_tokens is not None, NUM_PIECES=num_pieces,
        ALL_CANDIDATES=triton.next_power_of_2(num_pieces * _CANDIDATES),
        ALL_PIECES=triton.next_power_of_2(num_pieces), num_warps=8, maxnreg=_ROWS_REGISTERS,
    )  # fmt: skip
    return tokens


# ------------------------------------------------------------------------------------ what kernels share

_RECORD = tl.constexpr(RECORD_WORDS)
_NUM_OUTPUT, _MIN_TOKENS, _NUM_BIAS, _NUM_ENDS, _TOP_K = (tl.constexpr(2 + i) for i in range(5))
_TEMPERATURE, _TOP_P, _LOG_MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(7 + i) for i in range(6))
_MOST_BIASES, _MOST_LISTED = tl.constexpr(MOST_BIASES), tl.constexpr(2 * MOST_BIASES + MOST_ENDS)
_WEYL, _MULTIPLY_1, _MULTIPLY_2 = (
    tl.constexpr(value) for value in (noise.WEYL, noise.MULTIPLY_1, noise.MULTIPLY_2)
)
_DROPPED_BITS, _UNIFORM = tl.constexpr(64 - noise.UNIFORM_BITS), tl.constexpr(2.0**-noise.UNIFORM_BITS)
_LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)
# Below this value, log(1 - u) is computed as a series: the logarithm of a rounded difference would be wrong.
_SMALL = tl.constexpr(1 / 16)
_LARGEST_INT32 = tl.constexpr(2**31 - 1)
# The value that stands for the largest logit where no token is allowed, so that differences are numbers.
_LEAST_TOP = tl.constexpr(-3.0e38)
# The key of minus infinity.
_LEAST_KEY = tl.constexpr(-2139095041)


@triton.jit
def _is_filtered(record):
    top_p = tl.load(record + _TOP_P).to(tl.float32, bitcast=True)
    log_min_p = tl.load(record + _LOG_MIN_P).to(tl.float32, bitcast=True)
    temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True)
    has_filter = (tl.load(record + _TOP_K) > 0) | (top_p < 1.0) | (log_min_p > -float("inf"))
    return has_filter & (temperature > 0.0)


@triton.jit
def _is_penalized(record):
    repetition = tl.load(record + _REPETITION).to(tl.float32, bitcast=True)
    presence = tl.load(record + _PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(record + _FREQUENCY).to(tl.float32, bitcast=True)
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def _ordered(values):
    """Return the keys of float32 values; both zeros have one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _values_of(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    """Apply splitmix64's finalizer to uint64."""
    x = (x ^ (x >> 30)) * _MULTIPLY_1
    x = (x ^ (x >> 27)) * _MULTIPLY_2
    return x ^ (x >> 31)


@triton.jit
def output_key(record):
    """Return the key of the slot's next output, uint64, as `workers.model.noise.output_keys` does."""
    low = tl.load(record).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return _mix(tl.load(record + _NUM_OUTPUT).to(tl.uint64) * _WEYL + (low | (high << 32)))


@triton.jit
def hashed(key, ids):
    """Hash the key of an output, uint64, with token ids, as `workers.model.noise.hashes` does."""
    return _mix(key + (ids + 1).to(tl.uint64) * _WEYL)


@triton.jit
def gumbel(key, ids):
    """Return the noise of tokens, as `workers.model.noise.gumbel` does up to rounding of logarithms."""
    uniform = ((hashed(key, ids) >> _DROPPED_BITS) | 1).to(tl.int64).to(tl.float32) * _UNIFORM
    u = tl.minimum(uniform, _LARGEST_UNIFORM)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -tl.log(tl.where(u < _SMALL, series, -tl.log(1.0 - u)))


@triton.jit
def _changed_piece(
    logits, masks, record, lists, counts, piece, vocab_size, HAS_MASKS: tl.constexpr, PIECE: tl.constexpr
):
    """Return a piece's token ids, and its logits after bias, penalties, minimum length, mask and temperature;
    pointers are those of the row and of the slot."""
    ids = piece * PIECE + tl.arange(0, PIECE)
    is_there = ids < vocab_size
    x = tl.load(logits + ids, mask=is_there, other=-float("inf"))
    for index in range(tl.load(record + _NUM_BIAS)):
        bias = tl.load(lists + _MOST_BIASES + index).to(tl.float32, bitcast=True)
        x = tl.where(ids == tl.load(lists + index), x + bias, x)
    if _is_penalized(record):
        repetition = tl.load(record + _REPETITION).to(tl.float32, bitcast=True)
        presence = tl.load(record + _PRESENCE).to(tl.float32, bitcast=True)
        frequency = tl.load(record + _FREQUENCY).to(tl.float32, bitcast=True)
        seen = tl.load(counts + ids, mask=is_there, other=0)
        repeated = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
        less = (seen - 1).to(tl.float32) * frequency
        x = tl.where(seen > 0, repeated - less - tl.where(seen > 1, presence, 0.0), x)
    if tl.load(record + _NUM_OUTPUT) < tl.load(record + _MIN_TOKENS):
        for index in range(tl.load(record + _NUM_ENDS)):
            x = tl.where(ids == tl.load(lists + 2 * _MOST_BIASES + index), -float("inf"), x)
    if HAS_MASKS:
        words = tl.load(masks + ids // 32, mask=is_there, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) == 0, -float("inf"), x)
    temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature > 0.0:
        x = tl.div_rn(x, temperature)
    return ids, x


# --------------------------------------------------------------------------------------- the first kernel


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _pieces_kernel(
    logits, masks, records, lists, counts, slots, scratch, logits_stride, masks_stride, vocab_size,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Draw from one piece of a row, or leave its largest values; one program is a piece of a row."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    record = records + slot * _RECORD
    ids, x = _changed_piece(
        logits + row * logits_stride, masks + row * masks_stride if HAS_MASKS else masks, record,
        lists + slot * _MOST_LISTED, counts + slot * vocab_size, piece, vocab_size, HAS_MASKS, PIECE,
    )  # fmt: skip
    result = scratch + (row * tl.num_programs(0) + piece) * (2 + CANDIDATES)
    if _is_filtered(record):
        top = tl.max(x, 0)
        mass = tl.sum(tl.exp(x - tl.maximum(top, _LEAST_TOP)), 0)
        tl.store(result, _ordered(top))
        tl.store(result + 1, mass.to(tl.int32, bitcast=True))
        tl.store(result + 2 + tl.arange(0, CANDIDATES), tl.topk(_ordered(x), CANDIDATES))
    else:
        temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True)
        if temperature > 0.0:
            x += gumbel(output_key(record), ids)
        best = tl.max(x, 0)
        tl.store(result, best.to(tl.int32, bitcast=True))
        tl.store(result + 1, tl.min(tl.where(x == best, ids, _LARGEST_INT32), 0))


# -------------------------------------------------------------------------------------- the second kernel


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _least_key(keys, weights, target, low, high):
    """Return the least key from `low` on such that the weights of greater ones sum to less than `target`, and
    `high` if all before it are too small."""
    for _ in range(32):
        middle = _middle(low, high)
        is_enough = tl.sum(tl.where(keys > middle, weights, 0.0), 0) < target
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return high


@triton.jit
def _weight_above(
    logits, masks, record, lists, counts, result, least, top, vocab_size, is_counted,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, CANDIDATES: tl.constexpr, NUM_PIECES: tl.constexpr,
):  # fmt: skip
    """Return the number, or else the mass, of the row's tokens whose keys are greater than `least`."""
    total = 0.0
    for piece in range(NUM_PIECES):
        if tl.load(result + piece * (2 + CANDIDATES)) > least:
            _, x = _changed_piece(logits, masks, record, lists, counts, piece, vocab_size, HAS_MASKS, PIECE)
            weights = tl.where(is_counted, 1.0, tl.exp(x - top))
            total += tl.sum(tl.where(_ordered(x) > least, weights, 0.0), 0)
    return total


@triton.jit
def _last_kept(
    logits, masks, record, lists, counts, result, vocab_size,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, CANDIDATES: tl.constexpr, NUM_PIECES: tl.constexpr,
    ALL_CANDIDATES: tl.constexpr, ALL_PIECES: tl.constexpr,
):  # fmt: skip
    """Return the key of the least likely token that top-k, then top-p, then min-p keep."""
    pieces = tl.arange(0, ALL_PIECES)
    piece_results = result + pieces * (2 + CANDIDATES)
    tops = tl.load(piece_results, mask=pieces < NUM_PIECES, other=_LEAST_KEY)
    masses = tl.load(piece_results + 1, mask=pieces < NUM_PIECES, other=0).to(tl.float32, bitcast=True)
    # Tokens above this key are candidates, and only some of the tokens at it or below.
    complete = tl.max(tl.load(piece_results + 1 + CANDIDATES, mask=pieces < NUM_PIECES, other=_LEAST_KEY), 0)
    places = tl.arange(0, ALL_CANDIDATES)
    candidates = result + places // CANDIDATES * (2 + CANDIDATES) + 2 + places % CANDIDATES
    keys = tl.load(candidates, mask=places < NUM_PIECES * CANDIDATES, other=_LEAST_KEY)
    top_key = tl.max(tops, 0)
    top = tl.maximum(_values_of(top_key), _LEAST_TOP)
    weights = tl.exp(_values_of(keys) - top)
    mass = tl.sum(masses * tl.exp(_values_of(tops) - top), 0)

    kept = tl.full((), _LEAST_KEY, tl.int32)
    top_p = tl.load(record + _TOP_P).to(tl.float32, bitcast=True)
    for step in range(2):  # top-k, then top-p over what it keeps
        is_counted = step == 0
        is_on = tl.where(is_counted, tl.load(record + _TOP_K) > 0, top_p < 1.0)
        if is_on:
            target = tl.where(is_counted, tl.load(record + _TOP_K).to(tl.float32), top_p * mass)
            least = _least_key(keys, tl.where(is_counted, 1.0, weights), target, kept, top_key)
            if least <= complete:
                high = complete
                while least < high:
                    middle = _middle(least, high)
                    above = _weight_above(
                        logits, masks, record, lists, counts, result, middle, top, vocab_size, is_counted,
                        HAS_MASKS, PIECE, CANDIDATES, NUM_PIECES,
                    )  # fmt: skip
                    is_enough = above < target
                    high = tl.where(is_enough, middle, high)
                    least = tl.where(is_enough, least, middle + 1)
            kept = least
            if is_counted & (top_p < 1.0):
                mass = tl.sum(tl.where(keys >= kept, weights, 0.0), 0)
                if kept <= complete:
                    mass = _weight_above(
                        logits, masks, record, lists, counts, result, kept - 1, top, vocab_size, False,
                        HAS_MASKS, PIECE, CANDIDATES, NUM_PIECES,
                    )  # fmt: skip
    log_min_p = tl.load(record + _LOG_MIN_P).to(tl.float32, bitcast=True)
    return tl.maximum(kept, _ordered(top + log_min_p))


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _rows_kernel(
    logits, masks, records, lists, counts, slots, scratch, logits_stride, masks_stride, vocab_size,
    tokens, last_tokens,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, CANDIDATES: tl.constexpr, HAS_LAST: tl.constexpr,
    NUM_PIECES: tl.constexpr, ALL_CANDIDATES: tl.constexpr, ALL_PIECES: tl.constexpr,
):  # fmt: skip
    """Take the best of a row's pieces, or draw from those that filters keep; one program is a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(tokens + row, 0)
        return
    record = records + slot * _RECORD
    logits += row * logits_stride
    if HAS_MASKS:
        masks += row * masks_stride
    lists += slot * _MOST_LISTED
    counts += slot * vocab_size
    result = scratch + row * NUM_PIECES * (2 + CANDIDATES)
    token = tl.full((), _LARGEST_INT32, tl.int32)
    if _is_filtered(record):
        kept = _last_kept(
            logits, masks, record, lists, counts, result, vocab_size,
            HAS_MASKS, PIECE, CANDIDATES, NUM_PIECES, ALL_CANDIDATES, ALL_PIECES,
        )  # fmt: skip
        best = tl.full((), -float("inf"), tl.float32)
        key = output_key(record)
        for piece in range(NUM_PIECES):
            if tl.load(result + piece * (2 + CANDIDATES)) >= kept:
                ids, x = _changed_piece(
                    logits, masks, record, lists, counts, piece, vocab_size, HAS_MASKS, PIECE
                )
                scores = tl.where(_ordered(x) >= kept, x + gumbel(key, ids), -float("inf"))
                piece_best = tl.max(scores, 0)
                piece_token = tl.min(tl.where(scores == piece_best, ids, _LARGEST_INT32), 0)
                token = tl.where(piece_best > best, piece_token, token)
                best = tl.maximum(best, piece_best)
    else:
        pieces = tl.arange(0, ALL_PIECES)
        is_there = pieces < NUM_PIECES
        piece_results = result + pieces * (2 + CANDIDATES)
        scores = tl.load(piece_results, mask=is_there, other=0).to(tl.float32, bitcast=True)
        ids = tl.load(piece_results + 1, mask=is_there, other=_LARGEST_INT32)
        scores = tl.where(is_there, scores, -float("inf"))
        token = tl.min(tl.where(scores == tl.max(scores, 0), ids, _LARGEST_INT32), 0)
    token = tl.where(token < vocab_size, token, 0)  # where no token is allowed, or logits are not numbers
    tl.store(tokens + row, token)
    if HAS_LAST:
        tl.store(last_tokens + slot, token)
    tl.store(record + _NUM_OUTPUT, tl.load(record + _NUM_OUTPUT) + 1)
    if _is_penalized(record):
        seen = tl.load(counts + token)
        tl.store(counts + token, tl.where(seen == 0, 2, seen + 1))
