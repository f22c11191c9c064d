// Block keys and, for each, the mask of the replicas that hold it (router/holder_masks.py).
//
// The table is cut into segments, each with open addressing and linear probing. A directory finds the segment of a key
// by the last bits of its hash (extendible hashing). A full segment is split by one bit more, so however many keys there
// are, and in whatever order they come, a key moves at most `MOST_CAPACITY` others, in about 50 microseconds. An entry
// has the number of a mask, of which there are far fewer than keys, so most keys take one cache line to find.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace block_table {

constexpr int64_t KEY_BYTES = 16;
// Of a segment. It is split when it has the most.
constexpr uint64_t LEAST_CAPACITY = 8, MOST_CAPACITY = 4096;
// Last bits of hashes that choose segments; only if they are used up do full segments grow further.
constexpr int MOST_DEPTH = 24;
// The bits of a hash from here on choose the place in a segment.
constexpr int POSITION_SHIFT = 32;
// Keys that are looked up ahead, so that their cache lines come at the same time.
constexpr int64_t NUM_AHEAD = 16;
// The number of the mask without bits, and of no mask.
constexpr uint32_t EMPTY = 0;
constexpr uint32_t NONE = 0xFFFFFFFFu;

struct Key {
  uint64_t low, high;
  bool operator==(const Key& other) const { return low == other.low && high == other.high; }
  // Keys are hashes already, but those of tests may differ in few bits.
  uint64_t hash() const {
    uint64_t mixed = (low ^ high >> 32 ^ high << 32) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EBull;
    return mixed ^ mixed >> 32;
  }
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
  // The keys have hashes that end with the `depth` bits of `suffix`.
  Segment(int depth, uint64_t suffix, uint64_t capacity)
      : depth_(depth), suffix_(suffix), keys_(capacity), masks_(capacity, EMPTY) {}

  int depth() const { return depth_; }
  uint64_t suffix() const { return suffix_; }
  uint64_t capacity() const { return keys_.size(); }
  bool is_full() const { return 8 * (size_ + 1) > 7 * keys_.size(); }

  void prefetch(uint64_t hash) const {
    const uint64_t at = home_of(hash);
    __builtin_prefetch(&keys_[at]);
    __builtin_prefetch(&masks_[at]);
  }

  uint32_t find(const Key& key, uint64_t hash) const { return masks_[at(key, hash)]; }

  // Return where the key has its mask, or would have one. The segment must not be full.
  uint32_t& place(const Key& key, uint64_t hash) {
    const uint64_t found = at(key, hash);
    if (masks_[found] == EMPTY) keys_[found] = key;
    return masks_[found];
  }

  void added() { size_++; }

  // Free the place of a key, and close the gap that it leaves.
  void remove(uint32_t* place) {
    const uint64_t most = keys_.size() - 1;
    uint64_t gap = place - masks_.data();
    for (uint64_t at = (gap + 1) & most; masks_[at] != EMPTY; at = (at + 1) & most) {
      const uint64_t home = home_of(keys_[at].hash());
      if (((at - home) & most) < ((at - gap) & most)) continue;
      keys_[gap] = keys_[at];
      masks_[gap] = masks_[at];
      gap = at;
    }
    masks_[gap] = EMPTY;
    size_--;
  }

  void grow() {
    Segment larger(depth_, suffix_, 2 * keys_.size());
    for (size_t i = 0; i < keys_.size(); i++)
      if (masks_[i] != EMPTY) larger.add(keys_[i], masks_[i]);
    *this = std::move(larger);
  }

  // Move the keys with the next bit of their hashes set into a segment of their own.
  std::unique_ptr<Segment> split() {
    const uint64_t bit = 1ull << depth_;
    auto other = std::make_unique<Segment>(depth_ + 1, suffix_ | bit, keys_.size());
    Segment kept(depth_ + 1, suffix_, keys_.size());
    for (size_t i = 0; i < keys_.size(); i++) {
      if (masks_[i] == EMPTY) continue;
      Segment& target = keys_[i].hash() & bit ? *other : kept;
      target.add(keys_[i], masks_[i]);
    }
    *this = std::move(kept);
    return other;
  }

 private:
  uint64_t home_of(uint64_t hash) const { return hash >> POSITION_SHIFT & (keys_.size() - 1); }

  uint64_t at(const Key& key, uint64_t hash) const {
    const uint64_t most = keys_.size() - 1;
    uint64_t at = home_of(hash);
    while (masks_[at] != EMPTY && !(keys_[at] == key)) at = (at + 1) & most;
    return at;
  }

