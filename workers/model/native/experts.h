// Mixtures of experts: for each row the weighted sum of the results of its experts, each a feed-forward of its own.
//
// The rows of each expert are sorted together (`SortedRows`), so that each panel of an expert is read once for all
// of them. Threads share the products of gates and ups as (expert, group of rows, panel), by their work; then, after
// one barrier, the sums as (rows, panels): a thread adds the results of all experts to its part of the sums, in the
// order of their numbers. A row's result therefore depends neither on the rows beside it nor on the number of
// threads. The weights of few rows are one stream of memory, in which a panel is followed by that of another expert.

#pragma once

#include <algorithm>
#include <vector>

#include "layer_ops.h"
#include "quantized_products.h"

enum ExpertActivation : int64_t { EXPERT_SILU = 0, EXPERT_GELU = 1, EXPERT_CLAMPED = 2, EXPERT_RELU2 = 3 };

// Panels as of `LinearWeights`, those of each expert anywhere. Of bfloat16, `num_inputs` and `size` are even: what was
// added to make them so is zero. Biases cover whole panels. `workers/model/experts/packed_experts.py` has the same
// structure.
struct Experts {
  // [num_experts]: [num_inputs] to `size` gates and ups, 16 of each in a panel; with EXPERT_RELU2 to ups, 32 in each
  const void* const* gate_up_panels;
  const void* const* down_panels;     // [num_experts]: [size] to [num_outputs]
  const void* gate_up_bias;           // [num_experts, panels, 32] in the order of the panels' outputs, or null
  const void* down_bias;              // [num_experts, panels, 32] or null
  int64_t num_experts, num_inputs, size, num_outputs, activation, is_bf16;
  float alpha, limit;  // of EXPERT_CLAMPED
  // The forms of panels of codes, all inputs in their order and none of them added, or null. Panels of floats have none.
  const QuantizedPanels *gate_up_form, *down_form;
};

// The experts of rows and the weights of their results, [rows, num_chosen]; an expert of -1 is none.
struct ChosenExperts {
  const int32_t* experts;
  const float* weights;
  int64_t num_chosen;
};

// Rows of all experts that have some, one expert after another and ascending within an expert.
struct SortedRows {
  std::vector<int64_t> experts;  // that have rows, ascending
  std::vector<int64_t> begins;   // of each of these: its first entry; and the number of entries
  std::vector<int32_t> rows;     // of each entry
  std::vector<float> weights;

  // `counts` [num_experts], if it is not null, is increased by the rows of each expert.
  void sort(const ChosenExperts& chosen, int64_t num_rows, int64_t num_experts, int64_t* counts) {
    int64_t num_places = num_rows * chosen.num_chosen;
    places_.assign(num_experts, 0);
    for (int64_t i = 0; i < num_places; i++)
      if (chosen.experts[i] >= 0) places_[chosen.experts[i]]++;
    experts.clear(), begins.clear();
    int64_t entries = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
      int64_t count = places_[expert];
      places_[expert] = entries;
      if (count) experts.push_back(expert), begins.push_back(entries);
      if (counts) counts[expert] += count;
      entries += count;
    }
    begins.push_back(entries);
    rows.resize(entries), weights.resize(entries);
    for (int64_t i = 0; i < num_places; i++) {
      if (chosen.experts[i] < 0) continue;
      int64_t entry = places_[chosen.experts[i]]++;
      rows[entry] = int32_t(i / chosen.num_chosen);
      weights[entry] = chosen.weights[i];
    }
  }

  int64_t num_entries() const { return begins.back(); }

 private:
  std::vector<int64_t> places_;
};

inline thread_local SortedRows sorted_rows;
inline thread_local Scratch gated_scratch, total_scratch;

// Panels that a thread multiplies a group of an expert's rows with.
struct ExpertTask {
  int64_t expert;        // its place in `SortedRows::experts`
  int64_t entry, count;  // the rows
  int64_t begin, end;    // the panels
};

