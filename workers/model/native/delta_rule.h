// The gated delta rule (`workers/model/state/delta_rule.py`): states [key_dim, value_dim] of value heads, in float.
//
// A few tokens advance a state together: of the state before them, one pass computes what it has for their keys and
// queries, and one pass adds their changes, which solve a small triangular system. With D(s, t) the decay after token s
// up to t, and D(t) that from the start on:
//
//   change(t) = beta(t) * (v(t) - D(t) * k(t) S - sum over s < t of D(s, t) * (k(t) . k(s)) * change(s))
//   out(t) = D(t) * q(t) S + sum over s <= t of D(s, t) * (q(t) . k(s)) * change(s)
//   S = D(last) * S + sum over s of D(s, last) * k(s) change(s)
//
// That is fewer products than long chunks take, and a tile of columns of the state stays in the first cache meanwhile. A
// token alone reads and writes its state once, where it lies. An element's sums run over the key's dimensions in their
// order: a token that is computed alone has the same result whatever it is computed beside.

#pragma once

#include <omp.h>

#include <cmath>
#include <vector>

#include "layer_ops.h"
#include "products.h"
#include "state_blocks.h"

constexpr int64_t SEGMENT_TOKENS = 32;  // whose queries and keys stay in the second cache beside a state
constexpr float LENGTH_EPS = 1e-6f;
constexpr int64_t STATE_LINE = 16;  // floats

// A layer's value heads. `workers/model/state/native_delta.py` has the same structures.
struct DeltaLayer {
  const float *rates, *biases;  // [num_value_heads]
  Norm norm;                    // of value_dim
  int64_t num_key_heads, num_value_heads, key_dim, value_dim, is_bf16;
  int64_t is_single;  // whether each token is computed alone
};

// The tokens of a step, rows their strides apart: behind the convolution, and products as they come.
struct DeltaRows {
  const void *channels, *gates, *betas, *decays;
  int64_t channel_stride, gate_stride, beta_stride, decay_stride;
};

template <typename T>
class DeltaRule {
  static constexpr int MOST_TOKENS = 4;  // that advance together
  static constexpr int TILE_VECS = LANES == 16 ? 2 : 1, SINGLE_VECS = PANEL_VECS, STREAM_VECS = LANES == 16 ? 8 : 4;

  // What tokens that advance together need beside their keys, queries and values.
  struct Group {
    float betas[MOST_TOKENS], decays[MOST_TOKENS];  // decays since the start
    float solved[MOST_TOKENS][MOST_TOKENS];         // beta(t) * D(s, t) * (k(t) . k(s))
    float mixed[MOST_TOKENS][MOST_TOKENS];          // D(s, t) * (q(t) . k(s))
    float added[MOST_TOKENS];                       // D(s, last)
  };

  const DeltaLayer& layer;
  const DeltaRows& given;
  const StateBlocks& blocks;
  const StateSequences& step;
  T* out;  // [num_tokens, num_value_heads * value_dim]
  const int64_t out_stride, key_dim, value_dim, values_per_key, heads_per_part;

  // A sequence's value head. `token` is the sequence's first.
  struct Unit {
    int64_t sequence, token, head;
    const T *queries, *keys, *values;
    float* state;
  };

  struct Rows {
    float *keys, *queries, *mixed;  // [SEGMENT_TOKENS, ...]
    float* tiles;                   // a state, a tile of columns after another
    Group groups[SEGMENT_TOKENS];
  };

 public:
  // The states of value heads alone, in their order, are in each part of `blocks`.
  DeltaRule(const DeltaLayer& layer, const DeltaRows& given, const StateBlocks& blocks, const StateSequences& step,
            T* out, int64_t out_stride)
      : layer(layer),
        given(given),
        blocks(blocks),
        step(step),
        out(out),
        out_stride(out_stride),
        key_dim(layer.key_dim),
        value_dim(layer.value_dim),
        values_per_key(layer.num_value_heads / layer.num_key_heads),
        heads_per_part(layer.num_value_heads / blocks.num_parts) {}

