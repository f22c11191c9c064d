// Block keys and, for each, the mask of the replicas that hold it (router/holder_masks.py).
//
// Keys have 16 bytes and are hashes already, so their bits choose their places. The table is cut into segments, each
// with open addressing and linear probing: a segment of a table of a million keys grows in a fraction of a millisecond.
// An entry has the number of a mask, of which there are far fewer than keys, so most keys take one cache line to find.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace block_table {

constexpr int64_t KEY_BYTES = 16;
constexpr int SEGMENT_BITS = 8;
constexpr int64_t NUM_SEGMENTS = 1 << SEGMENT_BITS;
constexpr uint64_t LEAST_CAPACITY = 8;
// Keys that are looked up ahead, so that their cache lines come at the same time.
constexpr int64_t NUM_AHEAD = 16;
// The number of the mask without bits, and of no mask.
constexpr uint32_t EMPTY = 0;
constexpr uint32_t NONE = 0xFFFFFFFFu;

struct Key {
  uint64_t low, high;
  bool operator==(const Key& other) const { return low == other.low && high == other.high; }
};

// Masks of `num_words` words by number, each once, with the number of entries that have it.
class MaskPool {
 public:
  MaskPool() : heads_(1 << 10, NONE) {
    words_.assign(1, 0);
    counts_.assign(1, 1);
    next_.assign(1, NONE);
  }

  int64_t num_words() const { return num_words_; }
  const uint64_t* words(uint32_t number) const { return words_.data() + static_cast<int64_t>(number) * num_words_; }

  // Make masks long enough for this bit.
  void reach(int64_t bit) {
    int64_t needed = num_words_;
    while (bit >= 64 * needed) needed *= 2;
    if (needed == num_words_) return;
    std::vector<uint64_t> longer(counts_.size() * needed, 0);
    for (size_t i = 0; i < counts_.size(); i++)
      std::memcpy(longer.data() + i * needed, words_.data() + i * num_words_, num_words_ * sizeof(uint64_t));
    words_.swap(longer);
    num_words_ = needed;
    rehash(heads_.size());
  }

  // Return the number of a mask with the bit of it set or cleared, counted once more.
  uint32_t changed(uint32_t number, int64_t bit, bool is_set) {
    scratch_.assign(words(number), words(number) + num_words_);
    const uint64_t one = 1ull << (bit % 64);
    if (is_set)
      scratch_[bit / 64] |= one;
    else
      scratch_[bit / 64] &= ~one;
    const uint64_t hash = hash_of(scratch_.data());
    uint32_t found = is_zero(scratch_.data()) ? EMPTY : heads_[hash & (heads_.size() - 1)];
    while (found != NONE && found != EMPTY && std::memcmp(words(found), scratch_.data(), num_words_ * 8) != 0)
      found = next_[found];
    if (found == NONE) found = add(hash);
    counts_[found]++;
    return found;
  }

  void keep(uint32_t number) { counts_[number]++; }

  void release(uint32_t number) {
    if (--counts_[number] > 0 || number == EMPTY) return;
    uint32_t* at = &heads_[hash_of(words(number)) & (heads_.size() - 1)];
    while (*at != number) at = &next_[*at];
    *at = next_[number];
    free_.push_back(number);
  }

 private:
  uint32_t add(uint64_t hash) {
    uint32_t number;
    if (free_.empty()) {
      number = static_cast<uint32_t>(counts_.size());
      counts_.push_back(0);
      next_.push_back(NONE);
      words_.insert(words_.end(), num_words_, 0);
      if (counts_.size() > heads_.size()) rehash(2 * heads_.size());
    } else {
      number = free_.back();
      free_.pop_back();
      counts_[number] = 0;
    }
    std::memcpy(words_.data() + static_cast<int64_t>(number) * num_words_, scratch_.data(), num_words_ * 8);
    uint32_t& head = heads_[hash & (heads_.size() - 1)];
    next_[number] = head;
    head = number;
    return number;
  }

  void rehash(size_t num_heads) {
    heads_.assign(num_heads, NONE);
    for (uint32_t number = 1; number < counts_.size(); number++) {
      if (counts_[number] == 0) continue;
      uint32_t& head = heads_[hash_of(words(number)) & (num_heads - 1)];
      next_[number] = head;
      head = number;
    }
  }

  bool is_zero(const uint64_t* mask) const {
    for (int64_t i = 0; i < num_words_; i++)
      if (mask[i]) return false;
    return true;
  }

  uint64_t hash_of(const uint64_t* mask) const {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (int64_t i = 0; i < num_words_; i++) {
      hash = (hash ^ mask[i]) * 0xBF58476D1CE4E5B9ull;
      hash ^= hash >> 29;
    }
    return hash;
  }

  int64_t num_words_ = 1;
  std::vector<uint64_t> words_, scratch_;
  std::vector<uint32_t> counts_, next_, heads_, free_;
};

// Keys with the numbers of their masks; places without a mask are free.
class Segment {
 public:
  uint64_t size() const { return size_; }

  void prefetch(const Key& key) const {
    if (keys_.empty()) return;
    const uint64_t at = key.high & (keys_.size() - 1);
    __builtin_prefetch(&keys_[at]);
    __builtin_prefetch(&masks_[at]);
  }

