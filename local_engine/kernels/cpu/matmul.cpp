// Products of rows with a matrix whose rows lie in panels of 16: quantised to 8, 6 or 4 bits, or bfloat16.
//
// Plain C functions over pointers; local_engine/kernels/cpu/__init__.py has each one's arguments. Oracle: Quantised.dequantised.

#include "kernels.h"

#include <type_traits>

namespace {

using namespace sameway;

constexpr int kTile = 8;    // input rows that share one pass over a panel
constexpr int kAhead = 4;   // groups between what is multiplied and what is fetched: how far, is measured

// Rows first .. first + count share a pass over each panel. Their codes lie side by side, so that one pointer finds all.
struct Tile {
  int first, count;
};

inline Tile tile_of(int64_t row, int rows) {
  const int first = row / kTile * kTile;
  return {first, std::min(kTile, rows - first)};
}

template <typename T>
void quantise(const T* x, Codes* to) {
  const __m512 a = load(x), b = load(x + 16);
  const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
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

// One panel's group: 16 rows x 32 codes, four consecutive inputs of each row in a lane; then 16 scales and 16 minimums. Of 6
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

// Sums over four inputs each of a panel's rows: one for the inputs' high and one for their low halves, because neither waits
// for the other then.
struct Dot {
  __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();

  void add(__m512i quad, const Codes& x, int i) {
    high = _mm512_dpbusd_epi32(high, quad, broadcast(x.high + 4 * i));
    low = _mm512_dpbusd_epi32(low, quad, broadcast(x.low + 4 * i));
  }
  __m512 value() const { return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low)); }
};

template <int Bits, int Rows>
inline void multiply(const uint8_t* panel, const Codes* x, int columns, __m512* out) {
  constexpr int kBytes = kGroupBytes<Bits>, kCodeBytes = kPanel * kGroup * Bits / 8;
  __m512 totals[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) totals[r] = _mm512_setzero_ps();
  for (int k = 0; k < columns; k += kGroup, panel += kBytes, x += Rows) {
    if (Rows > 2)  // fewer rows go as fast as memory comes by itself
#pragma GCC unroll 9
      for (int i = 0; i < kBytes; i += 64) _mm_prefetch(panel + kAhead * kBytes + i, _MM_HINT_T0);
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + kCodeBytes)));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + kCodeBytes + 2 * kPanel)));
    if constexpr (Bits == 6) {
      __m512i quads[8];
      unpack<Bits>(panel, quads);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        Dot first, second;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) first.add(quads[i], x[r], i), second.add(quads[i + 4], x[r], i + 4);
        const __m512 unit = _mm512_set1_ps(x[r].scale);
        totals[r] = _mm512_fmadd_ps(first.value(), _mm512_mul_ps(scale, unit), totals[r]);
        totals[r] = _mm512_fmadd_ps(second.value(), _mm512_mul_ps(least, unit), totals[r]);
        totals[r] = _mm512_fnmadd_ps(scale, _mm512_set1_ps(32.0f * x[r].half), totals[r]);
        totals[r] = _mm512_fnmadd_ps(least, _mm512_set1_ps(32.0f * (x[r].sum - x[r].half)), totals[r]);
      }
    } else {
      Dot dots[Rows];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __m512i quads[2];
        if constexpr (Bits == 8) {
          quads[0] = _mm512_loadu_si512(panel + 64 * i), quads[1] = _mm512_loadu_si512(panel + 64 * (i + 4));
        } else {
          const __m512i both = _mm512_loadu_si512(panel + 64 * i), mask = _mm512_set1_epi8(0x0F);
          quads[0] = _mm512_and_si512(both, mask), quads[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) dots[r].add(quads[0], x[r], i);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) dots[r].add(quads[1], x[r], i + 4);
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        totals[r] = _mm512_fmadd_ps(dots[r].value(), _mm512_mul_ps(scale, _mm512_set1_ps(x[r].scale)), totals[r]);
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

// Where a product goes, and what is added to it.
template <typename T>
struct Result {
  T* out;
  const float* bias;
  int outputs, stride;

  void put(int panel, int row, int count, const __m512* totals) const {
    const int first = panel * kPanel, width = std::min(kPanel, outputs - first);
    const __m512 shift = bias ? load_some(bias + first, width) : _mm512_setzero_ps();
    for (int r = 0; r < count; ++r)
      store_some(out + static_cast<size_t>(row + r) * stride + first, _mm512_add_ps(totals[r], shift), width);
  }
};

template <int Bits, typename T, typename Out>
void multiply_codes(Team& team, const Matrix& m, const T* x, const Result<Out>& to, int rows, Codes* codes) {
  const int64_t groups = m.columns / kGroup, panels = (m.outputs + kPanel - 1) / kPanel;
  team.share(rows * groups, 16, [&](int64_t i) {
    const int64_t row = i / groups, group = i % groups;
    const Tile tile = tile_of(row, rows);
    quantise(x + i * kGroup, codes + tile.first * groups + group * tile.count + (row - tile.first));
  });
  team.share(panels, 1, [&](int64_t panel) {
    const uint8_t* own = static_cast<const uint8_t*>(m.weight) + panel * groups * kGroupBytes<Bits>;
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<Bits, count>(own, codes + row * groups, m.columns, totals);
      to.put(panel, row, count, totals);
    });
  });
}

