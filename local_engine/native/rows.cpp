// What stands between products, row by row: sums, norms and gates. Oracle: local_engine/fused.py.

#include "vectors.h"

namespace {

using namespace sameway;

template <typename T>
void add_norm(T* x, const T* more, const float* weight, T* out, int rows, int width, float epsilon) {
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * width > 1 << 16)
  for (int row = 0; row < rows; ++row) {
    T* own = x + static_cast<size_t>(row) * width;
    if (more) {
      const T* added = more + static_cast<size_t>(row) * width;
      for (int i = 0; i < width; i += 16) {
        const int count = std::min(16, width - i);
        store_some(own + i, _mm512_add_ps(load_some(own + i, count), load_some(added + i, count)), count);
      }
    }
    normalise(own, weight, out + static_cast<size_t>(row) * width, width, epsilon);
  }
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
void gate(const T* gate_up, T* out, int rows, int width, bool is_gelu) {
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * width > 1 << 15)
  for (int row = 0; row < rows; ++row) {
    const T* g = gate_up + static_cast<size_t>(row) * 2 * width;
    T* o = out + static_cast<size_t>(row) * width;
    for (int i = 0; i < width; i += 16) {
      const int count = std::min(16, width - i);
      const __m512 x = load_some(g + i, count), up = load_some(g + width + i, count);
      store_some(o + i, _mm512_mul_ps(is_gelu ? gelu_gate(x) : sigmoid_gate(x), up), count);
    }
  }
}

}  // namespace

extern "C" {

void sw_add_norm(int kind, void* x, const void* more, const float* weight, void* out, int rows, int width, float epsilon) {
  BY_TYPE((add_norm(static_cast<float*>(x), static_cast<const float*>(more), weight, static_cast<float*>(out), rows, width, epsilon)),
          (add_norm(static_cast<bf16*>(x), static_cast<const bf16*>(more), weight, static_cast<bf16*>(out), rows, width, epsilon)))
}

void sw_gate(int kind, const void* gate_up, void* out, int rows, int width, int is_gelu) {
  BY_TYPE((gate(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width, is_gelu)),
          (gate(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), rows, width, is_gelu)))
}

}  // extern "C"
