// What a step adds to the pages: q and k normalised and rotated, k and v written. Oracle: local_engine/models/decoder.py.

#include "pages.h"

namespace {

using namespace sameway;

inline void put_values(const float* from, float* tile, int lane, int size) { std::memcpy(tile + lane * size, from, size * sizeof(float)); }
inline void put_values(const bf16* from, bf16* tile, int lane, int size) {
  bf16* to = tile + lane / 2 * 2 * size;
  for (int i = 0; i < size; i += 16) {
    const int count = std::min(16, size - i);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << count) - 1, from + i));
    const __mmask32 own = (lane % 2 ? 0xAAAAAAAAu : 0x55555555u) & static_cast<__mmask32>((1ull << 2 * count) - 1);
    _mm512_mask_storeu_epi16(to + 2 * i, own, lane % 2 ? _mm512_slli_epi32(wide, 16) : wide);
  }
}

// Normalise (where there are weights), rotate and remember: q and k of `qkv` in place, k and v into the pool.
template <typename T>
void rotate_write(T* qkv, const float* qk_norm, float epsilon, const T* cos, const T* sin, const int64_t* positions,
                  const int64_t* slots, T* pool, int rows, const Shape& s) {
  const int half = s.size / 2;
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * s.all() * s.size > 1 << 15)
  for (int row = 0; row < rows; ++row) {
    T* own = qkv + static_cast<int64_t>(row) * s.all() * s.size;
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
    const int64_t block = slots[row] / s.block_tokens;
    const int token = slots[row] % s.block_tokens, tile = token / kLanes, lane = token % kLanes;
    for (int head = 0; head < s.kv_heads; ++head) {
      const T *key = own + (s.heads + head) * s.size, *value = key + s.kv_heads * s.size;
      T* keys = tile_at(pool, s, head, block, tile);
      for (int i = 0; i < s.size; i += kPair<T>) std::memcpy(keys + i * kLanes + lane * kPair<T>, key + i, 4);
      put_values(value, tile_at(pool, s, s.kv_heads + head, block, tile), lane, s.size);
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

}  // extern "C"
