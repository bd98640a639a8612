// Where a layer's K and V lie: per head (K's, then V's) blocks of tokens, in tiles of 16.
//
// A tile keeps its tokens in the order in which products read them: of K all 16 tokens' first pair of values, then their
// second ..; of V the first two tokens' values side by side, then the next two (a float is a pair by itself).

#pragma once

#include "vectors.h"

namespace sameway {

constexpr int kLanes = 16;     // tokens of a tile

struct Shape {
  int heads, kv_heads, size, block_tokens;
  int64_t blocks;
  int group() const { return heads / kv_heads; }
  int tiles() const { return (block_tokens + kLanes - 1) / kLanes; }  // of a block
  int all() const { return heads + 2 * kv_heads; }
};

template <typename T>
constexpr int kPair = 4 / sizeof(T);  // values of a 32-bit lane

template <typename T>
inline T* tile_at(T* pool, const Shape& s, int head, int64_t block, int tile) {
  return pool + ((head * s.blocks + block) * s.tiles() + tile) * kLanes * s.size;
}

inline int64_t tile_of(const Shape& s, int64_t token) {
  return token / s.block_tokens * s.tiles() + token % s.block_tokens / kLanes;
}

}  // namespace sameway