  void run() const {
    static thread_local std::vector<int64_t> first_tokens;
    std::vector<int64_t>& firsts = first_tokens;
    firsts.clear();
    int64_t token = 0, num_heads = layer.num_value_heads;
    for (int64_t i = 0; i < step.num_sequences; i++) firsts.push_back(token), token += step.lengths[i];
    // Where each sequence has one token, a thread takes heads that lie one after another.
    int64_t num_units = step.num_sequences * num_heads, share = (num_units + omp_get_max_threads() - 1) / omp_get_max_threads();
    int64_t chunk = token == step.num_sequences ? share : 1;
#pragma omp parallel
    {
      Rows& rows = own_rows();
#pragma omp for schedule(dynamic, chunk)
      for (int64_t unit = 0; unit < num_units; unit++) {
        int64_t sequence = unit / num_heads;
        compute(unit_of(sequence, firsts[sequence], unit % num_heads), rows);
      }
    }
  }

 private:
  Rows& own_rows() const {
    static thread_local Scratch memory;
    static thread_local Rows rows;
    int64_t keys = SEGMENT_TOKENS * key_dim, values = SEGMENT_TOKENS * value_dim;
    rows.keys = memory.floats(2 * keys + values + key_dim * value_dim);
    rows.queries = rows.keys + keys;
    rows.mixed = rows.queries + keys;
    rows.tiles = rows.mixed + values;
    return rows;
  }

  float* state_of(int64_t block, int64_t head) const {
    int64_t part = head / heads_per_part, place = head % heads_per_part;
    return blocks.states + block * blocks.block_stride + part * blocks.part_stride + place * key_dim * value_dim;
  }

  Unit unit_of(int64_t sequence, int64_t token, int64_t head) const {
    int64_t key_head = head / values_per_key, width = 2 * key_dim + values_per_key * value_dim;
    const T* queries = (const T*)given.channels + token * given.channel_stride + key_head * width;
    const T* values = queries + 2 * key_dim + head % values_per_key * value_dim;
    return {sequence, token, head, queries, queries + key_dim, values, state_of(step.writes[sequence], head)};
  }

  void compute(const Unit& unit, Rows& rows) const {
    int64_t read = step.reads[unit.sequence], length = step.lengths[unit.sequence];
    const float* before = unit.state;
    if (read < 0)
      memset(unit.state, 0, key_dim * value_dim * sizeof(float));
    else
      before = state_of(read, unit.head);
    if (length == 1) {
      prepare(unit, 0, 1, 1, rows);
      stream(unit, before, rows);
      finish(unit, 0, 1, rows);
    } else if (layer.is_single) {
      advance_tiles<1, SINGLE_VECS>(unit, before, rows);
    } else {
      advance_tiles<MOST_TOKENS, TILE_VECS>(unit, before, rows);
    }
  }

  // ------------------------------------------------------------------------------------ before the states

  // Writes x [key_dim], of unit length times `scale`, as floats.
  void normalize(const T* x, float scale, float* to) const {
    Vec sum = broadcast(0);
    for_vectors(key_dim, [&](int64_t i, auto width) {
      Vec value = load_part(x + i, width);
      sum = fma(value, value, sum);
    });
    Vec factor = broadcast(scale / std::sqrt(sum_lanes(sum) + LENGTH_EPS));
    for_vectors(key_dim, [&](int64_t i, auto width) { store_part(load_part(x + i, width) * factor, to + i, width); });
  }

  float dot(const float* a, const float* b) const {
    Vec sum = broadcast(0);
    for_vectors(key_dim, [&](int64_t i, auto width) { sum = fma(load_part(a + i, width), load_part(b + i, width), sum); });
    return sum_lanes(sum);
  }

  float beta_of(const Unit& unit, int64_t token) const {
    T value = ((const T*)given.betas)[(unit.token + token) * given.beta_stride + unit.head], beta;
    store(1.0f / (1.0f + std::exp(-to_float(value))), &beta);
    return to_float(beta);
  }

  float decay_of(const Unit& unit, int64_t token) const {
    T value = ((const T*)given.decays)[(unit.token + token) * given.decay_stride + unit.head];
    float x = to_float(value) + layer.biases[unit.head];
    float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
    return std::exp(-layer.rates[unit.head] * softplus);
  }

  // Fills in the tokens [begin, begin + count) of a unit, `most` in each group.
  void prepare(const Unit& unit, int64_t begin, int64_t count, int64_t most, Rows& rows) const {
    float scale = 1.0f / std::sqrt(float(key_dim));
    for (int64_t i = 0; i < count; i++) {
      int64_t offset = (begin + i) * given.channel_stride;
      normalize(unit.queries + offset, scale, rows.queries + i * key_dim);
      normalize(unit.keys + offset, 1.0f, rows.keys + i * key_dim);
    }
    for (int64_t i = 0; i < count; i += most)
      form_group(unit, begin + i, std::min(most, count - i), rows.keys + i * key_dim, rows.queries + i * key_dim,
                 rows.groups[i / most]);
  }

