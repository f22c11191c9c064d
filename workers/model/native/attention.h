// Causal attention of new tokens over paged keys and values, read where they lie.
//
// A task is up to TASK_ROWS rows of one sequence and one key-value head: some consecutive tokens, each with the
// query heads of that head. One kernel serves one row and a hundred. The keys of a row are cut at absolute
// positions into pieces of PIECE keys. A piece is packed once: panels of transposed keys, and of interleaved
// values. Then a few rows at a time have their scores computed, as products with the keys, and capped where the
// model says so; then probabilities relative to a row's largest score; then their products with the values. Pieces
// are combined in their order, and at the end the sink of a row's head, if it has one, joins the sum. What is computed
// for a row, and in which order, depends on its position and window alone: neither on the rows beside it, nor on which
// thread computes which piece. Panels of 32 keys of which none of these few rows sees one are left out; what another
// row sees has the probability 0, which changes no sum.
//
// Keys and values of 8 bits are multiplied without their scales: a key's scale multiplies its scores, a value's its
// probabilities, in float. Where the tail of a key has a scale of its own, its elements are multiplied with the ratio of
// both scales beforehand, which rounds them once more.
//
// Unless a step must be invariant in that sense, the few rows of a decoded token do without panels (few_rows.h).
//
// Keys after a sequence's last token, and groups of keys that no row of a task sees, are zeros in the panels and
// never read.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "few_rows.h"
#include "paged_kv.h"

// What is packed of keys and values is shared by so many rows, whose operands stay in the second cache beside it.
constexpr int64_t TASK_ROWS = LANES == 16 ? 512 : 256;
// Rows that take turns with a piece: their scores stay in the first cache, the piece in the second.
#if defined(TANDEM_AMX)
constexpr int64_t TURN_ROWS = 32;
#else
constexpr int64_t TURN_ROWS = 2 * MOST_ROWS;
#endif
constexpr int64_t SPLIT_ROWS = 512;  // rows of pieces that wait to be combined, for each thread
constexpr float LOG2_E = 1.44269504f;
constexpr float LEAST = -1e30f;  // the largest exponent of a row that has seen no key
constexpr int64_t SHARE = 4;  // a task of more than this part of a thread's share of the work is split

