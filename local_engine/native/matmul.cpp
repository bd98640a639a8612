// Products of rows with a matrix whose rows lie in panels of 16: quantised to 8, 6 or 4 bits, or bfloat16.
//
// Plain C functions over pointers; local_engine/native/__init__.py says what each expects. Oracle: Quantised.dequantised.

#include "vectors.h"

#include <type_traits>
#include <vector>

namespace {

using namespace sameway;

constexpr int kPanel = 16;  // output rows that are computed together: one per 32-bit lane
constexpr int kGroup = 32;  // inputs that share a scale and a minimum
constexpr int kTile = 8;    // input rows that share one pass over a panel

// 32 inputs of a row in 15 bits: x = scale * (128 * high + low); `sum` is the scaled sum of the codes, `half` that of the
// first 16. Inputs of 8 bits, as
// others take them, cost a small model answers; the second half costs decoding nothing, which waits for memory.
struct Group {
  int8_t high[kGroup], low[kGroup];
  float scale, sum, half;
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
    const bool has_nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;  // a maximum forgets them
    to->scale = std::isfinite(top) && !has_nan ? top / kTop : NAN;
    to->half = to->scale * static_cast<float>(_mm512_reduce_add_epi32(q[0]));
    to->sum = to->scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(q[0], q[1])));
  }
}

// One panel's group: 16 rows x 32 codes, four consecutive inputs of each row in a lane; then 16 scales and 16 minima. Of 6
// bits the lower four lie as 4-bit codes do, the upper two of four lanes' bytes in one; then 16 scales for the first 16
// inputs and 16 for the others: the minimum is -32 times the scale.
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
    if constexpr (Bits == 6) {
      const __m512i upper = _mm512_set1_epi8(0x30);
      for (int i = 0; i < 8; i += 4) {
        const __m512i four = _mm512_loadu_si512(from + 64 * (4 + i / 4));
        quads[i] = _mm512_or_si512(quads[i], _mm512_and_si512(_mm512_slli_epi16(four, 4), upper));
        quads[i + 1] = _mm512_or_si512(quads[i + 1], _mm512_and_si512(_mm512_slli_epi16(four, 2), upper));
        quads[i + 2] = _mm512_or_si512(quads[i + 2], _mm512_and_si512(four, upper));
        quads[i + 3] = _mm512_or_si512(quads[i + 3], _mm512_and_si512(_mm512_srli_epi16(four, 2), upper));
      }
    }
  }
}

// The codes First .. Last of a group times those of a row.
template <int First, int Last>
inline __m512i dot_of(const __m512i* quads, const Group& x) {
  __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = First; i < Last; ++i) dot = _mm512_dpbusd_epi32(dot, quads[i], broadcast(x.high + 4 * i));
  dot = _mm512_slli_epi32(dot, 7);
#pragma GCC unroll 8
  for (int i = First; i < Last; ++i) dot = _mm512_dpbusd_epi32(dot, quads[i], broadcast(x.low + 4 * i));
  return dot;
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
      const __m512 unit = _mm512_set1_ps(x[r].scale);
      if constexpr (Bits == 6) {
        totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot_of<0, 4>(quads, x[r])), _mm512_mul_ps(scale, unit), totals[r]);
        totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot_of<4, 8>(quads, x[r])), _mm512_mul_ps(least, unit), totals[r]);
        totals[r] = _mm512_fnmadd_ps(scale, _mm512_set1_ps(32.0f * x[r].half), totals[r]);
        totals[r] = _mm512_fnmadd_ps(least, _mm512_set1_ps(32.0f * (x[r].sum - x[r].half)), totals[r]);
      } else {
        totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot_of<0, 8>(quads, x[r])), _mm512_mul_ps(scale, unit), totals[r]);
        totals[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(x[r].sum), totals[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) out[r] = totals[r];
}

// A panel's codes as bfloat16, in the layout of bfloat16 panels: many rows are multiplied faster that way.
template <int Bits>
inline void dequantise(const uint8_t* panel, int columns, bf16* to) {
  __m512i byte[4];  // the orders that put each lane's i-th byte alone into it
  for (int i = 0; i < 4; ++i)
    byte[i] = _mm512_add_epi32(_mm512_set1_epi32(0x80808000 + i), _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12)));
  for (int k = 0; k < columns; k += kGroup, panel += kGroupBytes<Bits>) {
    __m512i quads[8];
    unpack<Bits>(panel, quads);
    const uint8_t* tail = panel + kPanel * kGroup * Bits / 8;
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail)));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail + 2 * kPanel)));
    for (int i = 0; i < 8; ++i, to += 4 * kPanel) {
      const __m512 factor = Bits == 6 && i >= 4 ? least : scale;
      const __m512 shift = Bits == 6 ? _mm512_mul_ps(factor, _mm512_set1_ps(-32.0f)) : least;
      __m512 values[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        values[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(quads[i], byte[j])), factor, shift);
      _mm512_storeu_si512(to, paired(values[0], values[1]));
      _mm512_storeu_si512(to + 2 * kPanel, paired(values[2], values[3]));
    }
  }
}

