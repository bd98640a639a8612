// The engine's hot loops for CPUs with AVX-512 VNNI: products with few rows, attention over pages, and what stands between.
//
// Plain C functions over pointers; local_engine/native/__init__.py says what each expects. The oracle of every one is torch
// code that the tests compare it with. Invariant: a row's result depends on nothing but that row: the order of its sums is
// the same in every batch, with any number of threads (products from `dequantised_from` rows on have an order of their own).

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VNNI__)
#error "this machine has no AVX-512 VNNI: the engine's torch code serves it"
#endif

namespace {

using bf16 = uint16_t;

constexpr int kPanel = 16;  // output rows that are computed together: one per 32-bit lane
constexpr int kGroup = 32;  // inputs that share a scale and a minimum
constexpr int kTile = 8;    // input rows that share one pass over a panel

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }

inline __m256i narrow(__m512 v) {  // round to nearest, ties to even
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i rounded = _mm512_srli_epi32(up, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0)));
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

// -- products ---------------------------------------------------------------------------------------------------------

// 32 inputs of a row in 15 bits: x = scale * (128 * high + low); `sum` is the scaled sum of the codes. Inputs of 8 bits, as
// others take them, cost a small model answers; the second half costs decoding nothing, which waits for memory.
struct Group {
  int8_t high[kGroup], low[kGroup];
  float scale, sum;
};

// Rows first .. first + count share a pass over each panel. Their groups lie side by side, so that one pointer finds all.
struct Tile {
  int first, count;
};

inline Tile tile_of(int row, int rows) {
  const int first = row / kTile * kTile;
  return {first, std::min(kTile, rows - first)};
}

template <typename T>
void quantise_row(const T* x, int columns, int row, int rows, Group* groups) {
  const Tile tile = tile_of(row, rows);
  Group* to = groups + static_cast<size_t>(tile.first) * (columns / kGroup) + (row - tile.first);
  for (int k = 0; k < columns; k += kGroup, to += tile.count) {
    const __m512 a = load(x + k), b = load(x + k + 16);
    const float top = std::max(_mm512_reduce_max_ps(_mm512_abs_ps(a)), _mm512_reduce_max_ps(_mm512_abs_ps(b)));
    constexpr float kTop = 127.0f * 128.0f;
    const __m512 inverse = _mm512_set1_ps(top > 0 ? kTop / top : 0.0f);
    const __m512i q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse))};
    for (int half = 0; half < 2; ++half) {
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q[half], _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(q[half], _mm512_slli_epi32(high, 7));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to->high + 16 * half), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to->low + 16 * half), _mm512_cvtepi32_epi8(low));
    }
    to->scale = std::isfinite(top) ? top / kTop : NAN;
    to->sum = to->scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(q[0], q[1])));
  }
}

// One panel's group: 16 rows x 32 codes, four consecutive inputs of each row in a lane; then 16 scales and 16 minima.
template <int Bits>
constexpr int kGroupBytes = kPanel * kGroup * Bits / 8 + 2 * 2 * kPanel;

template <int Bits>
inline void unpack(const uint8_t* from, __m512i* quads) {
  if constexpr (Bits == 8) {
    for (int i = 0; i < 8; ++i) quads[i] = _mm512_loadu_si512(from + 64 * i);
  } else {
    const __m512i low = _mm512_set1_epi8(0x0F);
    for (int i = 0; i < 4; ++i) {
      const __m512i both = _mm512_loadu_si512(from + 64 * i);
      quads[i] = _mm512_and_si512(both, low);
      quads[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  }
}

template <int Bits, int Rows>
inline void multiply(const uint8_t* panel, const Group* x, int columns, __m512* out) {
  __m512 totals[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) totals[r] = _mm512_setzero_ps();
  for (int k = 0; k < columns; k += kGroup, panel += kGroupBytes<Bits>, x += Rows) {
    __m512i quads[8];
    unpack<Bits>(panel, quads);
    const uint8_t* tail = panel + kPanel * kGroup * Bits / 8;
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail)));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail + 2 * kPanel)));
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) dot = _mm512_dpbusd_epi32(dot, quads[i], broadcast(x[r].high + 4 * i));
      dot = _mm512_slli_epi32(dot, 7);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) dot = _mm512_dpbusd_epi32(dot, quads[i], broadcast(x[r].low + 4 * i));
      totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(x[r].scale)), totals[r]);
      totals[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(x[r].sum), totals[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) out[r] = totals[r];
}

