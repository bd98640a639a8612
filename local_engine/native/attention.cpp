// Attention over pages: rotate and remember what is new, look back at all. Oracle: local_engine/attention.py.

#include "vectors.h"

#include <vector>

namespace {

using namespace sameway;

struct Shape {
  int heads, kv_heads, size, block_tokens;
  int64_t blocks;
};

// Normalise (where there are weights), rotate and remember: q and k of `qkv` in place, k and v into the pool.
template <typename T>
void rotate_write(T* qkv, const float* qk_norm, float epsilon, const T* cos, const T* sin, const int64_t* positions,
                  const int64_t* slots, T* pool, int rows, const Shape& s) {
  const int half = s.size / 2, all = s.heads + 2 * s.kv_heads;
  const int64_t head_stride = s.blocks * s.block_tokens * s.size;
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * all * s.size > 1 << 15)
  for (int row = 0; row < rows; ++row) {
    T* own = qkv + static_cast<int64_t>(row) * all * s.size;
    const T *c = cos + positions[row] * s.size, *n = sin + positions[row] * s.size;
    for (int head = 0; head < s.heads + s.kv_heads; ++head) {
      T* h = own + head * s.size;
      if (qk_norm) normalise(h, qk_norm + head * s.size, h, s.size, epsilon);
      for (int i = 0; i < half; i += 16) {
        const int count = std::min(16, half - i);
        const __m512 a = load_some(h + i, count), b = load_some(h + half + i, count);
        const __m512 low = _mm512_fmadd_ps(b, load_some(n + i, count), _mm512_mul_ps(a, load_some(c + i, count)));
        const __m512 high = _mm512_fmadd_ps(a, load_some(n + half + i, count), _mm512_mul_ps(b, load_some(c + half + i, count)));
        store_some(h + i, low, count);
        store_some(h + half + i, high, count);
      }
    }
    for (int head = 0; head < 2 * s.kv_heads; ++head)  // k, then v: the pool's order
      std::memcpy(pool + head * head_stride + slots[row] * s.size, own + (s.heads + head) * s.size, s.size * sizeof(T));
  }
}

// One query head of one row over the tokens first .. stop of its blocks.
template <typename T>
void attend_one(const T* query, const T* keys, const T* values, const int64_t* blocks, int64_t first, int64_t stop, float scale,
                float cap, T* out, const Shape& s, std::vector<float>& scores) {
  const int64_t count = stop - first, padded = (count + 15) / 16 * 16;
  if (static_cast<int64_t>(scores.size()) < padded) scores.resize(padded);
  const int parts = (s.size + 15) / 16;
  __m512 q[16], total[16];
  auto width = [&](int part) { return std::min(16, s.size - 16 * part); };
  for (int part = 0; part < parts; ++part) {
    q[part] = load_some(query + 16 * part, width(part));
    total[part] = _mm512_setzero_ps();
  }
  auto place = [&](int64_t token) { return (blocks[token / s.block_tokens] * s.block_tokens + token % s.block_tokens) * s.size; };
  for (int64_t token = 0; token < count; ++token) {
    const T* key = keys + place(first + token);
    __m512 dot = _mm512_setzero_ps();
    for (int part = 0; part < parts; ++part) dot = _mm512_fmadd_ps(q[part], load_some(key + 16 * part, width(part)), dot);
    scores[token] = _mm512_reduce_add_ps(dot) * scale;
  }
  if (cap > 0)
    for (int64_t token = 0; token < count; ++token) scores[token] = cap * std::tanh(scores[token] / cap);
  const float top = *std::max_element(scores.begin(), scores.begin() + count);
  std::fill(scores.begin() + count, scores.begin() + padded, -INFINITY);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t token = 0; token < padded; token += 16) {
    const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(&scores[token]), _mm512_set1_ps(top)));
    _mm512_storeu_ps(&scores[token], e);
    sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(count - token >= 16 ? 0xFFFF : (1u << (count - token)) - 1, e));
  }
  const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int64_t token = 0; token < count; ++token) {
    const T* value = values + place(first + token);
    const __m512 weight = _mm512_set1_ps(scores[token]);
    for (int part = 0; part < parts; ++part) total[part] = _mm512_fmadd_ps(weight, load_some(value + 16 * part, width(part)), total[part]);
  }
  for (int part = 0; part < parts; ++part) store_some(out + 16 * part, _mm512_mul_ps(total[part], share), width(part));
}

// Rows each of which sees the tokens up to its own position, at most `window` of them where that is not 0.
template <typename T>
void attend(const T* qkv, const T* pool, const int64_t* tables, const int64_t* table_starts, const int64_t* positions, int64_t window,
            float scale, float cap, T* out, int rows, int64_t work, const Shape& s) {
  const int64_t head_stride = s.blocks * s.block_tokens * s.size;
  const int group = s.heads / s.kv_heads, all = s.heads + 2 * s.kv_heads;
#pragma omp parallel if (work > 1 << 14)
  {
    std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic)
    for (int row = 0; row < rows; ++row)
      for (int kv = 0; kv < s.kv_heads; ++kv) {
        const int64_t stop = positions[row] + 1, first = window > 0 ? std::max<int64_t>(0, stop - window) : 0;
        for (int head = kv * group; head < (kv + 1) * group; ++head)
          attend_one(qkv + (static_cast<int64_t>(row) * all + head) * s.size, pool + kv * head_stride,
                     pool + (s.kv_heads + kv) * head_stride, tables + table_starts[row], first, stop, scale, cap,
                     out + (static_cast<int64_t>(row) * s.heads + head) * s.size, s, scores);
      }
  }
}

}  // namespace

extern "C" {

void sw_rotate_write(int kind, void* qkv, const float* qk_norm, float epsilon, const void* cos, const void* sin, const int64_t* positions,
                     const int64_t* slots, void* pool, int rows, int heads, int kv_heads, int size, int block_tokens, int64_t blocks) {
  const Shape s{heads, kv_heads, size, block_tokens, blocks};
  BY_TYPE((rotate_write(static_cast<float*>(qkv), qk_norm, epsilon, static_cast<const float*>(cos), static_cast<const float*>(sin),
                        positions, slots, static_cast<float*>(pool), rows, s)),
          (rotate_write(static_cast<bf16*>(qkv), qk_norm, epsilon, static_cast<const bf16*>(cos), static_cast<const bf16*>(sin),
                        positions, slots, static_cast<bf16*>(pool), rows, s)))
}

void sw_attend(int kind, const void* qkv, const void* pool, const int64_t* tables, const int64_t* table_starts, const int64_t* positions,
               int64_t window, float scale, float cap, void* out, int rows, int64_t work, int heads, int kv_heads, int size,
               int block_tokens, int64_t blocks) {
  const Shape s{heads, kv_heads, size, block_tokens, blocks};
  BY_TYPE((attend(static_cast<const float*>(qkv), static_cast<const float*>(pool), tables, table_starts, positions, window, scale, cap,
                  static_cast<float*>(out), rows, work, s)),
          (attend(static_cast<const bf16*>(qkv), static_cast<const bf16*>(pool), tables, table_starts, positions, window, scale, cap,
                  static_cast<bf16*>(out), rows, work, s)))
}

}  // extern "C"
