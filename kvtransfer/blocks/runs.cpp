// Copies the runs of many blocks and sums the copied bytes in the same pass, as kvtransfer/blocks/checksum.py defines.
#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian"
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

typedef uint64_t Vector __attribute__((vector_size(VECTOR_BYTES)));

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
constexpr uint64_t MULTIPLIER_1 = 0xFF51AFD7ED558CCDull;
constexpr uint64_t MULTIPLIER_2 = 0xC4CEB9FE1A85EC53ull;
constexpr int64_t WORD = 8;
constexpr int LANES = VECTOR_BYTES / WORD;
constexpr int UNROLLED = 2;
constexpr int64_t STRIDE = VECTOR_BYTES * UNROLLED;
// How far ahead bytes are fetched: a page, which the processor's own prefetch does not cross.
constexpr int64_t AHEAD = 4096;

template <typename Word>
inline __attribute__((always_inline)) Word mix(Word word) {
  word ^= word >> 32;
  word *= MULTIPLIER_1;
  word ^= word >> 32;
  word *= MULTIPLIER_2;
  return word ^ (word >> 32);
}

enum class Store { NONE, CACHED, STREAMED };

template <Store store>
inline __attribute__((always_inline)) void put([[maybe_unused]] uint8_t* target, [[maybe_unused]] Vector value) {
  if constexpr (store == Store::CACHED) memcpy(target, &value, VECTOR_BYTES);
  if constexpr (store == Store::STREAMED) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), (__m512i)value);
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), (__m256i)value);
#else
    memcpy(target, &value, VECTOR_BYTES);
#endif
  }
}

// Sum of mix(word + (position + 1) * GOLDEN) over `num_bytes`, a multiple of STRIDE; `position` is the number of
// words before. Meanwhile as many bytes are fetched from `ahead`. STREAMED needs a target aligned to the vector.
template <Store store>
uint64_t sum_vectors(const uint8_t* source, uint8_t* target, int64_t num_bytes, uint64_t position,
                     const uint8_t* ahead) {
  Vector totals[UNROLLED] = {}, positions[UNROLLED];
  for (int number = 0; number < UNROLLED; number++)
    for (int lane = 0; lane < LANES; lane++)
      positions[number][lane] = GOLDEN * (position + static_cast<uint64_t>(number * LANES + lane) + 1);
  const Vector step = Vector{} + GOLDEN * LANES * UNROLLED;
  for (int64_t start = 0; start < num_bytes; start += STRIDE) {
    for (int number = 0; number < UNROLLED; number++) {
      const int64_t offset = start + number * VECTOR_BYTES;
      for (int64_t line = 0; line < VECTOR_BYTES; line += 64) __builtin_prefetch(ahead + offset + line);
      Vector words;
      memcpy(&words, source + offset, VECTOR_BYTES);
      put<store>(target + offset, words);
      totals[number] += mix(words + positions[number]);
      positions[number] += step;
    }
  }
  uint64_t total = 0;
  for (int number = 0; number < UNROLLED; number++)
    for (int lane = 0; lane < LANES; lane++) total += totals[number][lane];
  return total;
}

// A piece's sum, fed run by run. A run may end inside a word: `carried_` bytes of it wait in `word_`.
class Sum {
 public:
  // `next` is the run that is fed next.
  void feed(const uint8_t* source, uint8_t* target, int64_t num_bytes, bool streamed, const uint8_t* next) {
    num_bytes_ += static_cast<uint64_t>(num_bytes);
    const int64_t head = head_bytes(target, num_bytes, streamed);
    feed_words(source, target, head);
    int64_t done = head;
    if (!carried_) {
      const int64_t end = num_bytes - (num_bytes - head) % STRIDE;
      const int64_t far = num_bytes - AHEAD - head;  // from there on, what lies ahead is of the next run
      const int64_t edge = far > 0 ? head + far / STRIDE * STRIDE : head;
      feed_vectors(source, target, head, edge, streamed, source + head + AHEAD);
      feed_vectors(source, target, edge, end, streamed, next);
      done = end;
    }
    feed_words(source + done, target ? target + done : nullptr, num_bytes - done);
  }