  void add(const Key& key, uint32_t mask) {
    place(key, key.hash()) = mask;
    size_++;
  }

  int depth_;
  uint64_t suffix_, size_ = 0;
  std::vector<Key> keys_;
  std::vector<uint32_t> masks_;
};

class Table {
 public:
  Table() {
    segments_.push_back(std::make_unique<Segment>(0, 0, LEAST_CAPACITY));
    directory_.push_back(segments_.back().get());
  }

  int64_t size() const { return size_; }

  void change(const uint8_t* keys, int64_t num_keys, int64_t bit, bool is_set) {
    pool_.reach(bit);
    // Most keys of one call have the same mask. Both are kept while they are remembered.
    uint32_t last = NONE, last_changed = NONE;
    for (int64_t i = 0; i < num_keys; i++) {
      if (i + NUM_AHEAD < num_keys) look_ahead(keys + (i + NUM_AHEAD) * KEY_BYTES);
      const Key key = key_at(keys + i * KEY_BYTES);
      const uint64_t hash = key.hash();
      if (!is_set && segment_of(hash).find(key, hash) == EMPTY) continue;
      if (is_set) make_room(hash);
      Segment& segment = segment_of(hash);
      uint32_t& mask = segment.place(key, hash);
      const uint32_t before = mask;
      if (before != last) {
        forget(last, last_changed);
        last = before;
        last_changed = pool_.changed(before, bit, is_set);
        pool_.keep(last);
      }
      if (last_changed == before) continue;
      pool_.keep(last_changed);
      if (before == EMPTY) {
        segment.added();
        size_++;
      }
      if (last_changed == EMPTY) {
        segment.remove(&mask);
        size_--;
      } else {
        mask = last_changed;
      }
      if (before != EMPTY) pool_.release(before);
    }
    forget(last, last_changed);
  }

  // Write the masks of keys, up to the first one without a mask where it `stops`; return how many.
  int64_t masks(const uint8_t* keys, int64_t num_keys, bool stops, uint64_t* out, int64_t num_words) const {
    const int64_t num_known = pool_.num_words() < num_words ? pool_.num_words() : num_words;
    Ahead ahead[NUM_AHEAD];
    for (int64_t i = 0; i < num_keys && i < NUM_AHEAD; i++) ahead[i] = look_ahead(keys + i * KEY_BYTES);
    for (int64_t i = 0; i < num_keys; i++) {
      const Ahead here = ahead[i % NUM_AHEAD];
      if (i + NUM_AHEAD < num_keys) ahead[i % NUM_AHEAD] = look_ahead(keys + (i + NUM_AHEAD) * KEY_BYTES);
      const uint32_t number = here.segment->find(key_at(keys + i * KEY_BYTES), here.hash);
      if (number == EMPTY && stops) return i;
      std::memset(out + i * num_words, 0, num_words * 8);
      std::memcpy(out + i * num_words, pool_.words(number), num_known * 8);
    }
    return num_keys;
  }

 private:
  // What is known of a key before it is looked up.
  struct Ahead {
    uint64_t hash;
    const Segment* segment;
  };

  static Key key_at(const uint8_t* bytes) {
    Key key;
    std::memcpy(&key, bytes, KEY_BYTES);
    return key;
  }

  Segment& segment_of(uint64_t hash) const { return *directory_[hash & (directory_.size() - 1)]; }

  Ahead look_ahead(const uint8_t* bytes) const {
    const uint64_t hash = key_at(bytes).hash();
    const Segment& segment = segment_of(hash);
    segment.prefetch(hash);
    return {hash, &segment};
  }

  // Make sure that a key with this hash can be added to its segment.
  void make_room(uint64_t hash) {
    while (segment_of(hash).is_full()) {
      Segment& segment = segment_of(hash);
      if (segment.capacity() < MOST_CAPACITY || segment.depth() == MOST_DEPTH) {
        segment.grow();
        continue;
      }
      const uint64_t step = 2ull << segment.depth();
      if (step > directory_.size()) {
        const std::vector<Segment*> half = directory_;
        directory_.insert(directory_.end(), half.begin(), half.end());
      }
      segments_.push_back(segment.split());
      Segment* const other = segments_.back().get();
      for (uint64_t i = other->suffix(); i < directory_.size(); i += step) directory_[i] = other;
    }
  }

  void forget(uint32_t last, uint32_t last_changed) {
    if (last == NONE) return;
    pool_.release(last);
    pool_.release(last_changed);
  }

  int64_t size_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;
  // The segment of each key, by the last bits of its hash.
  std::vector<Segment*> directory_;
  MaskPool pool_;
};

}  // namespace block_table