// A mixture's work on a chunk of rows, shared by threads. T is the type of rows and weights, A that of operands.
template <typename T>
class ExpertChunk {
 public:
  using A = Operand<T>;

  ExpertChunk(const Experts& experts, const SortedRows& sorted, const T* x, int64_t x_stride, int64_t num_rows)
      : experts_(experts), sorted_(sorted), x_(x), x_stride_(x_stride), num_rows_(num_rows) {
    gated_ = reinterpret_cast<T*>(gated_scratch.floats((sorted.num_entries() * experts.size * sizeof(T) + 3) / 4));
    totals_ = total_scratch.floats(num_rows * down_panels() * PANEL);
  }

  // The part of a thread; all threads of a team call this.
  void run(int64_t thread, int64_t num_threads, bool is_added, T* out, int64_t out_stride) const {
    SumPart part(*this, thread, num_threads);
    std::vector<ExpertTask> gate_up = gate_up_tasks(thread, num_threads), down = part.tasks();
    TileScope tiles;
    bool is_known = !down.empty() && !experts_.down_form;
    run_gate_up(gate_up, is_known ? first_panel(down[0], experts_.down_panels, experts_.size) : nullptr);
#pragma omp barrier
    part.clear();
    run_down(down);
    part.finish(is_added, out, out_stride);
  }

 private:
  // The rows and panels whose sums a thread computes.
  struct SumPart {
    const ExpertChunk& chunk;
    int64_t first_row = 0, last_row = 0, begin = 0, end = 0;

    SumPart(const ExpertChunk& chunk, int64_t thread, int64_t num_threads) : chunk(chunk) {
      int64_t num_panels = chunk.down_panels(), least = INT64_MAX, rows = 1, panels = 1;
      int64_t num_experts = std::max(int64_t(1), int64_t(chunk.sorted_.experts.size()));
      for (int64_t parts = 1; parts <= num_threads && parts <= chunk.num_rows_; parts++) {
        int64_t of_panels = std::min(num_panels, num_threads / parts);
        int64_t per_expert = chunk.sorted_.num_entries() / (num_experts * parts);
        int64_t work = std::max(BLOCK_ROWS<A>, per_expert) * ((num_panels + of_panels - 1) / of_panels);
        if (work < least) least = work, rows = parts, panels = of_panels;
      }
      if (thread >= rows * panels) return;
      int64_t part = thread / panels, column = thread % panels;
      first_row = chunk.num_rows_ * part / rows, last_row = chunk.num_rows_ * (part + 1) / rows;
      begin = num_panels * column / panels, end = num_panels * (column + 1) / panels;
    }

    std::vector<ExpertTask> tasks() const {
      const SortedRows& sorted = chunk.sorted_;
      std::vector<ExpertTask> tasks;
      if (begin == end) return tasks;
      for (size_t expert = 0; expert < sorted.experts.size(); expert++) {
        auto rows = sorted.rows.begin(), first = rows + sorted.begins[expert], last = rows + sorted.begins[expert + 1];
        first = std::lower_bound(first, last, int32_t(first_row));
        last = std::lower_bound(first, last, int32_t(last_row));
        chunk.for_groups(first - rows, last - rows, chunk.experts_.size, [&](int64_t entry, int64_t count) {
          tasks.push_back({int64_t(expert), entry, count, begin, end});
        });
      }
      return tasks;
    }

    void clear() const {
      for (int64_t number = begin; number < end; number++)
        memset(chunk.totals_of(number, first_row), 0, (last_row - first_row) * PANEL * sizeof(float));
    }

