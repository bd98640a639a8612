// A step's KV into the pages: q and k normalised and rotated, k and v written. Oracle: TorchKV in
// local_engine/attention.py.

#include "kernels.h"

namespace {

using namespace sameway;

template <typename T>
void rotate(T* head, const float* norm, float epsilon, const T* cos, const T* sin, int size) {
  const int half = size / 2;
  if (norm) normalise(head, norm, head, size, epsilon);
  for (int i = 0; i < half; i += 16) {
    const int count = std::min(16, half - i);
    const __m512 a = load_some(head + i, count), b = load_some(head + half + i, count);
    const __m512 low = _mm512_fmadd_ps(b, load_some(sin + i, count), _mm512_mul_ps(a, load_some(cos + i, count)));
    const __m512 high = _mm512_fmadd_ps(a, load_some(sin + half + i, count), _mm512_mul_ps(b, load_some(cos + half + i, count)));
    store_some(head + i, low, count);
    store_some(head + half + i, high, count);
  }
}

template <typename T>
inline void put_key(const T* from, T* tile, int lane, int size) {
  for (int i = 0; i < size; i += kPair<T>) std::memcpy(tile + i * kLanes + lane * kPair<T>, from + i, 4);
}

inline void put_value(const float* from, float* tile, int lane, int size) { std::memcpy(tile + lane * size, from, size * sizeof(float)); }
inline void put_value(const bf16* from, bf16* tile, int lane, int size) {
  bf16* to = tile + lane / 2 * 2 * size;
  for (int i = 0; i < size; i += 16) {
    const int count = std::min(16, size - i);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << count) - 1, from + i));
    const __mmask32 own = (lane % 2 ? 0xAAAAAAAAu : 0x55555555u) & static_cast<__mmask32>((1ull << 2 * count) - 1);
    _mm512_mask_storeu_epi16(to + 2 * i, own, lane % 2 ? _mm512_slli_epi32(wide, 16) : wide);
  }
}

}  // namespace

namespace sameway {

void rotate_write(Team& team, int kind, void* qkv, const float* qk_norm, float epsilon, const void* cos, const void* sin,
                  const int64_t* positions, const int64_t* slots, void* pool, int rows, const Shape& s) {
  const int turned = s.heads + s.kv_heads;
  by_type(kind, [&](auto type) {
    using T = decltype(type);
    team.share(static_cast<int64_t>(rows) * s.all(), 4, [&](int64_t i) {
      const int64_t row = i / s.all(), head = i % s.all(), angle = positions[row] * s.size;
      T* own = static_cast<T*>(qkv) + i * s.size;
      if (head < turned)
        rotate(own, qk_norm ? qk_norm + head * s.size : nullptr, epsilon, static_cast<const T*>(cos) + angle,
               static_cast<const T*>(sin) + angle, s.size);
      if (head < s.heads) return;
      const int token = slots[row] % s.block_tokens, lane = token % kLanes;
      T* tile = tile_at(static_cast<T*>(pool), s, head - s.heads, slots[row] / s.block_tokens, token / kLanes);
      head < turned ? put_key(own, tile, lane, s.size) : put_value(own, tile, lane, s.size);
    });
  });
}

}  // namespace sameway

extern "C" {

void sw_rotate_write(int kind, void* qkv, const float* qk_norm, float epsilon, const void* cos, const void* sin, const int64_t* positions,
                     const int64_t* slots, void* pool, int rows, int heads, int kv_heads, int size, int block_tokens, int64_t blocks) {
  using namespace sameway;
  const Shape s{heads, kv_heads, size, block_tokens, blocks};
  together(threads_if(static_cast<int64_t>(rows) * s.all() * size > 1 << 15), [&](Team& team) {
    rotate_write(team, kind, qkv, qk_norm, epsilon, cos, sin, positions, slots, pool, rows, s);
  });
}

}  // extern "C"
