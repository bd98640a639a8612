// The operations between products, row by row: sums, norms and gates; and masks of logits. Oracles:
// local_engine/kernels/fused.py, local_engine/sampler.py.

#include "kernels.h"

namespace {

using namespace sameway;

constexpr int kChunk = 256;  // values of a row that one thread gates

template <typename T>
void add_norm(T* x, const T* more, const float* weight, T* out, int width, float epsilon) {
  if (more)
    for (int i = 0; i < width; i += 16) {
      const int count = std::min(16, width - i);
      store_some(x + i, _mm512_add_ps(load_some(x + i, count), load_some(more + i, count)), count);
    }
  normalise(x, weight, out, width, epsilon);
}

inline __m512 sigmoid_gate(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(88.0f)))));
}
inline __m512 gelu_gate(__m512 x) {  // x * sigmoid(2 * inner) is the tanh form
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
  const __m512 down = exponential(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), inner), _mm512_set1_ps(88.0f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), down));
}

template <typename T>
void gate(const T* gated, const T* up, T* out, int width, bool is_gelu) {
  for (int i = 0; i < width; i += 16) {
    const int count = std::min(16, width - i);
    const __m512 x = load_some(gated + i, count);
    store_some(out + i, _mm512_mul_ps(is_gelu ? gelu_gate(x) : sigmoid_gate(x), load_some(up + i, count)), count);
  }
}

// Returns the greatest value that it leaves.
float ban(float* row, const uint32_t* bits, int width) {
  const __m512 never = _mm512_set1_ps(-INFINITY);
  __m512 most = never;
  for (int at = 0; at < width; at += 16) {
    const __mmask16 here = static_cast<__mmask16>(width - at < 16 ? (1u << (width - at)) - 1 : 0xFFFF);
    const __mmask16 kept = static_cast<__mmask16>(bits[at / 32] >> at % 32) & here;
    most = _mm512_mask_max_ps(most, kept, most, _mm512_maskz_loadu_ps(kept, row + at));
    if (kept != here) _mm512_mask_storeu_ps(row + at, static_cast<__mmask16>(here & ~kept), never);
  }
  return _mm512_reduce_max_ps(most);
}

float sum_of_exponentials(const float* row, int width, float most) {
  const __m512 shift = _mm512_set1_ps(most);
  __m512 sum = _mm512_setzero_ps();
  for (int at = 0; at < width; at += 16) {
    const int count = std::min(16, width - at);
    const __m512 e = exponential(_mm512_sub_ps(load_some(row + at, count), shift));
    sum = _mm512_mask_add_ps(sum, static_cast<__mmask16>((1u << count) - 1), sum, e);
  }
  return _mm512_reduce_add_ps(sum);
}

}  // namespace

namespace sameway {

void add_norm(Team& team, int kind, void* x, const void* more, const float* weight, void* out, int rows, int width, float epsilon) {
  by_type(kind, [&](auto type) {
    using T = decltype(type);
    team.share(rows, 1, [&](int64_t row) {
      const T* added = more ? static_cast<const T*>(more) + row * width : nullptr;
      ::add_norm(static_cast<T*>(x) + row * width, added, weight, static_cast<T*>(out) + row * width, width, epsilon);
    });
  });
}

void gate(Team& team, int kind, const void* gate_up, void* out, int rows, int width, bool is_gelu) {
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  by_type(kind, [&](auto type) {
    using T = decltype(type);
    team.share(rows * chunks, 1, [&](int64_t i) {
      const int64_t row = i / chunks, from = i % chunks * kChunk;
      const T* gated = static_cast<const T*>(gate_up) + row * 2 * width + from;
      ::gate(gated, gated + width, static_cast<T*>(out) + row * width + from, std::min<int>(kChunk, width - from), is_gelu);
    });
  });
}

}  // namespace sameway

extern "C" {

void sw_add_norm(int kind, void* x, const void* more, const float* weight, void* out, int rows, int width, float epsilon) {
  sameway::together(sameway::threads_if(static_cast<int64_t>(rows) * width > 1 << 16), [&](sameway::Team& team) {
    sameway::add_norm(team, kind, x, more, weight, out, rows, width, epsilon);
  });
}

void sw_gate(int kind, const void* gate_up, void* out, int rows, int width, int is_gelu) {
  sameway::together(sameway::threads_if(static_cast<int64_t>(rows) * width > 1 << 15), [&](sameway::Team& team) {
    sameway::gate(team, kind, gate_up, out, rows, width, is_gelu);
  });
}

// Row rows[i] of `logits` [any, width] loses what is no set bit of the i-th mask, `words` words each; where `totals` are
// wanted, totals[rows[i]] is the logarithm of the sum of the exponentials of what it keeps.
void sw_ban(float* logits, const int64_t* rows, const uint32_t* bits, float* totals, int count, int width, int words) {
  sameway::together(sameway::threads_if(count > 1 && totals), [&](sameway::Team& team) {
    team.share(count, 1, [&](int64_t i) {
      float* row = logits + rows[i] * width;
      const float most = ban(row, bits + i * words, width);
      if (totals) totals[rows[i]] = most + std::log(sum_of_exponentials(row, width, most));
    });
  });
}

}  // extern "C"