    // Rounds the sums, and writes them or adds them to `out` [rows, num_outputs].
    void finish(bool is_added, T* out, int64_t out_stride) const {
      for (int64_t number = begin; number < end; number++) {
        int64_t width = std::min(PANEL, chunk.experts_.num_outputs - number * PANEL);
        const float* sums = chunk.totals_of(number, first_row);
        for (int64_t row = first_row; row < last_row; row++, sums += PANEL) {
          T* to = out + row * out_stride + number * PANEL;
          for_vectors(width, [&](int64_t i, auto count) {
            Vec sum = load(sums + i);
            store_part(is_added ? load_part(to + i, count) + rounded<T>(sum) : sum, to + i, count);
          });
        }
      }
    }
  };

  bool is_gated() const { return experts_.activation != EXPERT_RELU2; }
  // The columns between the products that a panel of gates and ups, or of ups alone, computes.
  int64_t panel_columns() const { return is_gated() ? PANEL / 2 : PANEL; }
  int64_t gate_up_panels() const { return (experts_.size + panel_columns() - 1) / panel_columns(); }
  int64_t down_panels() const { return (experts_.num_outputs + PANEL - 1) / PANEL; }
  // The sums of a panel's outputs, [num_rows, 32], from a row on.
  float* totals_of(int64_t number, int64_t row) const { return totals_ + (number * num_rows_ + row) * PANEL; }

  // Calls at(entry, count) for the groups of entries that take turns with a panel of k inputs.
  template <typename At>
  void for_groups(int64_t begin, int64_t end, int64_t k, const At& at) const {
    if (begin == end) return;
    int64_t group = group_rows<T, A>(end - begin, k);
    for (int64_t entry = begin; entry < end; entry += group) at(entry, std::min(group, end - entry));
  }

  // Calls at(expert, entry, count, cost of a panel) for the groups of all experts. Few rows cost what reading costs.
  template <typename At>
  void for_gate_up_groups(const At& at) const {
    for (size_t expert = 0; expert < sorted_.experts.size(); expert++)
      for_groups(sorted_.begins[expert], sorted_.begins[expert + 1], experts_.num_inputs,
                 [&](int64_t entry, int64_t count) { at(expert, entry, count, std::max(BLOCK_ROWS<A>, count)); });
  }

  // The tasks of a thread: all threads' costs are equal but for a panel's.
  std::vector<ExpertTask> gate_up_tasks(int64_t thread, int64_t num_threads) const {
    int64_t total = 0, before = 0, num_panels = gate_up_panels();
    for_gate_up_groups([&](int64_t, int64_t, int64_t, int64_t cost) { total += cost * num_panels; });
    int64_t from = total * thread / num_threads, to = total * (thread + 1) / num_threads;
    std::vector<ExpertTask> tasks;
    for_gate_up_groups([&](int64_t expert, int64_t entry, int64_t count, int64_t cost) {
      auto panel_at = [&](int64_t place) {  // the first that begins there or later
        return std::clamp((place - before + cost - 1) / cost, int64_t(0), num_panels);
      };
      int64_t begin = panel_at(from), end = panel_at(to);
      if (begin < end) tasks.push_back({expert, entry, count, begin, end});
      before += cost * num_panels;
    });
    return tasks;
  }

  const T* first_panel(const ExpertTask& task, const void* const* panels, int64_t k) const {
    return static_cast<const T*>(panels[sorted_.experts[task.expert]]) + task.begin * k * PANEL;
  }

  // Writes the gated products of the tasks' rows; what is read after them begins at `after`.
  void run_gate_up(const std::vector<ExpertTask>& tasks, const T* after) const {
    int64_t size = experts_.size;
    auto rows_of = [&](const ExpertTask& task) { return input_rows(task.entry, task.count); };
    auto prepare = [](const ExpertTask&, int64_t, int64_t, int64_t) {};
    auto finish = [&](const ExpertTask& task, int64_t first, int64_t count, int64_t number, const float* sums) {
      const T* bias = bias_of(experts_.gate_up_bias, task, gate_up_panels(), number);
      int64_t column = number * panel_columns();
      finish_gated(sums, count, bias, size - column, gated_ + (task.entry + first) * size + column);
    };
    if (const QuantizedPanels* form = experts_.gate_up_form)
      return run_quantized(tasks, *form, experts_.gate_up_panels, experts_.num_inputs, rows_of, prepare, finish);
    run_tasks(tasks, experts_.gate_up_panels, experts_.num_inputs, after, rows_of, prepare, finish);
  }

