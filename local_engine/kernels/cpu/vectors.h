// Shared by the kernels: vectors of 16 floats, loaded from and stored to float and bfloat16, e^x of
// them, and the norm of a row.
//
// Invariant of all kernels: a row's result depends on nothing but that row: the order of its sums is the same in every
// batch, with any number of threads (products from `dequantised_from` rows on have an order of their own).

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VNNI__)
#error "this machine has no AVX-512 VNNI: the engine's torch code serves it"
#endif

namespace sameway {

using bf16 = uint16_t;

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }

inline __m256i narrow(__m512 v) {  // round to nearest, ties to even
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i rounded = _mm512_srli_epi32(up, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0)));
#endif
}
inline void store(bf16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

inline __m512 load_some(const float* p, int count) { return _mm512_maskz_loadu_ps((1u << count) - 1, p); }
inline __m512 load_some(const bf16* p, int count) { return widen(_mm256_maskz_loadu_epi16((1u << count) - 1, p)); }
inline void store_some(float* p, __m512 v, int count) { _mm512_mask_storeu_ps(p, (1u << count) - 1, v); }
inline void store_some(bf16* p, __m512 v, int count) { _mm256_mask_storeu_epi16(p, (1u << count) - 1, narrow(v)); }

inline __m512 exponential(__m512 x) {  // e^x to float's precision; below -87 it is 0
  const __m512 clamped = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Four bytes in every lane, straight from memory: a detour over an integer register costs as much as a product.
inline __m512i broadcast(const void* p) {
  typedef int32_t __attribute__((may_alias, aligned(1))) any;
  return _mm512_set1_epi32(*static_cast<const any*>(p));
}

// The two floats of each lane as bfloat16, side by side in it.
inline __m512i paired(__m512 first, __m512 second) {
  const __m512i order = _mm512_or_si512(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm512_slli_epi32(_mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31), 16));
#ifdef __AVX512BF16__
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(first)), narrow(second), 1);
  return _mm512_permutexvar_epi16(order, both);
#endif
}

// total + the products of pairs of bfloat16, both of a lane.
inline __m512 pairs(__m512 total, __m512i weights, __m512i x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(total, (__m512bh)weights, (__m512bh)x);
#else
  const __m512i high = _mm512_set1_epi32(0xFFFF0000);
  total = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), total);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(weights, high)), _mm512_castsi512_ps(_mm512_and_si512(x, high)), total);
#endif
}

// out = x / rms(x) * weight, in float.
template <typename T>
inline void normalise(const T* x, const float* weight, T* out, int width, float epsilon) {
  __m512 squares = _mm512_setzero_ps();
  int i = 0;
  for (; i + 16 <= width; i += 16) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
  if (i < width) {
    const __m512 rest = load_some(x + i, width - i);
    squares = _mm512_fmadd_ps(rest, rest, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(width) + epsilon));
  for (i = 0; i < width; i += 16) {
    const int count = std::min(16, width - i);
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(load_some(x + i, count), scale), load_some(weight + i, count));
    store_some(out + i, y, count);
  }
}

// Calls work with a value of the type that `kind` stands for: 0 float, else bfloat16.
template <typename F>
inline void by_type(int kind, F&& work) {
  kind == 0 ? work(float()) : work(bf16());
}

}  // namespace sameway