  uint32_t find(const Key& key) const {
    if (keys_.empty()) return EMPTY;
    const uint64_t most = keys_.size() - 1;
    for (uint64_t at = key.high & most; masks_[at] != EMPTY; at = (at + 1) & most)
      if (keys_[at] == key) return masks_[at];
    return EMPTY;
  }

  // Return where the key has its mask, or would have one.
  uint32_t& place(const Key& key) {
    if (8 * (size_ + 1) > 7 * keys_.size()) grow();
    const uint64_t most = keys_.size() - 1;
    uint64_t at = key.high & most;
    while (masks_[at] != EMPTY && !(keys_[at] == key)) at = (at + 1) & most;
    if (masks_[at] == EMPTY) keys_[at] = key;
    return masks_[at];
  }

  void added() { size_++; }

  // Free the place of a key, and close the gap that it leaves.
  void remove(uint32_t* place) {
    const uint64_t most = keys_.size() - 1;
    uint64_t gap = place - masks_.data();
    for (uint64_t at = (gap + 1) & most; masks_[at] != EMPTY; at = (at + 1) & most) {
      const uint64_t home = keys_[at].high & most;
      if (((at - home) & most) < ((at - gap) & most)) continue;
      keys_[gap] = keys_[at];
      masks_[gap] = masks_[at];
      gap = at;
    }
    masks_[gap] = EMPTY;
    size_--;
  }

 private:
  void grow() {
    std::vector<Key> keys(keys_.empty() ? LEAST_CAPACITY : 2 * keys_.size());
    std::vector<uint32_t> masks(keys.size(), EMPTY);
    const uint64_t most = keys.size() - 1;
    for (size_t i = 0; i < keys_.size(); i++) {
      if (masks_[i] == EMPTY) continue;
      uint64_t at = keys_[i].high & most;
      while (masks[at] != EMPTY) at = (at + 1) & most;
      keys[at] = keys_[i];
      masks[at] = masks_[i];
    }
    keys_.swap(keys);
    masks_.swap(masks);
  }

  uint64_t size_ = 0;
  std::vector<Key> keys_;
  std::vector<uint32_t> masks_;
};

class Table {
 public:
  int64_t size() const {
    int64_t sum = 0;
    for (const Segment& segment : segments_) sum += segment.size();
    return sum;
  }

  void change(const uint8_t* keys, int64_t num_keys, int64_t bit, bool is_set) {
    pool_.reach(bit);
    // Most keys of one call have the same mask. Both are kept while they are remembered.
    uint32_t last = NONE, last_changed = NONE;
    for (int64_t i = 0; i < num_keys; i++) {
      if (i + NUM_AHEAD < num_keys) prefetch(keys + (i + NUM_AHEAD) * KEY_BYTES);
      const Key key = key_at(keys + i * KEY_BYTES);
      Segment& segment = segment_of(key);
      if (!is_set && segment.find(key) == EMPTY) continue;
      uint32_t& mask = segment.place(key);
      const uint32_t before = mask;
      if (before != last) {
        forget(last, last_changed);
        last = before;
        last_changed = pool_.changed(before, bit, is_set);
        pool_.keep(last);
      }
      if (last_changed == before) continue;
      pool_.keep(last_changed);
      if (before == EMPTY) segment.added();
      if (last_changed == EMPTY)
        segment.remove(&mask);
      else
        mask = last_changed;
      if (before != EMPTY) pool_.release(before);
    }
    forget(last, last_changed);
  }

  // Write the masks of keys, up to the first one without a mask where it `stops`; return how many.
  int64_t masks(const uint8_t* keys, int64_t num_keys, bool stops, uint64_t* out, int64_t num_words) const {
    const int64_t num_known = pool_.num_words() < num_words ? pool_.num_words() : num_words;
    for (int64_t i = 0; i < num_keys && i < NUM_AHEAD; i++) prefetch(keys + i * KEY_BYTES);
    for (int64_t i = 0; i < num_keys; i++) {
      if (i + NUM_AHEAD < num_keys) prefetch(keys + (i + NUM_AHEAD) * KEY_BYTES);
      const Key key = key_at(keys + i * KEY_BYTES);
      const uint32_t number = segment_of(key).find(key);
      if (number == EMPTY && stops) return i;
      std::memset(out + i * num_words, 0, num_words * 8);
      std::memcpy(out + i * num_words, pool_.words(number), num_known * 8);
    }
    return num_keys;
  }

 private:
  static Key key_at(const uint8_t* bytes) {
    Key key;
    std::memcpy(&key, bytes, KEY_BYTES);
    return key;
  }

  const Segment& segment_of(const Key& key) const { return segments_[key.low & (NUM_SEGMENTS - 1)]; }
  Segment& segment_of(const Key& key) { return segments_[key.low & (NUM_SEGMENTS - 1)]; }

  void prefetch(const uint8_t* bytes) const {
    const Key key = key_at(bytes);
    segment_of(key).prefetch(key);
  }

  void forget(uint32_t last, uint32_t last_changed) {
    if (last == NONE) return;
    pool_.release(last);
    pool_.release(last_changed);
  }

  Segment segments_[NUM_SEGMENTS];
  MaskPool pool_;
};

}  // namespace block_table