  // Adds the weighted results of the tasks' rows to their sums, which lie anywhere.
  void run_down(const std::vector<ExpertTask>& tasks) const {
    auto rows_of = [&](const ExpertTask& task) { return gated_rows(task.entry, task.count); };
    auto prepare = [&](const ExpertTask& task, int64_t first, int64_t count, int64_t number) {
      for (int64_t m = 0; m < count; m++) {
        const char* to = reinterpret_cast<const char*>(totals_of(number, sorted_.rows[task.entry + first + m]));
        prefetch(to), prefetch(to + 64);
      }
    };
    auto finish = [&](const ExpertTask& task, int64_t first, int64_t count, int64_t number, const float* sums) {
      const T* bias = bias_of(experts_.down_bias, task, down_panels(), number);
      add_weighted(sums, task.entry + first, count, bias, totals_of(number, 0));
    };
    if (const QuantizedPanels* form = experts_.down_form)
      return run_quantized(tasks, *form, experts_.down_panels, experts_.size, rows_of, prepare, finish);
    run_tasks(tasks, experts_.down_panels, experts_.size, nullptr, rows_of, prepare, finish);
  }

  const T* bias_of(const void* biases, const ExpertTask& task, int64_t num_panels, int64_t number) const {
    if (!biases) return nullptr;
    return static_cast<const T*>(biases) + (sorted_.experts[task.expert] * num_panels + number) * PANEL;
  }

  // Multiplies the rows of each task by its panels, and calls finish(task, first of the rows, count, panel, sums);
  // before that, where there is time for it, prepare(task, first of the rows, count, panel).
  template <typename RowsOf, typename Prepare, typename Finish>
  void run_tasks(const std::vector<ExpertTask>& tasks, const void* const* panels, int64_t k, const T* after,
                 const RowsOf& rows_of, const Prepare& prepare, const Finish& finish) const {
    float* sums = sum_scratch.floats(SUM_ROWS * PANEL);
    for (size_t i = 0; i < tasks.size(); i++) {
      const ExpertTask& task = tasks[i];
      const A* rows = rows_of(task);
      const T *panel = first_panel(task, panels, k), *last = panel + (task.end - task.begin - 1) * k * PANEL;
      const T* next_task = i + 1 < tasks.size() ? first_panel(tasks[i + 1], panels, k) : after;
      for (int64_t number = task.begin; number < task.end; number++, panel += k * PANEL) {
        const T* next = panel < last ? panel + k * PANEL : next_task;
        for (int64_t first = 0; first < task.count; first += SUM_ROWS) {
          int64_t count = std::min(SUM_ROWS, task.count - first);
          if (task.count <= BLOCK_ROWS<A>) {
            multiply_stream(rows, count, panel, k, next, sums);
          } else {
            prepare(task, first, count, number);
            multiply_group(rows + first * k, k, count, panel, k, sums, share_of(next, k, first, count, task.count));
          }
          finish(task, first, count, number, sums);
        }
      }
    }
  }