// bfloat16 weights: per pair of inputs 16 rows x 2 values. Two sums per row, so that one need not wait for the other.
// `next` is fetched meanwhile, `bytes` of it for four inputs.
template <int Rows>
inline void multiply(const bf16* panel, const bf16* x, int columns, __m512* totals, const void* next, int bytes) {
  const char* ahead = static_cast<const char*>(next);
  __m512 even[Rows], odd[Rows];
  for (int r = 0; r < Rows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  for (int k = 0; k < columns; k += 4, panel += 4 * kPanel, ahead += bytes) {
    if (bytes) _mm_prefetch(ahead, _MM_HINT_T1);
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

// To wake threads that sleep costs some 50 us: as long as this product takes alone.
inline bool wants_threads(int rows, int columns, int outputs) { return static_cast<int64_t>(rows) * columns * outputs > 1 << 22; }

template <int Bits, typename T, typename Out>
void product(const T* x, const uint8_t* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  static thread_local std::vector<Group> kept;  // of the calling thread; the others read it by this pointer
  const int groups = columns / kGroup, panels = (outputs + kPanel - 1) / kPanel;
  kept.resize(static_cast<size_t>(rows) * groups);
  Group* quantised = kept.data();
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * columns > 1 << 17)
  for (int row = 0; row < rows; ++row)
    quantise_row(x + static_cast<size_t>(row) * columns, columns, row, rows, quantised);
#pragma omp parallel for schedule(static) if (wants_threads(rows, columns, outputs))
  for (int panel = 0; panel < panels; ++panel) {
    const uint8_t* own = weight + static_cast<size_t>(panel) * groups * kGroupBytes<Bits>;
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<Bits, count>(own, quantised + static_cast<size_t>(row) * groups, columns, totals);
      finish(out, bias, panel, outputs, row, count, totals);
    });
  }
}

template <int Bits, typename Out>
void product_dequantised(const bf16* x, const uint8_t* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  const int panels = (outputs + kPanel - 1) / kPanel;
  const size_t size = static_cast<size_t>(columns / kGroup) * kGroupBytes<Bits>;
#pragma omp parallel
  {
    std::vector<bf16> own(static_cast<size_t>(columns) * kPanel);
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
      const uint8_t* codes = weight + panel * size;
      dequantise<Bits>(codes, columns, own.data());
      in_tiles(rows, [&](int row, auto count) {
        __m512 totals[count];
        multiply<count>(own.data(), x + static_cast<size_t>(row) * columns, columns, totals, codes + size, row ? 0 : kGroupBytes<Bits> / 8);
        finish(out, bias, panel, outputs, row, count, totals);
      });
    }
  }
}

template <typename Out>
void product_bf16(const bf16* x, const bf16* weight, const float* bias, Out* out, int rows, int columns, int outputs) {
  const int panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static) if (wants_threads(rows, columns, outputs))
  for (int panel = 0; panel < panels; ++panel) {
    const bf16* own = weight + static_cast<size_t>(panel) * columns * kPanel;
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<count>(own, x + static_cast<size_t>(row) * columns, columns, totals, own + kPanel * columns, row ? 0 : 8 * kPanel);
      finish(out, bias, panel, outputs, row, count, totals);
    });
  }
}

template <typename T, typename Out>
void choose(int bits, const T* x, const void* weight, const float* bias, Out* out, int rows, int columns, int outputs, int dequantised_from) {
  const auto* codes = static_cast<const uint8_t*>(weight);
  if constexpr (std::is_same_v<T, bf16>) {
    if (bits == 16) return product_bf16(x, static_cast<const bf16*>(weight), bias, out, rows, columns, outputs);
    if (rows >= dequantised_from && bits == 6) return product_dequantised<6>(x, codes, bias, out, rows, columns, outputs);
    if (rows >= dequantised_from && bits == 8) return product_dequantised<8>(x, codes, bias, out, rows, columns, outputs);
    if (rows >= dequantised_from) return product_dequantised<4>(x, codes, bias, out, rows, columns, outputs);
  }
  if (bits == 6) return product<6>(x, codes, bias, out, rows, columns, outputs);
  return bits == 8 ? product<8>(x, codes, bias, out, rows, columns, outputs) : product<4>(x, codes, bias, out, rows, columns, outputs);
}

}  // namespace

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

}  // extern "C"
