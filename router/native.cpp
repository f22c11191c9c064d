// The two loops of a routing decision over all replicas: how much of a prompt each has, and what each choice costs.
// The formulas are those of router/policies/cost_policy.py, term by term and in the same order, so that both find the same
// costs to the last bit; structs are packed by router/price_table.py, field by field.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "block_table.h"

namespace {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int64_t NONE = -1;

// A mask has four bits of each replica (router/radix.py): device, DRAM, NVMe and mark.
constexpr int SLOT_BITS = 4;
constexpr int DRAM_BIT = 1, MARK_BIT = 3;
constexpr int64_t SLOTS_PER_WORD = 64 / SLOT_BITS;
constexpr uint64_t DEVICE_BITS = 0x1111111111111111ull;

enum Side : int64_t { COMPUTES = 1, DECODES = 2 };
enum Role : int64_t { BOTH, PREFILL, DECODE };

struct Settings {
  double work_part, overlap, no_space_s, stale_s, never_fits_s, num_steps;
  int64_t block_tokens, skip_prefill_tokens;
};

// Multiplies hashes of replicas, because checksums with two seeds differ by the same bits for all ids.
constexpr uint32_t HASH_FACTOR = 0x9E3779B1u;

struct Row {
  int64_t slot, sides, role, checksum, length_class;
  int64_t turn, num_sent_tokens, num_held_tokens, num_sent_sequences, num_held_sequences, num_free_blocks,
      num_total_blocks, max_local_tokens, window_tokens;
  double received_at, num_places, place_s, token_s, product_s, attention_s, mixed_s, transfer_s, dram_s, nvme_s,
      present_step_s, step_s, stretch, disturbed_part, state_s, window_token_s;
};

struct Query {
  // `num_slots` of each tier are in the counts.
  int64_t num_slots, num_tokens, num_growth_tokens, may_stay, finds_other, before_prefill, before_decode;
  double kv_share, held_part, oldest, max_wait_s, max_ttft_s;
};

struct Costs {
  double prefill_s, decode_s, local_s, transfer_s, lacking, queue_s, place_wait_s, own_s, load_s, best_pair_s;
  int64_t row, rank, must_stay;
};

struct Result {
  double pair_s, local_s, other_s, before_s;
  int64_t prefill, decode, local;
};

struct Table {
  const Settings* settings;
  const Row* rows;
  int64_t num_rows;
  // By row: two lists of those that may compute for others, and of those that may decode.
  Costs *prefills, *decodes;
};

// Count the positions from which on a bit is set to that from which on it is not any more, by replica.
inline void count_changes(uint64_t before, uint64_t now, int64_t position, int32_t* counts) {
  for (uint64_t changed = before ^ now; changed; changed &= changed - 1) {
    const int bit = __builtin_ctzll(changed);
    counts[bit / SLOT_BITS] += (now >> bit & 1) ? -static_cast<int32_t>(position) : static_cast<int32_t>(position);
  }
}

inline Costs price(const Settings& settings, const Row& now, const Query& query, int64_t num_device, int64_t num_dram,
                   int64_t num_nvme, double wait_s, bool has_wait) {
  const int64_t num_tokens = query.num_tokens, block_tokens = settings.block_tokens;
  const int64_t matched = std::min(num_device * block_tokens, num_tokens - 1), rest = num_tokens - matched;
  int64_t dram = 0, nvme = 0;
  if (num_dram && now.dram_s < now.token_s) dram = std::min(num_dram * block_tokens, rest - 1);
  if (num_nvme && now.nvme_s < now.token_s) nvme = std::min(num_nvme * block_tokens, rest - 1 - dram);
  const int64_t uncached = rest - dram - nvme;
  const double computed = static_cast<double>(uncached);
  const double load_s = dram * now.dram_s + nvme * now.nvme_s;
  const double prefill_s =
      computed * (now.product_s + now.attention_s * (static_cast<double>(num_tokens - uncached) + 0.5 * computed));
  const double own_s = now.stretch * prefill_s + computed * now.mixed_s;

  double disturbance_s = 0.0;
  if (now.role != PREFILL) {
    const double num_streams = static_cast<double>(now.num_sent_sequences + (now.role == DECODE));
    const double part = now.disturbed_part < 0 ? std::min(1.0, prefill_s / now.present_step_s) : now.disturbed_part;
    disturbance_s = num_streams * prefill_s * part;
  }
  const double held_tokens = query.held_part * static_cast<double>(now.num_held_tokens);
  double queue_s = (static_cast<double>(now.num_sent_tokens) + held_tokens) * now.token_s;
  if (has_wait) queue_s = wait_s;
  const double num_before =
      static_cast<double>(now.num_sent_sequences) + query.held_part * static_cast<double>(now.num_held_sequences);
  const double place_wait_s = std::max(0.0, num_before + 1.0 - now.num_places) * now.place_s;

  const bool is_stale = now.received_at < query.oldest;
  const int64_t shared_blocks = static_cast<int64_t>(static_cast<double>(now.num_total_blocks) * query.kv_share);
  const bool never_fits = now.num_total_blocks > 0 && shared_blocks * block_tokens <= num_tokens;
  double space_s = 0.0;
  const int64_t needed = rest + query.num_growth_tokens;
  const int64_t missing = (needed + block_tokens - 1) / block_tokens - now.num_free_blocks;
  if (now.num_total_blocks && missing > 0)
    space_s = settings.no_space_s + static_cast<double>(missing * block_tokens) * now.token_s;
  const double decoding_s = settings.num_steps * now.step_s + space_s + (is_stale ? settings.stale_s : 0.0);

  double prefill_pressure_s = settings.work_part * prefill_s + disturbance_s;
  double local_pressure_s = decoding_s + prefill_pressure_s, decode_pressure_s = decoding_s;
  if (never_fits) {
    prefill_pressure_s += settings.never_fits_s;
    decode_pressure_s += settings.never_fits_s;
  }
  const bool is_too_long = now.max_local_tokens > 0 && now.max_local_tokens <= num_tokens;
  if (is_too_long || (query.kv_share < 1 && never_fits)) local_pressure_s += settings.never_fits_s;
  if (is_stale) {
    prefill_pressure_s += settings.stale_s;
    local_pressure_s += settings.stale_s;
  }
  Costs costs;
  const double once_s =
      now.state_s + static_cast<double>(std::min(num_tokens, now.window_tokens)) * now.window_token_s;
  costs.prefill_s = own_s + load_s + queue_s + prefill_pressure_s + once_s;
  costs.decode_s = place_wait_s + decode_pressure_s;
  costs.local_s = own_s + load_s + std::max(queue_s, place_wait_s) + local_pressure_s;
  costs.transfer_s = static_cast<double>(num_tokens) * now.transfer_s;
  costs.lacking = static_cast<double>(rest) / static_cast<double>(num_tokens);
  costs.queue_s = queue_s;
  costs.place_wait_s = place_wait_s;
  costs.own_s = own_s;
  costs.load_s = load_s;
  costs.best_pair_s = NEVER;
  costs.must_stay = query.may_stay && computed + (load_s ? load_s / now.token_s : 0.0) <=
                                          static_cast<double>(settings.skip_prefill_tokens);
  return costs;
}

// Whether a prompt that is computed at the one, with a place at the other, is in time.
inline bool is_in_time(const Query& query, const Costs& computes, const Costs& decodes) {
  const double wait_s = std::max({computes.queue_s, decodes.place_wait_s, computes.load_s});
  return wait_s <= query.max_wait_s && wait_s + computes.own_s <= query.max_ttft_s;
}

inline double pair_cost(const Settings& settings, const Costs& prefill, const Costs& decode) {
  double cost_s = prefill.prefill_s + decode.decode_s;
  cost_s -= settings.overlap * std::min(prefill.queue_s, decode.place_wait_s);
  return cost_s + prefill.transfer_s * decode.lacking;
}

}  // namespace