// bfloat16 weights: per pair of inputs 16 rows x 2 values. Two sums per row, so that one need not wait for the other.
inline __m512 pairs(__m512 total, __m512i weights, __m512i x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(total, (__m512bh)weights, (__m512bh)x);
#else
  const __m512i high = _mm512_set1_epi32(0xFFFF0000);
  total = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), total);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(weights, high)), _mm512_castsi512_ps(_mm512_and_si512(x, high)), total);
#endif
}

// A panel's codes as bfloat16, in the layout of bfloat16 panels: many rows are multiplied faster that way.
template <int Bits>
inline void dequantise(const uint8_t* panel, int columns, bf16* to) {
  const __m512i byte = _mm512_set1_epi32(0xFF), upper = _mm512_set1_epi32(0xFFFF0000);
  for (int k = 0; k < columns; k += kGroup, panel += kGroupBytes<Bits>) {
    __m512i quads[8];
    unpack<Bits>(panel, quads);
    const uint8_t* tail = panel + kPanel * kGroup * Bits / 8;
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail)));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail + 2 * kPanel)));
    for (int i = 0; i < 8; ++i, to += 4 * kPanel) {
      __m512i rounded[4];
      for (int j = 0; j < 4; ++j) {
        const __m512i code = _mm512_and_si512(_mm512_srl_epi32(quads[i], _mm_cvtsi32_si128(8 * j)), byte);
        const __m512i bits = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale, least));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        rounded[j] = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
      }
      for (int j = 0; j < 4; j += 2) {
        const __m512i pair = _mm512_or_si512(_mm512_srli_epi32(rounded[j], 16), _mm512_and_si512(rounded[j + 1], upper));
        _mm512_storeu_si512(to + j * kPanel, pair);
      }
    }
  }
}

template <int Rows>
inline void multiply(const bf16* panel, const bf16* x, int columns, __m512* totals) {
  __m512 even[Rows], odd[Rows];
  for (int r = 0; r < Rows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  for (int k = 0; k < columns; k += 4, panel += 4 * kPanel) {
    const __m512i first = _mm512_loadu_si512(panel), second = _mm512_loadu_si512(panel + 2 * kPanel);
    for (int r = 0; r < Rows; ++r) {
      const bf16* own = x + static_cast<size_t>(r) * columns + k;
      even[r] = pairs(even[r], first, broadcast(own));
      odd[r] = pairs(odd[r], second, broadcast(own + 2));
    }
  }
  for (int r = 0; r < Rows; ++r) totals[r] = _mm512_add_ps(even[r], odd[r]);
}

// Calls `tile(row, count)` for every tile of the rows.
template <typename F>
inline void in_tiles(int rows, F&& tile) {
  int row = 0;
  for (; row + kTile <= rows; row += kTile) tile(row, std::integral_constant<int, kTile>());
  switch (rows - row) {
    case 1: tile(row, std::integral_constant<int, 1>()); break;
    case 2: tile(row, std::integral_constant<int, 2>()); break;
    case 3: tile(row, std::integral_constant<int, 3>()); break;
    case 4: tile(row, std::integral_constant<int, 4>()); break;
    case 5: tile(row, std::integral_constant<int, 5>()); break;
    case 6: tile(row, std::integral_constant<int, 6>()); break;
    case 7: tile(row, std::integral_constant<int, 7>()); break;
  }
}

template <typename T>
inline void finish(T* out, const float* bias, int panel, int outputs, int row, int count, const __m512* totals) {
  const int first = panel * kPanel, width = std::min(kPanel, outputs - first);
  const __m512 shift = bias ? load_some(bias + first, width) : _mm512_setzero_ps();
  for (int r = 0; r < count; ++r)
    store_some(out + static_cast<size_t>(row + r) * outputs + first, _mm512_add_ps(totals[r], shift), width);
}

template <int Bits, typename T, typename Out>
void product(const T* x, const uint8_t* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  static thread_local std::vector<Group> kept;  // of the calling thread; the others read it by this pointer
  const int groups = columns / kGroup, panels = (outputs + kPanel - 1) / kPanel;
  kept.resize(static_cast<size_t>(rows) * groups);
  Group* quantised = kept.data();
#pragma omp parallel if (static_cast<int64_t>(columns) * outputs > 1 << 16)
  {
#pragma omp for schedule(static)
    for (int row = 0; row < rows; ++row)
      quantise_row(x + static_cast<size_t>(row) * columns, columns, row, rows, quantised);
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
      const uint8_t* own = weight + static_cast<size_t>(panel) * groups * kGroupBytes<Bits>;
      in_tiles(rows, [&](int row, auto count) {
        __m512 totals[count];
        multiply<Bits, count>(own, quantised + static_cast<size_t>(row) * groups, columns, totals);
        finish(out, bias, panel, outputs, row, count, totals);
      });
    }
  }
}