// Fills in the tasks of a step: at most one for each sequence and TASK_ROWS rows. The first `num_split` are
// large beside a thread's share of the work: their pieces are computed in parallel.
inline void plan_tasks(AttentionStep* step) {
  int64_t group = step->num_heads / step->num_kv_heads, token = 0, num_tasks = 0, total = 0;
  int32_t most = int32_t(std::max<int64_t>(1, TASK_ROWS / group));
  for (int64_t sequence = 0; sequence < step->num_sequences; sequence++) {
    int32_t start = step->starts[sequence], length = step->lengths[sequence];
    int32_t num_parts = (length + most - 1) / most;
    for (int32_t part = 0; part < num_parts; part++) {
      int32_t begin = int32_t(int64_t(length) * part / num_parts), end = int32_t(int64_t(length) * (part + 1) / num_parts);
      int64_t num_keys = start + end;
      if (step->window) num_keys = std::min<int64_t>(num_keys, step->window + end - begin - 1);
      AttentionTask task{num_keys * (end - begin), int32_t(sequence), int32_t(token + begin), start + begin, end - begin};
      step->tasks[num_tasks++] = task;
      total += task.cost * step->num_kv_heads;
    }
    token += length;
  }
  std::stable_sort(step->tasks, step->tasks + num_tasks,
                   [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  step->num_tasks = num_tasks;
  step->num_split = 0;
  int64_t num_threads = omp_get_max_threads();
  while (num_threads > 1 && step->num_split < num_tasks) {
    const AttentionTask& task = step->tasks[step->num_split];
    if (task.cost * num_threads * SHARE <= total || task.position + task.num_tokens <= PIECE) break;
    step->num_split++;
  }
}

// T is the type of queries and results, S that of the elements of keys and values.
template <typename T, typename S = T>
class Attention {
  using A = Operand<T>;
  // Of one token without panels: some elements of 8 bits are widened to float.
  using TokenOperand = std::conditional_t<IS_NARROW<S>, A, float>;

  const AttentionStep& step;
  const int64_t group, dim, padded_dim, window, query_stride;
  const PagedKv<T, S> paged;
  const float* sinks;  // [num_heads], in units of scores; null: there are none
  // [tokens, num_heads * head_dim] and [tokens, num_heads]: results as floats, and the logarithms of what they are
  // divided by, for others to merge with those of further keys; null: results are written as queries are.
  float *const parts, *const log_sums;
  struct State;
  struct Scratch;
  using Way = void (Attention::*)(const AttentionTask&, int64_t head, int64_t piece, Scratch&, State) const;
  const Way token_way;

 public:
  Attention(const AttentionStep& step, int64_t layer, int64_t query_stride, const float* sinks, float* parts = nullptr,
            float* log_sums = nullptr)
      : step(step),
        group(step.num_heads / step.num_kv_heads),
        dim(step.head_dim),
        padded_dim((step.head_dim + PANEL - 1) / PANEL * PANEL),
        window(step.window),
        query_stride(query_stride),
        paged(step, layer),
        sinks(sinks),
        parts(parts),
        log_sums(log_sums),
        token_way(choose_token_way()) {}

  // queries: [tokens, num_heads * head_dim], rows `query_stride` apart, normed and rotated; out: [tokens, num_heads *
  // head_dim]. Computes the tasks from `begin` to `end`.
  void run(const T* queries, T* out, int64_t begin, int64_t end) {
    int64_t num_heads = step.num_kv_heads;
    int64_t whole = std::max(begin, step.num_split);
    if (begin < step.num_split) run_split(queries, out, begin, std::min(end, step.num_split));
    if (whole >= end) return;
#pragma omp parallel
    {
      TileScope tiles;
      Scratch& own = scratch();
#pragma omp for schedule(dynamic)
      for (int64_t unit = 0; unit < (end - whole) * num_heads; unit++) {
        const AttentionTask& task = step.tasks[whole + unit / num_heads];
        int64_t head = unit % num_heads, first = first_piece(task), last = last_piece(task);
        copy_queries(task, head, queries, own.queries);
        State total = own.total.from(0), state = own.state.from(0);
        attend(task, head, first, own, total);
        for (int64_t piece = first + 1; piece <= last; piece++) {
          attend(task, head, piece, own, state);
          combine(task, piece, state, total);
        }
        write(task, head, total, out);
      }
    }
  }

 private:
  // Of some rows: the largest exponent of 2, the sum of powers relative to it, and the sum of the values weighted
  // by these.
  struct State {
    float *largest, *sums, *mixed;
  };

  struct States {
    std::vector<float> memory;
    int64_t num_rows = 0, dim = 0;
    void reserve(int64_t rows, int64_t padded_dim) {
      if (rows <= num_rows && padded_dim == dim) return;
      num_rows = rows, dim = padded_dim;
      memory.resize(rows * (dim + 2) + 16 + LANES);  // aligned, and read in whole vectors
    }
    State from(int64_t row) {
      float* mixed = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
      return {mixed + num_rows * dim + row, mixed + num_rows * (dim + 1) + row, mixed + row * dim};
    }
  };

  // Of one thread, sized at its first use.
  struct Scratch {
    std::vector<char> memory;
    int64_t rows = 0, dim = 0;
    A *queries, *probabilities;
    float *scores, *key_scales, *value_scales;  // scales of a piece, where there are any
    T *keys, *values;
    States state, total;
  };

  int64_t most_rows() const { return std::max(TASK_ROWS, group); }

  Scratch& scratch() const {
    static thread_local Scratch own;
    int64_t rows = most_rows();
    if (own.rows < rows || own.dim != dim) {
      own.rows = rows, own.dim = dim;
      int64_t sizes[] = {rows * dim * int64_t(sizeof(A)), TURN_ROWS * PIECE * 4,
                         sizeof(A) == 2 ? TURN_ROWS * PIECE * 2 : 0, PIECE * dim * int64_t(sizeof(T)),
                         PIECE * padded_dim * int64_t(sizeof(T)), IS_QUANTIZED<S> ? 2 * PIECE * 4 : 0};
      int64_t total = 64;
      for (int64_t& size : sizes) total += size = (size + 63) / 64 * 64;
      own.memory.resize(total);
      char* at = (char*)(((uintptr_t)own.memory.data() + 63) / 64 * 64);
      own.queries = (A*)at;
      own.scores = (float*)(at += sizes[0]);
      own.probabilities = (A*)(sizeof(A) == 2 ? at + sizes[1] : at);
      own.keys = (T*)(at += sizes[1] + sizes[2]);
      own.values = (T*)(at += sizes[3]);
      own.key_scales = (float*)(at + sizes[4]);
      own.value_scales = own.key_scales + PIECE;
      own.state.reserve(rows, padded_dim);
      own.total.reserve(rows, padded_dim);
    }
    return own;
  }

  // ------------------------------------------------------------------------------------ what is seen

  int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t first_piece(const AttentionTask& task) const { return first_key(task.position) / PIECE; }
  int64_t last_piece(const AttentionTask& task) const { return (task.position + task.num_tokens - 1) / PIECE; }

  struct Range {
    int64_t begin, end;
  };

  // The task's tokens that see a key of [begin, end).
  Range tokens_that_see(const AttentionTask& task, int64_t begin, int64_t end) const {
    int64_t from = std::max<int64_t>(0, begin - task.position), to = task.num_tokens;
    if (window) to = std::min(to, end - 1 + window - task.position);
    return {from, std::max(from, to)};
  }

  // ----------------------------------------------------------------------------------------- packing

  void copy_queries(const AttentionTask& task, int64_t head, const T* queries, A* to) const {
    for (int64_t token = 0; token < task.num_tokens; token++, to += group * dim) {
      const T* from = queries + (task.token + token) * query_stride + head * group * dim;
      if constexpr (sizeof(A) == sizeof(T))
        memcpy(to, from, group * dim * sizeof(T));
      else
        for (int64_t i = 0; i < group * dim; i += LANES) store(load(from + i), to + i);
    }
  }

  // ----------------------------------------------------------------------------------------- a piece

  void attend(const AttentionTask& task, int64_t head, int64_t piece, Scratch& own, State state) const {
    if (token_way && task.num_tokens == 1) return (this->*token_way)(task, head, piece, own, state);
    int64_t begin = piece * PIECE, next = task.position + task.num_tokens;
    int64_t first = std::max(begin, first_key(task.position)), end = std::min(begin + PIECE, next);
    int64_t packed = first / PANEL * PANEL, last = (end + PANEL - 1) / PANEL * PANEL;
    for (int64_t key = packed; key < last; key += PANEL) {
      for (int64_t group = key; group < std::min(key + PANEL, end); group += 16)
        paged.prefetch_scales(task, head, group);
      paged.pack_keys(task, head, key, first, end, own.keys + (key - packed) * dim);
    }
    paged.pack_values(task, head, packed, last - packed, first, end, next, own.values);
    if constexpr (IS_QUANTIZED<S>) copy_scales(task, head, begin, packed, last, first, end, S::UNIT, own);
    int64_t num_rows = task.num_tokens * group;
    for (int64_t row = 0; row < num_rows; row += TURN_ROWS) {
      int64_t rows = std::min(TURN_ROWS, num_rows - row);
      int64_t lowest = task.position + row / group, highest = task.position + (row + rows - 1) / group;
      int64_t from = std::max(first, first_key(lowest)) / PANEL * PANEL;
      int64_t to = (std::min(end, highest + 1) + PANEL - 1) / PANEL * PANEL;
      float* mixed = state.mixed + row * padded_dim;
      if (from >= to) {
        for (int64_t i = 0; i < rows; i++) state.largest[row + i] = LEAST, state.sums[row + i] = 0;
        memset(mixed, 0, rows * padded_dim * sizeof(float));
        continue;
      }
      multiply_panels(own.queries + row * dim, dim, rows, own.keys + (from - packed) * dim, (to - from) / PANEL,
                      PANEL * dim, dim, own.scores + from - begin, PIECE);
      for (int64_t i = 0; i < rows; i++) {
        int64_t position = task.position + (row + i) / group;
        normalize(own, own.scores + i * PIECE, own.probabilities + i * PIECE, from - begin, to - begin,
                  std::max(first_key(position), begin) - begin, std::min(position + 1, end) - begin,
                  state.largest + row + i, state.sums + row + i);
      }
      multiply_panels(own.probabilities + from - begin, PIECE, rows, own.values + (from - packed) * PANEL,
                      padded_dim / PANEL, PIECE * PANEL, to - from, mixed, padded_dim);
    }
  }

  // One token whose rows are few.
  template <int M, int DIM>
  void attend_token(const AttentionTask& task, int64_t head, int64_t piece, Scratch& own, State state) const {
    using Few = FewRows<S, TokenOperand, M, DIM>;
    int64_t begin = piece * PIECE, next = task.position + 1;
    int64_t first = std::max(begin, first_key(task.position)), end = std::min<int64_t>(begin + PIECE, next);
    int64_t from = first / KEY_GROUP * KEY_GROUP;
    const S* none = (const S*)paged.zeros();
    typename Few::Queries queries(own.queries);
    TokenOperand* probabilities = own_probabilities<TokenOperand>(own);
    auto keys_of = [&](int64_t key) { return paged.keys_of(task, head, key); };
    auto values_of = [&](int64_t key) { return paged.keys_of(task, head, key) + paged.to_values(); };
    for (int64_t key = from; key < end; key += KEY_GROUP) {
      // After the last keys of a piece come its first values.
      const S* ahead = key + AHEAD < end ? keys_of(key + AHEAD) : values_of(from);
      paged.prefetch_scales(task, head, key);
      Few::score(queries, keys_of(key), end - key, none, ahead, own.scores + key - begin, PIECE);
    }
    int64_t panels = first / PANEL * PANEL, last = (end + PANEL - 1) / PANEL * PANEL;
    if constexpr (IS_QUANTIZED<S>) {
      float unit = sizeof(TokenOperand) == 2 ? HALF_BIAS : S::UNIT;
      copy_scales(task, head, begin, panels, last, first, end, unit, own);
    }
    for (int64_t row = 0; row < M; row++)
      normalize(own, own.scores + row * PIECE, probabilities + row * PIECE, panels - begin, last - begin, first - begin,
                end - begin, state.largest + row, state.sums + row);
    auto ahead_of = [&](int64_t key) -> const S* {
      // After the last values of a piece come the keys of the next.
      if (key + AHEAD < end) return values_of(key + AHEAD);
      return key + AHEAD < next ? keys_of(key + AHEAD) : nullptr;
    };
    Few::mix(probabilities + from - begin, PIECE, from, end, none, values_of, ahead_of, state.mixed, padded_dim);
  }

  // Copies the scales, times `unit`, of keys and values of a piece that begins at `begin`.
  void copy_scales(const AttentionTask& task, int64_t head, int64_t begin, int64_t from, int64_t to, int64_t first,
                   int64_t end, float unit, Scratch& own) const {
    paged.copy_scales(task, head, 0, from, to, first, end, unit, own.key_scales + from - begin);
    paged.copy_scales(task, head, paged.to_values(), from, to, first, end, unit, own.value_scales + from - begin);
  }

  // Where the probabilities of one token's piece are kept: floats in place of the scores.
  template <typename P>
  static P* own_probabilities(Scratch& own) {
    return sizeof(P) == 4 ? (P*)own.scores : (P*)own.probabilities;
  }

  // How one token is computed without panels, or null.
  Way choose_token_way() const {
    if constexpr (sizeof(TokenOperand) == 4 || HAS_NARROW_ROWS) {
      static constexpr Way ways[2][MOST_FEW_ROWS] = {
          {&Attention::attend_token<1, 64>, &Attention::attend_token<2, 64>, &Attention::attend_token<3, 64>,
           &Attention::attend_token<4, 64>},
          {&Attention::attend_token<1, 128>, &Attention::attend_token<2, 128>, &Attention::attend_token<3, 128>,
           &Attention::attend_token<4, 128>}};
      if (!step.is_invariant && !step.tail_dim && group <= MOST_FEW_ROWS && (dim == 64 || dim == 128))
        return ways[dim == 128][group - 1];
    }
    return nullptr;
  }

  // The product of rows with each of several panels, `panel_stride` elements apart, side by side in c. Few rows are
  // multiplied with several panels at a time: one panel's sums alone would wait for each other.
  static void multiply_panels(const A* a, int64_t stride, int64_t rows, const T* panels, int64_t count,
                              int64_t panel_stride, int64_t k, float* c, int64_t c_stride) {
    int64_t panel = 0;
#if defined(__AVX512BF16__) && !defined(TANDEM_AMX)
    if constexpr (sizeof(A) == 2) {
      auto several = [&](auto num_rows, auto num_panels) {
        for (; panel + num_panels.value <= count; panel += num_panels.value)
          multiply_few<num_rows.value, num_panels.value>(a, stride, panels + panel * panel_stride, panel_stride, k,
                                                         c + panel * PANEL, c_stride);
      };
      using std::integral_constant;
      if (rows == 1) several(integral_constant<int, 1>{}, integral_constant<int, 4>{});
      if (rows == 1) several(integral_constant<int, 1>{}, integral_constant<int, 2>{});
      if (rows == 2) several(integral_constant<int, 2>{}, integral_constant<int, 4>{});
      if (rows == 2) several(integral_constant<int, 2>{}, integral_constant<int, 2>{});
      if (rows == 3) several(integral_constant<int, 3>{}, integral_constant<int, 2>{});
      if (rows == 4) several(integral_constant<int, 4>{}, integral_constant<int, 2>{});
    }
#endif
    for (; panel < count; panel++)
      multiply(a, stride, rows, panels + panel * panel_stride, k, c + panel * PANEL, c_stride, false);
  }

#if defined(__AVX512BF16__)
  template <int M, int P>
  static void multiply_few(const Bf16* a, int64_t stride, const Bf16* panels, int64_t panel_stride, int64_t k, float* c,
                           int64_t c_stride) {
    Vec sums[M][2 * P];
    begin_sums(sums, c, c_stride, false);
    for (int64_t i = 0; i < k; i += 2) {
      Vec x[M];
      for (int m = 0; m < M; m++) {
        int32_t bits;
        memcpy(&bits, a + m * stride + i, 4);
        x[m] = (Vec)_mm512_set1_epi32(bits);
      }
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        __m512bh pairs = (__m512bh)load_bits(panels + v / 2 * panel_stride + i * PANEL + v % 2 * 2 * LANES);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], pairs, (__m512bh)x[m]);
      }
    }
    end_sums(sums, c, c_stride);
  }