  void form_group(const Unit& unit, int64_t begin, int64_t count, const float* keys, const float* queries,
                  Group& group) const {
    float total = 1;
    for (int64_t t = 0; t < count; t++) {
      float decay = decay_of(unit, begin + t);
      group.betas[t] = beta_of(unit, begin + t);
      group.decays[t] = total *= decay;
      group.added[t] = 1;
      for (int64_t s = 0; s < t; s++) {
        group.added[s] *= decay;
        group.solved[t][s] = group.betas[t] * group.added[s] * dot(keys + t * key_dim, keys + s * key_dim);
      }
      for (int64_t s = 0; s <= t; s++)
        group.mixed[t][s] = group.added[s] * dot(queries + t * key_dim, keys + s * key_dim);
    }
  }

  // ------------------------------------------------------------------------------------ states

  // Advances V vectors of columns of a state, rows `from_stride` and `to_stride` apart, by C tokens, whose outputs
  // are written as floats. Reads V vectors of each row of `ahead` into the cache meanwhile.
  template <int C, int V>
  INLINE void advance(const Group& group, const float* keys, const float* queries, const T* values, const float* from,
                      int64_t from_stride, float* to, int64_t to_stride, const float* ahead, float* mixed) const {
    Vec known[C][V], asked[C][V];
    for (int t = 0; t < C; t++)
      for (int v = 0; v < V; v++) known[t][v] = asked[t][v] = broadcast(0);
    for (int64_t i = 0; i < key_dim; i++) {
      Vec state[V];
      for (int v = 0; v < V; v++) state[v] = load(from + i * from_stride + v * LANES);
#pragma GCC unroll 4
      for (int t = 0; t < C; t++) {
        Vec key = broadcast(keys[t * key_dim + i]), query = broadcast(queries[t * key_dim + i]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          known[t][v] = fma(key, state[v], known[t][v]);
          asked[t][v] = fma(query, state[v], asked[t][v]);
        }
      }
    }
    solve<C, V>(group, values, known, asked, mixed);
    Vec decay = broadcast(group.decays[C - 1]);
    for (int64_t i = 0; i < key_dim; i++) {
      if (ahead)
        for (int v = 0; v < V * LANES; v += STATE_LINE) prefetch((const char*)(ahead + i * from_stride + v));
      Vec state[V];
      for (int v = 0; v < V; v++) state[v] = load(from + i * from_stride + v * LANES) * decay;
#pragma GCC unroll 4
      for (int t = 0; t < C; t++) {
        Vec key = broadcast(keys[t * key_dim + i]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) state[v] = fma(key, known[t][v], state[v]);
      }
      for (int v = 0; v < V; v++) store(state[v], to + i * to_stride + v * LANES);
    }
  }

