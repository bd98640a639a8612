// Matrices brought into the layout that products read (matmul.cpp), once, when a model is loaded; and single rows read from it,
// because tied embeddings are held only so.
//
// Plain C functions over pointers; local_engine/kernels/cpu/__init__.py has each one's arguments.

#include "kernels.h"

namespace {

using namespace sameway;

// Four codes of a row as one number: the lane of a product.
inline uint32_t quad(const uint8_t* codes) {
  uint32_t four;
  std::memcpy(&four, codes, 4);
  return four;
}

// Input `i` of lane `lane` in a group of codes.
template <int Bits>
inline int code_at(const uint8_t* group, int lane, int i) {
  const int quad = i / 4, byte = lane * 4 + i % 4;
  if (Bits == 8) return group[quad * 64 + byte];
  const int both = group[quad % 4 * 64 + byte], four = quad < 4 ? both & 15 : both >> 4;
  return Bits == 4 ? four : four | (group[(4 + quad / 4) * 64 + byte] >> 2 * (quad % 4) & 3) << 4;
}

template <int Bits, typename T>
void take_codes(const uint8_t* panel, int lane, T* out, int columns) {
  for (int k = 0; k < columns; k += kGroup, panel += kPanel * kGroup * Bits / 8 + 4 * kPanel) {
    const auto* tail = reinterpret_cast<const uint16_t*>(panel + kPanel * kGroup * Bits / 8);
    const float first = _cvtsh_ss(tail[lane]), second = _cvtsh_ss(tail[kPanel + lane]);
    float values[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const int code = code_at<Bits>(panel, lane, i);
      values[i] = Bits == 6 ? (code - 32) * (i < 16 ? first : second) : code * first + second;
    }
    store(out + k, load(values)), store(out + k + 16, load(values + 16));
  }
}

template <typename T>
void take(const Matrix& m, int64_t row, T* out) {
  const int64_t panel = row / kPanel, groups = m.columns / kGroup;
  const int lane = row % kPanel;
  if (m.bits == 16) {
    if constexpr (sizeof(T) == 2) {
      const T* own = static_cast<const T*>(m.weight) + panel * kPanel * m.columns + 2 * lane;
      for (int i = 0; i < m.columns; i += 2) std::memcpy(out + i, own + i * kPanel, 4);
    }
    return;
  }
  const uint8_t* own = static_cast<const uint8_t*>(m.weight) + panel * groups * (kPanel * kGroup * m.bits / 8 + 4 * kPanel);
  if (m.bits == 8) take_codes<8>(own, lane, out, m.columns);
  if (m.bits == 6) take_codes<6>(own, lane, out, m.columns);
  if (m.bits == 4) take_codes<4>(own, lane, out, m.columns);
}

}  // namespace

extern "C" {

// out [rows, columns] = those rows of the matrix.
void sw_take_rows(int kind, const Matrix* m, const int64_t* ids, void* out, int rows) {
  by_type(kind, [&](auto type) {
    for (int i = 0; i < rows; ++i) take(*m, ids[i], static_cast<decltype(type)*>(out) + static_cast<int64_t>(i) * m->columns);
  });
}

// codes [rows, columns], below 1 << bits; scales and minimums of half precision [rows, columns / 32], with 6 bits scales
// [rows, columns / 16] and no minimums. Rows are filled up with zeros to whole panels.
void sw_pack(int bits, const uint8_t* codes, const uint16_t* scales, const uint16_t* leasts, uint8_t* out, int rows, int columns) {
  const int groups = columns / kGroup, panels = (rows + kPanel - 1) / kPanel;
  const int64_t code_bytes = kPanel * kGroup * bits / 8, group_bytes = code_bytes + 4 * kPanel;
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < panels; ++panel) {
    uint8_t* own = out + panel * groups * group_bytes;
    std::memset(own, 0, groups * group_bytes);
    for (int group = 0; group < groups; ++group, own += group_bytes) {
      auto* lanes = reinterpret_cast<uint32_t*>(own);
      auto* first = reinterpret_cast<uint16_t*>(own + code_bytes);
      for (int r = 0; r < kPanel && panel * kPanel + r < rows; ++r) {
        const int64_t row = panel * kPanel + r;
        const uint8_t* from = codes + row * columns + group * kGroup;
        for (int i = 0; i < 8; ++i) {
          const uint32_t four = quad(from + 4 * i);
          if (bits == 8) {
            lanes[i * kPanel + r] = four;
          } else {
            lanes[i % 4 * kPanel + r] |= (four & 0x0F0F0F0F) << (i < 4 ? 0 : 4);
            if (bits == 6) lanes[(4 + i / 4) * kPanel + r] |= (four >> 4 & 0x03030303) << (2 * (i % 4));
          }
        }
        first[r] = bits == 6 ? scales[(row * groups + group) * 2] : scales[row * groups + group];
        first[kPanel + r] = bits == 6 ? scales[(row * groups + group) * 2 + 1] : leasts[row * groups + group];
      }
    }
  }
}

// bfloat16 [rows, 2 * pairs] as pairs of inputs, 16 rows side by side: [panels, pairs, 16]. In a file's mapping a pair may lie
// at any address.
void sw_pack_pairs(const void* weight, uint32_t* out, int rows, int pairs) {
  typedef uint32_t __attribute__((may_alias, aligned(1))) pair_t;
  const int panels = (rows + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < panels; ++panel) {
    const pair_t* own = static_cast<const pair_t*>(weight) + static_cast<int64_t>(panel) * kPanel * pairs;
    uint32_t* to = out + static_cast<int64_t>(panel) * kPanel * pairs;
    const int count = rows - panel * kPanel < kPanel ? rows - panel * kPanel : kPanel;
    for (int pair = 0; pair < pairs; ++pair, to += kPanel)
      for (int r = 0; r < kPanel; ++r) to[r] = r < count ? own[static_cast<int64_t>(r) * pairs + pair] : 0;
  }
}

}  // extern "C"