extern "C" {

block_table::Table* new_block_table() { return new block_table::Table(); }

void delete_block_table(block_table::Table* table) { delete table; }

int64_t block_table_size(const block_table::Table* table) { return table->size(); }

// Sets or clears the bit in the mask of each of the `keys[num_keys][16]`.
void change_masks(block_table::Table* table, const uint8_t* keys, int64_t num_keys, int64_t bit, int64_t is_set) {
  table->change(keys, num_keys, bit, is_set != 0);
}

// Writes the `masks[num_keys][num_words]` of keys, up to the first without one where it `stops`; returns how many.
int64_t read_masks(const block_table::Table* table, const uint8_t* keys, int64_t num_keys, int64_t stops,
                   uint64_t* masks, int64_t num_words) {
  return table->masks(keys, num_keys, stops != 0, masks, num_words);
}

// Counts the leading keys that each replica has, in `counts[3][num_words * 16]`: on its device, and after them in DRAM
// and on NVMe, up to the first key that it has nowhere. `masks[num_keys][num_words]`.
void count_blocks(const uint64_t* masks, int64_t num_keys, int64_t num_words, int32_t* counts) {
  const int64_t num_slots = num_words * SLOTS_PER_WORD;
  for (int64_t word = 0; word < num_words; word++) {
    int32_t* const of_device = counts + word * SLOTS_PER_WORD;
    int32_t* const of_dram = of_device + num_slots;
    int32_t* const of_nvme = of_dram + num_slots;
    uint64_t device = DEVICE_BITS, reached = DEVICE_BITS, last_device = 0, last_dram = 0, last_nvme = 0;
    int64_t position = 0;
    for (; position < num_keys && reached; position++) {
      const uint64_t mask = masks[position * num_words + word];
      const uint64_t dram = mask >> 1 & DEVICE_BITS, nvme = mask >> 2 & DEVICE_BITS;
      device &= mask;
      reached &= device | dram | nvme;
      const uint64_t in_dram = dram & reached & ~device, in_nvme = reached & ~device & ~in_dram;
      count_changes(last_device, device, position, of_device);
      count_changes(last_dram, in_dram, position, of_dram);
      count_changes(last_nvme, in_nvme, position, of_nvme);
      last_device = device, last_dram = in_dram, last_nvme = in_nvme;
    }
    count_changes(last_device, 0, position, of_device);
    count_changes(last_dram, 0, position, of_dram);
    count_changes(last_nvme, 0, position, of_nvme);
  }
}

// Cuts what `count_blocks` has counted of each replica with marks to the last block behind which it can continue, among
// the first `most`. Replica `slot` needs `needed[slot]` marks without a gap there, or one at each block from the first
// on; with 0 it needs none.
void limit_to_marks(const uint64_t* masks, int64_t num_words, int64_t most, int32_t* counts, const int32_t* needed,
                    int64_t num_needed) {
  const int64_t num_slots = num_words * SLOTS_PER_WORD;
  for (int64_t slot = 0; slot < num_needed; slot++) {
    int32_t &device = counts[slot], &dram = counts[num_slots + slot], &nvme = counts[2 * num_slots + slot];
    const int64_t num_counted = device + dram + nvme;
    if (!needed[slot] || !num_counted) continue;
    const uint64_t* const word = masks + slot / SLOTS_PER_WORD;
    const int shift = static_cast<int>(slot % SLOTS_PER_WORD) * SLOT_BITS;
    int64_t end = 0, num_marked = 0;
    for (int64_t position = 1; position <= std::min(num_counted, most); position++) {
      const bool is_marked = word[(position - 1) * num_words] >> (shift + MARK_BIT) & 1;
      num_marked = is_marked ? num_marked + 1 : 0;
      if (num_marked >= std::min<int64_t>(needed[slot], position)) end = position;
    }
    if (end == num_counted) continue;
    device = static_cast<int32_t>(std::min<int64_t>(device, end));
    dram = 0;
    for (int64_t position = device; position < end; position++)
      dram += word[position * num_words] >> (shift + DRAM_BIT) & 1;
    nvme = static_cast<int32_t>(end) - device - dram;
  }
}

// Finds the cheapest pair and the cheapest replica that serves alone, of those that are in time. Of equal costs the first wins by the ids' hashes,
// where their checksums `moved` by the seed are given (by the length of an id), else the least recently chosen. Where
// `waits` are given, those that are not NaN replace the queues of their rows.
void find_cheapest(const Table* table, const Query* asked, const int32_t* counts, const double* waits,
                   const uint32_t* moved, Result* result) {
  const Settings& settings = *table->settings;
  const Query& query = *asked;
  const int64_t num_slots = query.num_slots;
  int64_t num_prefills = 0, num_decodes = 0;
  Costs *const prefills = table->prefills, *const decodes = table->decodes;
  *result = {NEVER, NEVER, NEVER, NEVER, NONE, NONE, NONE};
  Result& best = *result;
  int64_t local_rank = 0;
  for (int64_t index = 0; index < table->num_rows; index++) {
    const Row& row = table->rows[index];
    const int32_t* const count = counts + row.slot;
    const bool has_wait = waits != nullptr && waits[index] == waits[index];
    Costs costs = price(settings, row, query, count[0], count[num_slots], count[2 * num_slots],
                        has_wait ? waits[index] : 0.0, has_wait);
    costs.row = index;
    costs.rank = row.turn;
    if (moved != nullptr)
      costs.rank = (static_cast<uint32_t>(row.checksum) ^ moved[row.length_class]) * HASH_FACTOR;
    if (row.sides & COMPUTES) prefills[num_prefills++] = costs;
    if (row.sides & DECODES) {
      if (!is_in_time(query, costs, costs)) costs.local_s = NEVER;
      decodes[num_decodes++] = costs;
      if (query.may_stay && (costs.local_s < best.local_s ||
                             (costs.local_s == best.local_s && best.local != NONE && costs.rank < local_rank))) {
        best.local_s = costs.local_s;
        best.local = index;
        local_rank = costs.rank;
      }
    }
  }
  int64_t prefill_rank = 0, decode_rank = 0;
  for (int64_t i = 0; i < num_prefills; i++) {
    Costs& prefill = prefills[i];
    for (int64_t j = 0; j < num_decodes; j++) {
      const Costs& decode = decodes[j];
      if (decode.must_stay || decode.row == prefill.row || !is_in_time(query, prefill, decode)) continue;
      const double cost_s = pair_cost(settings, prefill, decode);
      if (cost_s < prefill.best_pair_s) prefill.best_pair_s = cost_s;
      if (cost_s > best.pair_s) continue;
      if (cost_s == best.pair_s) {
        if (best.prefill == NONE || prefill.rank > prefill_rank) continue;
        if (prefill.rank == prefill_rank && decode.rank >= decode_rank) continue;
      }
      best.pair_s = cost_s;
      best.prefill = prefill.row, best.decode = decode.row;
      prefill_rank = prefill.rank, decode_rank = decode.rank;
    }
  }
  const bool stays = best.local != NONE && best.local_s <= best.pair_s;
  if (query.finds_other) {
    const int64_t compute = stays ? best.local : best.prefill;
    for (int64_t i = 0; i < num_prefills; i++)
      if (prefills[i].row != compute) best.other_s = std::min(best.other_s, prefills[i].best_pair_s);
    for (int64_t j = 0; j < num_decodes && query.may_stay; j++)
      if (decodes[j].row != compute) best.other_s = std::min(best.other_s, decodes[j].local_s);
  }
  const Costs *prefill = nullptr, *decode = nullptr;
  for (int64_t i = 0; i < num_prefills; i++)
    if (prefills[i].row == query.before_prefill) prefill = &prefills[i];
  for (int64_t j = 0; j < num_decodes; j++)
    if (decodes[j].row == query.before_decode) decode = &decodes[j];
  if (decode != nullptr && query.before_prefill == NONE && query.may_stay) best.before_s = decode->local_s;
  if (decode != nullptr && prefill != nullptr && !decode->must_stay && is_in_time(query, *prefill, *decode))
    best.before_s = pair_cost(settings, *prefill, *decode);
}
}