  // The same with panels of codes.
  template <typename RowsOf, typename Prepare, typename Finish>
  void run_quantized(const std::vector<ExpertTask>& tasks, const QuantizedPanels& form, const void* const* panels,
                     int64_t k, const RowsOf& rows_of, const Prepare& prepare, const Finish& finish) const {
    PanelShape shape(form, k);
    float* sums = sum_scratch.floats(SUM_ROWS * PANEL);
    for (const ExpertTask& task : tasks) {
      QuantizedRows<A> rows{rows_of(task), k, nullptr, shape.num_groups};
      if (shape.offset_kind) {
        float* group_sums = group_sum_scratch.floats(task.count * shape.num_groups);
        for (int64_t row = 0; row < task.count; row++)
          sum_groups(rows.inputs + row * k, shape, group_sums + row * shape.num_groups);
        rows.group_sums = group_sums;
      }
      const uint8_t* of_expert = static_cast<const uint8_t*>(panels[sorted_.experts[task.expert]]);
      for (int64_t first = 0; first < task.count; first += SUM_ROWS) {
        int64_t count = std::min(SUM_ROWS, task.count - first);
        PackedRows<A> packed(rows.from(first), count, shape);
        for (int64_t number = task.begin; number < task.end; number++) {
          prepare(task, first, count, number);
          multiply_panel(form, shape, packed, of_expert + number * shape.panel_bytes, sums);
          finish(task, first, count, number, sums);
        }
      }
    }
  }

  // What of the next panel is prefetched with `count` of `total` rows, from the row `first` on.
  static Ahead share_of(const T* next, int64_t k, int64_t first, int64_t count, int64_t total) {
    if (!next) return {};
    int64_t bytes = k * PANEL * sizeof(T), line = PANEL * sizeof(float);
    return {reinterpret_cast<const char*>(next) + first * bytes / total, line * count / total};
  }

  // One block of rows: its panel's own stream is prefetched, a fixed distance ahead, and after its end the next.
  static void multiply_stream(const A* rows, int64_t count, const T* panel, int64_t k, const T* next, float* sums) {
    constexpr int64_t line = PANEL * sizeof(float), near = NEAR_BYTES / (PANEL * sizeof(T));  // inputs
    auto at = [](const T* from) { return reinterpret_cast<const char*>(from); };
    Ahead of_next{at(next), next ? line : 0};
    // A product is cut where no other way to compute it is taken for its parts.
    if (near >= k || k % 32) return multiply(rows, k, count, panel, k, sums, PANEL, false, of_next);
    Ahead own{at(panel) + NEAR_BYTES, line};
    if (next == panel + k * PANEL) return multiply(rows, k, count, panel, k, sums, PANEL, false, own);
    int64_t before = (k - near) / 32 * 32;
    if (before) multiply(rows, k, count, panel, before, sums, PANEL, false, own);
    multiply(rows + before, k, count, panel + before * PANEL, k - before, sums, PANEL, before > 0, of_next);
  }

  // Rows of x as operands, one after another.
  const A* input_rows(int64_t entry, int64_t count) const {
    int64_t k = experts_.num_inputs;
    if constexpr (sizeof(A) == sizeof(T))
      if (count == 1) return x_ + sorted_.rows[entry] * x_stride_;
    A* to = operands(count, k);
    for (int64_t m = 0; m < count; m++) copy_row(x_ + sorted_.rows[entry + m] * x_stride_, k, to + m * k);
    return to;
  }

  const A* gated_rows(int64_t entry, int64_t count) const {
    int64_t k = experts_.size;
    const T* from = gated_ + entry * k;
    if constexpr (sizeof(A) == sizeof(T)) {
      return from;
    } else {
      A* to = operands(count, k);
      for (int64_t m = 0; m < count; m++) copy_row(from + m * k, k, to + m * k);
      return to;
    }
  }

  static A* operands(int64_t count, int64_t k) {
    return reinterpret_cast<A*>(operand_scratch.floats((count * k * sizeof(A) + 3) / 4));
  }

  static void copy_row(const T* from, int64_t k, A* to) {
    if constexpr (sizeof(A) == sizeof(T))
      memcpy(to, from, k * sizeof(T));
    else
      widen_row(from, k, to);
  }