template <int Bits, typename Out>
void product_dequantised(const bf16* x, const uint8_t* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  const int groups = columns / kGroup, panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel
  {
    std::vector<bf16> own(static_cast<size_t>(columns) * kPanel);
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
      dequantise<Bits>(weight + static_cast<size_t>(panel) * groups * kGroupBytes<Bits>, columns, own.data());
      in_tiles(rows, [&](int row, auto count) {
        __m512 totals[count];
        multiply<count>(own.data(), x + static_cast<size_t>(row) * columns, columns, totals);
        finish(out, bias, panel, outputs, row, count, totals);
      });
    }
  }
}

template <typename Out>
void product_bf16(const bf16* x, const bf16* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  const int panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(columns) * outputs > 1 << 16)
  for (int panel = 0; panel < panels; ++panel) {
    const bf16* own = weight + static_cast<size_t>(panel) * columns * kPanel;
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<count>(own, x + static_cast<size_t>(row) * columns, columns, totals);
      finish(out, bias, panel, outputs, row, count, totals);
    });
  }
}

template <typename T, typename Out>
void choose(int bits, const T* x, const void* weight, const float* bias, Out* out, int rows, int columns, int outputs, int dequantised_from) {
  const auto* codes = static_cast<const uint8_t*>(weight);
  if constexpr (std::is_same_v<T, bf16>) {
    if (bits == 16) return product_bf16(x, static_cast<const bf16*>(weight), bias, out, rows, columns, outputs);
    if (rows >= dequantised_from && bits == 8) return product_dequantised<8>(x, codes, bias, out, rows, columns, outputs);
    if (rows >= dequantised_from) return product_dequantised<4>(x, codes, bias, out, rows, columns, outputs);
  }
  return bits == 8 ? product<8>(x, codes, bias, out, rows, columns, outputs) : product<4>(x, codes, bias, out, rows, columns, outputs);
}

// -- between products -------------------------------------------------------------------------------------------------

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

// -- attention --------------------------------------------------------------------------------------------------------

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

// `kind` of T: 0 float, 1 bfloat16.
#define BY_TYPE(call_float, call_bf16) \
  if (kind == 0) {                     \
    call_float;                        \
  } else {                             \
    call_bf16;                         \
  }

extern "C" {

// `kind` 2: bfloat16 in, float out.
void sw_product(int kind, int bits, const void* x, const void* weight, const float* bias, void* out, int rows, int columns, int outputs,
                int dequantised_from) {
  if (kind == 2) {
    choose(bits, static_cast<const bf16*>(x), weight, bias, static_cast<float*>(out), rows, columns, outputs, dequantised_from);
  } else {
    BY_TYPE(choose(bits, static_cast<const float*>(x), weight, bias, static_cast<float*>(out), rows, columns, outputs, dequantised_from),
            choose(bits, static_cast<const bf16*>(x), weight, bias, static_cast<bf16*>(out), rows, columns, outputs, dequantised_from))
  }
}

void sw_add_norm(int kind, void* x, const void* more, const float* weight, void* out, int rows, int width, float epsilon) {
  BY_TYPE((add_norm(static_cast<float*>(x), static_cast<const float*>(more), weight, static_cast<float*>(out), rows, width, epsilon)),
          (add_norm(static_cast<bf16*>(x), static_cast<const bf16*>(more), weight, static_cast<bf16*>(out), rows, width, epsilon)))
}

void sw_gate(int kind, const void* gate_up, void* out, int rows, int width, int is_gelu) {
  BY_TYPE((gate(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, width, is_gelu)),
          (gate(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), rows, width, is_gelu)))
}

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