template <int Bits, typename Out>
void multiply_dequantised(Team& team, const Matrix& m, const bf16* x, const Result<Out>& to, int rows) {
  static thread_local std::vector<bf16> own;
  const size_t size = static_cast<size_t>(m.columns / kGroup) * kGroupBytes<Bits>;
  team.share((m.outputs + kPanel - 1) / kPanel, 1, [&](int64_t panel) {
    const uint8_t* codes = static_cast<const uint8_t*>(m.weight) + panel * size;
    own.resize(static_cast<size_t>(m.columns) * kPanel);
    dequantise<Bits>(codes, m.columns, own.data());
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<count>(own.data(), x + static_cast<size_t>(row) * m.columns, m.columns, totals, codes + size, row ? 0 : kGroupBytes<Bits> / 8);
      to.put(panel, row, count, totals);
    });
  });
}

template <typename Out>
void multiply_pairs(Team& team, const Matrix& m, const bf16* x, const Result<Out>& to, int rows) {
  team.share((m.outputs + kPanel - 1) / kPanel, 1, [&](int64_t panel) {
    const bf16* own = static_cast<const bf16*>(m.weight) + panel * m.columns * kPanel;
    in_tiles(rows, [&](int row, auto count) {
      __m512 totals[count];
      multiply<count>(own, x + static_cast<size_t>(row) * m.columns, m.columns, totals, own + kPanel * m.columns, row ? 0 : 8 * kPanel);
      to.put(panel, row, count, totals);
    });
  });
}

template <typename T, typename Out>
void choose(Team& team, const Matrix& m, const T* x, const Result<Out>& to, int rows, Codes* codes) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (m.bits == 16) return multiply_pairs(team, m, x, to, rows);
    if (rows >= m.dequantised_from && m.bits == 6) return multiply_dequantised<6>(team, m, x, to, rows);
    if (rows >= m.dequantised_from && m.bits == 8) return multiply_dequantised<8>(team, m, x, to, rows);
    if (rows >= m.dequantised_from) return multiply_dequantised<4>(team, m, x, to, rows);
  }
  if (m.bits == 6) return multiply_codes<6>(team, m, x, to, rows, codes);
  if (m.bits == 8) return multiply_codes<8>(team, m, x, to, rows, codes);
  return multiply_codes<4>(team, m, x, to, rows, codes);
}

}  // namespace

namespace sameway {

void multiply(Team& team, int kind, const Matrix& m, const void* x, void* out, int stride, int rows, Codes* codes) {
  if (kind == 2) {
    choose(team, m, static_cast<const bf16*>(x), Result<float>{static_cast<float*>(out), m.bias, m.outputs, stride}, rows, codes);
    return;
  }
  by_type(kind, [&](auto type) {
    using T = decltype(type);
    choose(team, m, static_cast<const T*>(x), Result<T>{static_cast<T*>(out), m.bias, m.outputs, stride}, rows, codes);
  });
}

}  // namespace sameway

extern "C" {

void sw_product(int kind, const sameway::Matrix* m, const void* x, void* out, int rows) {
  using namespace sameway;
  static thread_local std::vector<Codes> own;  // of the calling thread; the others read it by this pointer
  own.resize(codes_of(*m, rows));
  Codes* codes = own.data();
  const bool is_worth_it = static_cast<int64_t>(rows) * m->columns * m->outputs > 1 << 22;  // some 50 us alone
  together(threads_if(is_worth_it), [&](Team& team) { multiply(team, kind, *m, x, out, m->outputs, rows, codes); });
}

}  // extern "C"
