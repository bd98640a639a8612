// The functions that step.cpp calls one after the other. All threads of a team call each with the
// same arguments, and it is done for all of them when it returns. Types are numbers: 0 float, 1 bfloat16, 2 bfloat16 in and float out.

#pragma once

#include "pages.h"
#include "team.h"

#include <vector>

namespace sameway {

constexpr int kPanel = 16;  // output rows that are computed together: one per 32-bit lane
constexpr int kGroup = 32;  // inputs that share a scale and a minimum

// A matrix in panels (weights.cpp), of codes of so many bits or bfloat16 (16); __init__.py has the same.
struct Matrix {
  const void* weight;
  const float* bias;
  int32_t bits, columns, outputs, dequantised_from;  // rows from which codes are multiplied panel by panel in bfloat16
};

// 32 inputs of a row in 15 bits: x = scale * (128 * high + low); `sum` is the scaled sum of the codes, `half` that of the
// first 16. Inputs of 8 bits, as others take them, cost a small model answers; the second half costs decoding nothing,
// which waits for memory.
struct Codes {
  int8_t high[kGroup], low[kGroup];
  float scale, sum, half;
};

inline size_t codes_of(const Matrix& m, int rows) { return m.bits == 16 ? 0 : static_cast<size_t>(rows) * (m.columns / kGroup); }

// out [rows, stride] from its first column on = x [rows, columns] m^T + bias; `codes` has room for codes_of(m, rows).
void multiply(Team& team, int kind, const Matrix& m, const void* x, void* out, int stride, int rows, Codes* codes);

// x += more, where there is any; out = x / rms(x) * weight. `out` may be x.
void add_norm(Team& team, int kind, void* x, const void* more, const float* weight, void* out, int rows, int width, float epsilon);

// activation(gate) * up of rows of gate and up side by side.
void gate(Team& team, int kind, const void* gate_up, void* out, int rows, int width, bool is_gelu);

// q and k of qkv [rows, heads + 2 kv_heads, size] normalised (where there are weights) and rotated
// in place, k and v stored.
void rotate_write(Team& team, int kind, void* qkv, const float* qk_norm, float epsilon, const void* cos, const void* sin,
                  const int64_t* positions, const int64_t* slots, void* pool, int rows, const Shape& shape);

// The blocks of rows: blocks tables[starts[row]] .., up to position positions[row], at most `window` tokens where that is not 0.
struct Sights {
  const int64_t *tables, *starts, *positions;
  int64_t window;
  Shape shape;
};

// One thread's task: rows that share a span, or consecutive rows of one sequence with all of their
// spans.
struct Task {
  int row, rows, kv, span;
};

// How a step's rows are shared out: the same for all layers of a window.
struct Plan {
  std::vector<Task> tasks;
  std::vector<int> few;        // rows whose spans are tasks of their own
  std::vector<int64_t> parts;  // where each one's parts begin: [spans, heads]
  std::vector<float> workspace;
};
void plan(const Sights& sights, int rows, Plan& to);

void attend(Team& team, int kind, const Sights& sights, Plan& plan, const void* qkv, const void* pool, float scale, float cap, void* out);

}  // namespace sameway