  uint64_t finish() {
    if (carried_) {
      memset(word_ + carried_, 0, static_cast<size_t>(WORD - carried_));
      feed_word(word_);
    }
    return mix(total_ + mix(num_bytes_));
  }

 private:
  static bool is_aligned(const uint8_t* target) {
    return reinterpret_cast<uintptr_t>(target) % VECTOR_BYTES == 0;
  }

  // What comes before the vectors: it completes a carried word and, for streamed stores, aligns the target.
  int64_t head_bytes(const uint8_t* target, int64_t num_bytes, bool streamed) const {
    int64_t head = carried_ ? WORD - carried_ : 0;
    if (target && streamed) {
      const int64_t missing = -reinterpret_cast<intptr_t>(target + head) & (VECTOR_BYTES - 1);
      if (missing % WORD == 0) head += missing;
    }
    return head < num_bytes ? head : num_bytes;
  }

  void feed_vectors(const uint8_t* source, uint8_t* target, int64_t start, int64_t end, bool streamed,
                    const uint8_t* ahead) {
    if (start == end) return;
    uint8_t* const there = target ? target + start : nullptr;
    if (!target)
      total_ += sum_vectors<Store::NONE>(source + start, there, end - start, position_, ahead);
    else if (streamed && is_aligned(there))
      total_ += sum_vectors<Store::STREAMED>(source + start, there, end - start, position_, ahead);
    else
      total_ += sum_vectors<Store::CACHED>(source + start, there, end - start, position_, ahead);
    position_ += static_cast<uint64_t>((end - start) / WORD);
  }

  void feed_words(const uint8_t* source, uint8_t* target, int64_t num_bytes) {
    if (target) memcpy(target, source, static_cast<size_t>(num_bytes));
    while (num_bytes > 0) {
      const int64_t count = num_bytes < WORD - carried_ ? num_bytes : WORD - carried_;
      memcpy(word_ + carried_, source, static_cast<size_t>(count));
      carried_ += count;
      source += count;
      num_bytes -= count;
      if (carried_ == WORD) {
        feed_word(word_);
        carried_ = 0;
      }
    }
  }

  void feed_word(const uint8_t* bytes) {
    uint64_t word;
    memcpy(&word, bytes, WORD);
    total_ += mix(word + ++position_ * GOLDEN);
  }

  uint64_t total_ = 0, position_ = 0, num_bytes_ = 0;
  uint8_t word_[WORD];
  int64_t carried_ = 0;
};

struct Run {
  int64_t src_offset, dst_offset, num_bytes;
};

}  // namespace

// For each block: its runs from `src` to `dst` (null: nothing is copied), and their sum into `sums` (null: not
// wanted). With `streamed`, stores pass by the cache.
extern "C" void move_runs(const uint8_t* src, const int64_t* src_offsets, uint8_t* dst, const int64_t* dst_offsets,
                          int64_t num_blocks, const Run* runs, int64_t num_runs, int32_t streamed, uint64_t* sums) {
  for (int64_t block = 0; block < num_blocks; block++) {
    const uint8_t* const source = src + src_offsets[block];
    uint8_t* const target = dst ? dst + dst_offsets[block] : nullptr;
    Sum sum;
    for (int64_t number = 0; number < num_runs; number++) {
      const Run& run = runs[number];
      uint8_t* const there = target ? target + run.dst_offset : nullptr;
      const uint8_t* next = source;
      if (number + 1 < num_runs)
        next = source + runs[number + 1].src_offset;
      else if (block + 1 < num_blocks)
        next = src + src_offsets[block + 1] + runs[0].src_offset;
      if (sums || streamed)  // also unwanted, a sum costs nothing beside stores that pass by the cache
        sum.feed(source + run.src_offset, there, run.num_bytes, streamed, next);
      else
        memcpy(there, source + run.src_offset, static_cast<size_t>(run.num_bytes));
    }
    if (sums) sums[block] = sum.finish();
  }
#if defined(__AVX2__)
  if (streamed) _mm_sfence();
#endif
}