#endif

  // Turns products of queries and keys into scores that are scaled and capped.
  void cap_scores(float* scores, int64_t count) const {
    Vec scale = broadcast(step.scale / step.softcap), cap = broadcast(step.softcap);
    for (int64_t i = 0; i < count; i += LANES) store(cap * vtanh(load(scores + i) * scale), scores + i);
  }

  // Turns scores of the columns [first, end) into exponentials relative to the largest of them, and what else is in
  // [from, to), whole panels, into zeros. A row that sees none has a sum of 0, to which scales of values do not count.
  template <typename P>
  void normalize(const Scratch& own, float* scores, P* probabilities, int64_t from, int64_t to, int64_t first,
                 int64_t end, float* largest, float* sum) const {
    if (first >= end) {
      for (int64_t i = from; i < to; i += LANES) store(broadcast(0), probabilities + i);
      *largest = LEAST, *sum = 0;
      return;
    }
    if constexpr (IS_QUANTIZED<S>)
      for (int64_t i = from; i < to; i += LANES) store(load(scores + i) * load(own.key_scales + i), scores + i);
    float factor = step.scale * LOG2_E;
    if (step.softcap) cap_scores(scores + from, to - from), factor = LOG2_E;
    for (int64_t i = from; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = end; i < to; i++) scores[i] = -INFINITY;
    Vec top = load(scores + from), other = load(scores + from + LANES);
    for (int64_t i = from + 2 * LANES; i < to; i += 2 * LANES)
      top = vmax(top, load(scores + i)), other = vmax(other, load(scores + i + LANES));
    float most = max_lanes(vmax(top, other)) * factor;
    Vec factors = broadcast(factor), offset = broadcast(-most), total = broadcast(0);
    for (int64_t i = from; i < to; i += LANES) {
      Vec p = vexp2(fma(load(scores + i), factors, offset));
      total = total + p;
      if constexpr (IS_QUANTIZED<S>) p = p * load(own.value_scales + i);
      store(p, probabilities + i);
    }
    *largest = most;
    *sum = sum_lanes(total);
  }

  // ----------------------------------------------------------------------------------- several pieces

  // Adds a piece to those before it, of the rows that see it.
  void combine(const AttentionTask& task, int64_t piece, State state, State total) const {
    Range tokens = tokens_that_see(task, piece * PIECE, (piece + 1) * PIECE);
    for (int64_t row = tokens.begin * group; row < tokens.end * group; row++) {
      float largest = std::max(total.largest[row], state.largest[row]);
      alignas(64) float shifts[LANES] = {total.largest[row] - largest, state.largest[row] - largest};
      store(vexp2(load(shifts)), shifts);
      total.largest[row] = largest;
      total.sums[row] = total.sums[row] * shifts[0] + state.sums[row] * shifts[1];
      Vec before = broadcast(shifts[0]), added = broadcast(shifts[1]);
      for (int64_t i = row * padded_dim; i < (row + 1) * padded_dim; i += LANES)
        store(load(total.mixed + i) * before + load(state.mixed + i) * added, total.mixed + i);
    }
  }

  // A piece of one task and head: `row` is its place among the states of a wave, `total` that of its task.
  struct Unit {
    int64_t task, head, piece, row, total;
  };

  // Computes tasks in waves of as many pieces as their states fit in memory.
  void run_split(const T* queries, T* out, int64_t begin, int64_t end) const {
    static thread_local States states, totals;
    static thread_local std::vector<Unit> units;
    int64_t num_threads = omp_get_max_threads(), num_heads = step.num_kv_heads, num_pairs = (end - begin) * num_heads;
    int64_t capacity = std::max(SPLIT_ROWS * num_threads, most_rows());
    states.reserve(capacity, padded_dim);
    totals.reserve(std::max(SHARE * num_threads, num_pairs) * most_rows(), padded_dim);
    States &own_states = states, &own_totals = totals;
    std::vector<Unit>& wave = units;
    wave.reserve(capacity);
    int64_t pair = 0, next_piece = -1;
    while (pair < num_pairs) {
      wave.clear();
      for (int64_t row = 0; pair < num_pairs;) {
        const AttentionTask& task = step.tasks[begin + pair / num_heads];
        if (next_piece < 0) next_piece = first_piece(task);
        if (row + task.num_tokens * group > capacity) break;
        wave.push_back({begin + pair / num_heads, pair % num_heads, next_piece, row, pair * most_rows()});
        row += task.num_tokens * group;
        if (next_piece++ == last_piece(task)) pair++, next_piece = -1;
      }
#pragma omp parallel
      {
        TileScope tiles;
        Scratch& own = scratch();
#pragma omp for schedule(dynamic)
        for (const Unit& unit : wave) {
          copy_queries(step.tasks[unit.task], unit.head, queries, own.queries);
          attend(step.tasks[unit.task], unit.head, unit.piece, own, own_states.from(unit.row));
        }
#pragma omp for schedule(dynamic)
        for (const Unit& unit : wave) {
          if (&unit != wave.data() && (&unit)[-1].total == unit.total) continue;
          combine_units(&unit, wave.data() + wave.size(), own_states, own_totals, out);
        }
      }
    }
  }

  // Combines the pieces of a wave that belong to one task and head.
  void combine_units(const Unit* unit, const Unit* end, States& states, States& totals, T* out) const {
    const AttentionTask& task = step.tasks[unit->task];
    State total = totals.from(unit->total);
    for (int64_t place = unit->total; unit < end && unit->total == place; unit++) {
      State state = states.from(unit->row);
      if (unit->piece == first_piece(task)) {
        int64_t rows = task.num_tokens * group;
        memcpy(total.largest, state.largest, rows * sizeof(float));
        memcpy(total.sums, state.sums, rows * sizeof(float));
        memcpy(total.mixed, state.mixed, rows * padded_dim * sizeof(float));
      } else {
        combine(task, unit->piece, state, total);
      }
      if (unit->piece == last_piece(task)) write(task, unit->head, total, out);
    }
  }

  // The factors of what is mixed for LANES rows whose sums have one more power of two each: that of the sink of the
  // row's head, which has no value. There may be fewer rows.
  Vec shares(int64_t head, State state, int64_t row) const {
    alignas(64) float of_rows[LANES];
    for (int64_t i = 0; i < LANES; i++) of_rows[i] = sinks[head * group + (row + i) % group] * LOG2_E;
    Vec own = load(of_rows), known = load(state.largest + row), largest = vmax(known, own);
    Vec kept = vexp2(known - largest);
    return kept / (load(state.sums + row) * kept + vexp2(own - largest));
  }

  void write(const AttentionTask& task, int64_t head, State state, T* out) const {
    int64_t stride = step.num_heads * dim;
    alignas(64) float factors[LANES];
    for (int64_t row = 0; row < task.num_tokens * group; row++) {
      if (sinks && row % LANES == 0) store(shares(head, state, row), factors);
      Vec factor = broadcast(sinks ? factors[row % LANES] : 1.0f / state.sums[row]);
      if (parts) {
        int64_t place = (task.token + row / group) * step.num_heads + head * group + row % group;
        log_sums[place] = (state.largest[row] + std::log2(state.sums[row])) / LOG2_E;
        float* part = parts + place * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(load(state.mixed + row * padded_dim + i) * factor, part + i);
        continue;
      }
      T* to = out + (task.token + row / group) * stride + (head * group + row % group) * dim;
      for (int64_t i = 0; i < dim; i += LANES) store(load(state.mixed + row * padded_dim + i) * factor, to + i);
    }
  }
};

// With `log_sums` [tokens, num_heads], `out` has floats; otherwise TYPE.
#define EXPORT_ATTENTION(NAME, TYPE)                                                                            \
  extern "C" void attend_##NAME(const AttentionStep* step, int64_t layer, const TYPE* queries,                  \
                                int64_t query_stride, const float* sinks, void* out, float* log_sums,           \
                                int64_t begin, int64_t end) {                                                   \
    with_elements<TYPE>(step->kv_elements, [&](auto element) {                                                  \
      float* parts = log_sums ? (float*)out : nullptr;                                                          \
      Attention<TYPE, decltype(element)> attention(*step, layer, query_stride, sinks, parts, log_sums);         \
      attention.run(queries, (TYPE*)out, begin, end);                                                           \
    });                                                                                                         \
  }

EXPORT_ATTENTION(float32, float)
EXPORT_ATTENTION(bfloat16, Bf16)

extern "C" void plan_attention(AttentionStep* step) { plan_tasks(step); }

// Rows of the largest task, by which whoever makes a step knows how many there can be.
extern "C" int64_t attention_task_rows() { return TASK_ROWS; }