  // Squares what is positive of ups, [count, 32], which have no bias.
  void finish_squared(const float* sums, int64_t count, int64_t columns, T* out) const {
    for (int64_t m = 0; m < count; m++, sums += PANEL, out += experts_.size) {
      for_vectors(std::min(PANEL, columns), [&](int64_t i, auto width) {
        Vec up = rounded<T>(load(sums + i)), positive = vmax(broadcast(0), up);  // NaN stays
        store_part(positive * positive, out + i, width);
      });
    }
  }

  void finish_gated(const float* sums, int64_t count, const T* bias, int64_t columns, T* out) const {
    if (!is_gated()) return finish_squared(sums, count, columns, out);
    if (experts_.activation != EXPERT_CLAMPED)
      return finish_gates(sums, count, bias, columns, out, experts_.size, experts_.activation == EXPERT_GELU);
    // The second of two operands is returned where one is NaN.
    Vec alpha = broadcast(experts_.alpha), limit = broadcast(rounded<T>(experts_.limit)), low = broadcast(0) - limit;
    finish_gates(sums, count, bias, columns, out, experts_.size, [&](Vec gate, Vec up) {
      Vec clamped = vmin(limit, gate), shifted = vmax(low, vmin(limit, up)) + broadcast(1);
      return rounded<T>(shifted) * rounded<T>(times_sigmoid<T>(clamped, clamped * alpha));
    });
  }

  // Adds the results [count, 32] of a panel, with its bias, to the sums of their rows.
  void add_weighted(const float* results, int64_t entry, int64_t count, const T* bias, float* totals) const {
    for (int64_t m = 0; m < count; m++, results += PANEL) {
      float* to = totals + sorted_.rows[entry + m] * PANEL;
      Vec weight = broadcast(sorted_.weights[entry + m]);
      for (int64_t v = 0; v < PANEL; v += LANES) {
        Vec result = bias ? load(results + v) + load(bias + v) : load(results + v);
        store(fma(weight, result, load(to + v)), to + v);
      }
    }
  }

  const Experts& experts_;
  const SortedRows& sorted_;
  const T* x_;
  int64_t x_stride_, num_rows_;
  T* gated_;       // [entries, size]
  float* totals_;  // [down panels, num_rows, 32]
};

constexpr int64_t MIXTURE_ROWS = 4096;  // computed at a time, which bounds the scratch memory

// x: [rows, num_inputs], rows `x_stride` apart. The sums are rounded to T once, and written or, if `is_added`, added
// to `out` [rows, num_outputs]. `counts` as of `SortedRows::sort`.
template <typename T>
void run_experts(const Experts& experts, const ChosenExperts& chosen, const T* x, int64_t x_stride, int64_t num_rows,
                 bool is_added, T* out, int64_t out_stride, int64_t* counts) {
  SortedRows& sorted = sorted_rows;
  for (int64_t first = 0; first < num_rows; first += MIXTURE_ROWS) {
    int64_t rows = std::min(MIXTURE_ROWS, num_rows - first), place = first * chosen.num_chosen;
    sorted.sort({chosen.experts + place, chosen.weights + place, chosen.num_chosen}, rows, experts.num_experts, counts);
    ExpertChunk<T> chunk(experts, sorted, x + first * x_stride, x_stride, rows);
#pragma omp parallel
    chunk.run(omp_get_thread_num(), omp_get_num_threads(), is_added, out + first * out_stride, out_stride);
  }
}

extern "C" void tandem_run_experts(const Experts* experts, const ChosenExperts* chosen, const void* x,
                                   int64_t x_stride, int64_t num_rows, int64_t is_added, void* out,
                                   int64_t out_stride, int64_t* counts) {
  if (experts->is_bf16)
    run_experts(*experts, *chosen, (const Bf16*)x, x_stride, num_rows, is_added, (Bf16*)out, out_stride, counts);
  else
    run_experts(*experts, *chosen, (const float*)x, x_stride, num_rows, is_added, (float*)out, out_stride, counts);
}
