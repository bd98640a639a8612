// A whole step of a decoder: one team goes through all layers, so that threads are woken once and nothing but kernels stands
// between kernels. Oracle: Decoder.__call__, which calls the same kernels one by one (local_engine/models/decoder.py).

#include "kernels.h"

namespace {

using namespace sameway;

// Products whose outputs lie side by side: parts of a matrix may be held differently. local_engine/executors/native.py has the
// same three structures.
struct Linear {
  const Matrix* parts;
  int32_t count, outputs;
};

struct Layer {
  const float *attention_norm, *qk_norm, *output_norm, *mlp_norm, *down_norm;  // or null, but for the first and the fourth
  Linear qkv, output, gate_up, down;
  const void *cos, *sin;
  void* pool;
  int64_t window;  // which of the model's
};

struct Model {
  const Layer* layers;
  const int64_t* windows;
  const float* final_norm;
  Linear head;
  int64_t blocks, weights;
  int32_t layer_count, window_count, kind, head_kind, hidden, heads, kv_heads, size, block_tokens, is_gelu;
  float epsilon, scale, cap;
};

// A step's workspace: room for each kind of value, used by every layer in turn.
struct Space {
  std::vector<uint32_t> y, more, qkv, seen, gate_up, gated;
  std::vector<Codes> codes;
  std::vector<Plan> plans;  // one for each window

  void fit(const Model& m, int rows) {
    size_t most_codes = 0, most_gates = 0;
    const auto count = [&](const Linear& linear) {
      for (int i = 0; i < linear.count; ++i) most_codes = std::max(most_codes, codes_of(linear.parts[i], rows));
    };
    for (const Layer* layer = m.layers; layer < m.layers + m.layer_count; ++layer) {
      count(layer->qkv), count(layer->output), count(layer->gate_up), count(layer->down);
      most_gates = std::max<size_t>(most_gates, layer->gate_up.outputs);
    }
    count(m.head);
    const size_t all = (m.heads + 2 * m.kv_heads) * m.size, hidden = m.hidden;
    const auto grow = [](auto& values, size_t size) {
      if (values.size() < size) values.resize(size);
    };
    grow(codes, most_codes), grow(plans, m.window_count);
    grow(y, rows * hidden), grow(more, rows * hidden), grow(qkv, rows * std::max(all, hidden)), grow(seen, rows * m.heads * m.size);
    grow(gate_up, rows * most_gates), grow(gated, rows * most_gates / 2);
  }
};

void multiply(Team& team, int kind, const Linear& linear, const void* x, void* out, int rows, Codes* codes) {
  const size_t width = kind == 1 ? sizeof(bf16) : sizeof(float);
  auto* to = static_cast<char*>(out);
  for (int i = 0; i < linear.count; ++i) {
    multiply(team, kind, linear.parts[i], x, to, linear.outputs, rows, codes);
    to += linear.parts[i].outputs * width;
  }
}

}  // namespace

extern "C" {

// `x` [rows, hidden] holds the embedded tokens; logits [logit_count, vocabulary] are of the rows `logit_rows`.
void sw_step(const Model* model, void* x, const int64_t* positions, const int64_t* slots, const int64_t* tables, const int64_t* starts,
             const int64_t* logit_rows, void* logits, int rows, int logit_count) {
  static thread_local Space space;  // of the calling thread; the team reads it by this reference
  Space& at = space;
  const Model& m = *model;
  const Shape shape{m.heads, m.kv_heads, m.size, m.block_tokens, m.blocks};
  const auto sights = [&](int64_t window) { return Sights{tables, starts, positions, m.windows[window], shape}; };
  at.fit(m, rows);
  for (int i = 0; i < m.window_count; ++i) plan(sights(i), rows, at.plans[i]);
  together(threads_if(rows * m.weights > 1 << 22), [&](Team& team) {
    void *y = at.y.data(), *qkv = at.qkv.data(), *seen = at.seen.data(), *gate_up = at.gate_up.data(), *gated = at.gated.data();
    Codes* codes = at.codes.data();
    void* more = nullptr;  // what the layer before adds to x
    for (int i = 0; i < m.layer_count; ++i) {
      const Layer& layer = m.layers[i];
      add_norm(team, m.kind, x, more, layer.attention_norm, y, rows, m.hidden, m.epsilon);
      multiply(team, m.kind, layer.qkv, y, qkv, rows, codes);
      rotate_write(team, m.kind, qkv, layer.qk_norm, m.epsilon, layer.cos, layer.sin, positions, slots, layer.pool, rows, shape);
      attend(team, m.kind, sights(layer.window), at.plans[layer.window], qkv, layer.pool, m.scale, m.cap, seen);
      multiply(team, m.kind, layer.output, seen, y, rows, codes);
      if (layer.output_norm) add_norm(team, m.kind, y, nullptr, layer.output_norm, y, rows, m.hidden, m.epsilon);
      add_norm(team, m.kind, x, y, layer.mlp_norm, y, rows, m.hidden, m.epsilon);
      multiply(team, m.kind, layer.gate_up, y, gate_up, rows, codes);
      gate(team, m.kind, gate_up, gated, rows, layer.gate_up.outputs / 2, m.is_gelu);
      more = at.more.data();
      multiply(team, m.kind, layer.down, gated, more, rows, codes);
      if (layer.down_norm) add_norm(team, m.kind, more, nullptr, layer.down_norm, more, rows, m.hidden, m.epsilon);
    }
    const size_t width = m.hidden * (m.kind == 0 ? sizeof(float) : sizeof(bf16));
    const auto copy = [&](void* to, const void* from, int64_t i) {
      std::memcpy(static_cast<char*>(to) + i * width, static_cast<const char*>(from) + logit_rows[i] * width, width);
    };
    team.share(logit_count, 1, [&](int64_t i) { copy(y, x, i), copy(qkv, more, i); });
    add_norm(team, m.kind, y, qkv, m.final_norm, y, logit_count, m.hidden, m.epsilon);
    multiply(team, m.head_kind, m.head, y, logits, logit_count, codes);
  });
}

}  // extern "C"