  // Turns what a state has for the tokens' keys into what they add to it, and writes their outputs.
  template <int C, int V>
  INLINE void solve(const Group& group, const T* values, Vec (&known)[C][V], const Vec (&asked)[C][V],
                    float* mixed) const {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      Vec changes[C];
#pragma GCC unroll 4
      for (int t = 0; t < C; t++) {
        Vec value = load(values + t * given.channel_stride + v * LANES);
        Vec change = (value - known[t][v] * broadcast(group.decays[t])) * broadcast(group.betas[t]);
        for (int s = 0; s < t; s++) change = change - changes[s] * broadcast(group.solved[t][s]);
        changes[t] = change;
        Vec sum = asked[t][v] * broadcast(group.decays[t]);
        for (int s = 0; s <= t; s++) sum = fma(changes[s], broadcast(group.mixed[t][s]), sum);
        store(sum, mixed + t * value_dim + v * LANES);
      }
      for (int t = 0; t < C; t++) known[t][v] = changes[t] * broadcast(group.added[t]);
    }
  }

  // Advances a state by one token, from where it lies to where it shall.
  void stream(const Unit& unit, const float* before, Rows& rows) const {
    if (value_dim % (STREAM_VECS * LANES) == 0) return stream_columns<STREAM_VECS>(unit, before, rows);
    if (value_dim % (STREAM_VECS / 2 * LANES) == 0) return stream_columns<STREAM_VECS / 2>(unit, before, rows);
    stream_columns<TILE_VECS>(unit, before, rows);
  }

  template <int V>
  void stream_columns(const Unit& unit, const float* before, Rows& rows) const {
    bool is_last = (unit.head + 1) % heads_per_part == 0;
    const float* ahead = is_last ? nullptr : before + key_dim * value_dim;
    for (int64_t column = 0; column < value_dim; column += V * LANES)
      advance<1, V>(rows.groups[0], rows.keys, rows.queries, unit.values + column, before + column, value_dim,
                    unit.state + column, value_dim, ahead ? ahead + column : nullptr, rows.mixed + column);
  }

  // Advances a state by all tokens of a sequence, at most C together, in tiles of V vectors of columns.
  template <int C, int V>
  void advance_tiles(const Unit& unit, const float* before, Rows& rows) const {
    constexpr int64_t width = V * LANES;
    copy_tiles<width>([&](float* tile, int64_t row, int64_t column) {
      memcpy(tile, before + row * value_dim + column, width * sizeof(float));
    }, rows);
    int64_t length = step.lengths[unit.sequence];
    for (int64_t begin = 0; begin < length; begin += SEGMENT_TOKENS) {
      int64_t count = std::min(SEGMENT_TOKENS, length - begin);
      prepare(unit, begin, count, C, rows);
      for (int64_t column = 0; column < value_dim; column += width)
        for (int64_t i = 0; i < count; i += C) advance_tile<C, V>(unit, begin, i, std::min<int64_t>(C, count - i), column, rows);
      finish(unit, begin, count, rows);
    }
    copy_tiles<width>([&](float* tile, int64_t row, int64_t column) {
      memcpy(unit.state + row * value_dim + column, tile, width * sizeof(float));
    }, rows);
  }

  template <int64_t WIDTH, typename Copy>
  void copy_tiles(const Copy& copy, Rows& rows) const {
    float* tile = rows.tiles;
    for (int64_t column = 0; column < value_dim; column += WIDTH)
      for (int64_t row = 0; row < key_dim; row++, tile += WIDTH) copy(tile, row, column);
  }

  template <int C, int V>
  INLINE void advance_tile(const Unit& unit, int64_t begin, int64_t i, int64_t count, int64_t column,
                           Rows& rows) const {
    constexpr int64_t width = V * LANES;
    float *tile = rows.tiles + column * key_dim, *keys = rows.keys + i * key_dim, *queries = rows.queries + i * key_dim;
    const T* values = unit.values + (begin + i) * given.channel_stride + column;
    float* mixed = rows.mixed + i * value_dim + column;
    auto by = [&](auto num_tokens) {
      advance<num_tokens.value, V>(rows.groups[i / C], keys, queries, values, tile, width, tile, width, nullptr, mixed);
    };
    using std::integral_constant;
    if (count == C) return by(integral_constant<int, C>{});
    if constexpr (C > 1) {
      if (count == 1) by(integral_constant<int, 1>{});
      if (count == 2) by(integral_constant<int, 2>{});
      if (count == 3) by(integral_constant<int, 3>{});
    }
  }

  // ------------------------------------------------------------------------------------ after the states

  // Normalizes the outputs of the tokens [begin, begin + count), and multiplies them by the SiLU of their gates.
  void finish(const Unit& unit, int64_t begin, int64_t count, Rows& rows) const {
    const Norm& norm = layer.norm;
    for (int64_t i = 0; i < count; i++) {
      float* mixed = rows.mixed + i * value_dim;
      int64_t token = unit.token + begin + i;
      const T* gates = (const T*)given.gates + token * given.gate_stride + unit.head * value_dim;
      T* to = out + token * out_stride + unit.head * value_dim;
      for (int64_t v = 0; v < value_dim; v += LANES) store(rounded<T>(load(mixed + v)), mixed + v);
      float factor = norm_factor(mixed, value_dim, norm.eps);
      for (int64_t v = 0; v < value_dim; v += LANES) {
        Vec value = rounded<T>(normed<T>(load(mixed + v), factor, load(norm.weight + v), norm.rounds_first));
        store(value * silu<float>(load(gates + v)), to + v);
      }
    }
  }
};

extern "C" void tandem_run_delta_rule(const DeltaLayer* layer, const DeltaRows* given, const StateBlocks* blocks,
                                      const StateSequences* step, void* out, int64_t out_stride) {
  if (layer->is_bf16)
    DeltaRule<Bf16>(*layer, *given, *blocks, *step, (Bf16*)out, out_stride).run();
  else
    DeltaRule<float>(*layer, *given, *blocks, *step, (float*)out, out_stride).run();
}
