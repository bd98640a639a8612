// Attention over pages (pages.h). Oracle: local_engine/attention.py.
//
// The tokens that a row sees are cut into spans of kSpan tiles, counted from its sequence's start. Each span gives
// a part: greatest score, sum of weights, weighted sum of V (arXiv:2205.14135); a row's parts are merged in order, so that
// its result is the same to the last bit however rows and spans are shared out. Rows that have the same blocks in a span
// look at it together, whichever sequences they belong to (the shared prefix of arXiv:2402.05099).

#include "kernels.h"

namespace {

using namespace sameway;

constexpr int kSpan = 16;      // tiles of a span
constexpr int kQueries = 8;    // queries that are multiplied together
constexpr int kSizeMax = 256;  // of a head
constexpr int kManyQueries = 32;
constexpr float kNothing = -1e30f;  // the greatest score where nothing is seen: finite, so that differences are numbers
constexpr float kLog2E = 1.44269504f;
constexpr int kAllSpans = -1;

inline int part_floats(const Shape& s) { return (s.size + 15) / 16 * 16 + 16; }  // greatest score, sum, then from 16 on values

inline __m512 accumulate(__m512 total, __m512i a, __m512i b, const bf16*) { return pairs(total, a, b); }
inline __m512 accumulate(__m512 total, __m512i a, __m512i b, const float*) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), total);
}

inline __m512 power_of_2(__m512 x) {  // to float's precision; exact at 0, and 0 from -200 down
  x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
  const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32647317e-3f);
  for (float c : {9.67151271e-3f, 5.55073373e-2f, 2.40222421e-1f, 6.93146978e-1f, 1.0f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}
inline float power_of_2(float x) { return _mm512_cvtss_f32(power_of_2(_mm512_set1_ps(x))); }

// A row's tokens: first .. last.
struct Sight {
  int64_t first, last;
};

// A tile: its keys and values, the token of its first lane, how many of its lanes are tokens.
template <typename T>
struct Tile {
  const T *keys, *values;
  int64_t token;
  int count;
};

template <typename T>
struct Scratch {
  alignas(64) float scores[kQueries][kSpan * kLanes];
  alignas(64) T weights[kQueries][kSpan * kLanes];
  alignas(64) T queries[kQueries * kSizeMax];
  Sight sights[kQueries];
  float* parts[kQueries];
  Tile<T> tiles[kSpan + 4];  // and what to fetch after their keys: the first values
};

// Scores of R queries with the tokens of N tiles from `at` on.
template <int R, int N, typename T>
inline void score(Scratch<T>& own, int at, int size) {
  __m512 totals[R][N];
  for (auto& row : totals)
    for (auto& total : row) total = _mm512_setzero_ps();
  for (int i = 0; i < size; i += kPair<T>) {
    __m512i keys[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      keys[n] = _mm512_loadu_si512(own.tiles[at + n].keys + i * kLanes);
      _mm_prefetch(own.tiles[at + N + n].keys + i * kLanes, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i query = broadcast(own.queries + r * size + i);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[r][n] = accumulate(totals[r][n], keys[n], query, own.queries);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) _mm512_store_ps(own.scores[r] + (at + n) * kLanes, totals[r][n]);
}

// Sums of N vectors of values from `at` on, weighted for each of R queries, over `tiles` tiles.
template <int R, int N, typename T>
inline void weigh(const Scratch<T>& own, int tiles, int at, const Shape& s) {
  const __mmask16 whole = 0xFFFF, last = at + 16 * N > s.size ? (1u << (s.size - at - 16 * (N - 1))) - 1 : whole;
  __m512 totals[R][N];
  for (auto& row : totals)
    for (auto& total : row) total = _mm512_setzero_ps();
  for (int tile = 0; tile < tiles; ++tile)
    for (int lane = 0; lane < kLanes; lane += kPair<T>) {
      __m512i values[N];
      const T* next = own.tiles[std::min(tile + 4, tiles - 1)].values + lane * s.size + at * kPair<T>;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        _mm_prefetch(next + 16 * n * kPair<T>, _MM_HINT_T0);
        values[n] = _mm512_maskz_loadu_epi32(n + 1 == N ? last : whole, own.tiles[tile].values + lane * s.size + (at + 16 * n) * kPair<T>);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i weight = broadcast(own.weights[r] + tile * kLanes + lane);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) totals[r][n] = accumulate(totals[r][n], values[n], weight, own.weights[r]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(own.parts[r] + 16 + at + 16 * n, totals[r][n]);
}

// Scores to weights: 2 to the power of how far each is below the greatest; what the query does not see weighs nothing.
template <typename T>
void soften(Scratch<T>& own, int query, int tiles, float scale, float cap) {
  float* scores = own.scores[query];
  const Sight& sight = own.sights[query];
  const __m512 lanes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 top = _mm512_set1_ps(kNothing);
  __mmask16 nans = 0;  // maxima forget them
  for (int i = 0; i < tiles; ++i) {
    const Tile<T>& tile = own.tiles[i];
    __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + i * kLanes), _mm512_set1_ps(scale));
    __mmask16 broken = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    if (cap > 0) {  // cap * tanh(x / cap) = cap - 2 * cap / (1 + e^(2x / cap)); `scale` has log2(e) in it, and so has the result
      const __m512 e = power_of_2(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(2 / cap)), _mm512_set1_ps(120.0f)));
      const __m512 bound = _mm512_set1_ps(cap * kLog2E);
      x = _mm512_sub_ps(bound, _mm512_div_ps(_mm512_add_ps(bound, bound), _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
    }
    if (sight.first > tile.token || sight.last < tile.token + kLanes - 1 || tile.count < kLanes) {
      const float from = static_cast<float>(std::clamp<int64_t>(sight.first - tile.token, 0, kLanes));
      const float to = static_cast<float>(std::clamp<int64_t>(sight.last - tile.token + 1, 0, tile.count));
      const __mmask16 seen = _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(from), _CMP_GE_OQ) & _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(to), _CMP_LT_OQ);
      x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
      broken &= seen;
    }
    nans |= broken;
    top = _mm512_max_ps(x, top);
    _mm512_store_ps(scores + i * kLanes, x);
  }
  float* part = own.parts[query];
  part[0] = _mm512_reduce_max_ps(top);
  top = _mm512_set1_ps(part[0]);
  __m512 sum = _mm512_set1_ps(nans ? NAN : 0.0f);
  for (int i = 0; i < tiles; ++i) {
    const __m512 weight = power_of_2(_mm512_sub_ps(_mm512_load_ps(scores + i * kLanes), top));
    sum = _mm512_add_ps(sum, weight);
    store(own.weights[query] + i * kLanes, weight);
  }
  part[1] = _mm512_reduce_add_ps(sum);
}

// One span's parts of R queries.
template <int R, typename T>
void look(Scratch<T>& own, int tiles, float scale, float cap, const Shape& s) {
  constexpr int N = R > 4 ? 2 : 4;
  int at = 0;
  for (; at + N <= tiles; at += N) score<R, N>(own, at, s.size);
  for (; at < tiles; ++at) score<R, 1>(own, at, s.size);
  for (int r = 0; r < R; ++r) soften(own, r, tiles, scale * kLog2E, cap);
  for (at = 0; at + 16 * (N - 1) < s.size; at += 16 * N) weigh<R, N>(own, tiles, at, s);
  for (; at < s.size; at += 16) weigh<R, 1>(own, tiles, at, s);
}

// total = total and part together.
inline void merge(float* total, const float* part, const Shape& s) {
  const float top = std::max(total[0], part[0]), a = power_of_2(total[0] - top), b = power_of_2(part[0] - top);
  total[0] = top;
  total[1] = total[1] * a + part[1] * b;
  for (int i = 16; i < part_floats(s); i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(total + i), _mm512_set1_ps(a));
    _mm512_storeu_ps(total + i, _mm512_fmadd_ps(_mm512_loadu_ps(part + i), _mm512_set1_ps(b), scaled));
  }
}

template <typename T>
inline void finish(const float* total, T* out, const Shape& s) {
  const __m512 share = _mm512_set1_ps(1.0f / total[1]);
  for (int i = 0; i < s.size; i += 16) store_some(out + i, _mm512_mul_ps(_mm512_loadu_ps(total + 16 + i), share), std::min(16, s.size - i));
}

// How far rows see, in spans.
struct Reach : Sights {
  explicit Reach(const Sights& sights) : Sights(sights) {}

  Sight sight(int row) const {
    return {window > 0 ? std::max<int64_t>(0, positions[row] + 1 - window) : 0, positions[row]};
  }
  int first_span(int row) const { return tile_of(shape, sight(row).first) / kSpan; }
  int last_span(int row) const { return tile_of(shape, positions[row]) / kSpan; }

  // Whether both rows' blocks are the same, as far as they lie in that span.
  bool share(int a, int b, int span) const {
    if (starts[a] == starts[b]) return true;
    const int64_t first = span * kSpan / shape.tiles(), last = (span * kSpan + kSpan - 1) / shape.tiles();
    if (std::min(positions[a], positions[b]) / shape.block_tokens < last) return false;
    return std::memcmp(tables + starts[a] + first, tables + starts[b] + first, (last - first + 1) * sizeof(int64_t)) == 0;
  }
};

// Rows of a step with their queries.
template <typename T>
struct Rows : Reach {
  const T *qkv, *pool;
  float scale, cap;
  T* out;

  Rows(const Sights& sights, const void* qkv, const void* pool, float scale, float cap, void* out)
      : Reach(sights), qkv(static_cast<const T*>(qkv)), pool(static_cast<const T*>(pool)), scale(scale), cap(cap), out(static_cast<T*>(out)) {}

  // The parts of queries first .. first + count of one KV head in a span that all their rows share. Query i is of
  // row_of(i), and gives part_of(i).
  template <typename Row, typename Part>
  void look_at(Scratch<T>& own, int span, int kv, int first, int count, Row&& row_of, Part&& part_of) const {
    const Shape& s = shape;
    int64_t from = INT64_MAX, to = -1;
    for (int i = 0; i < count; ++i) {
      const int row = row_of(first + i), head = kv * s.group() + (first + i) % s.group();
      own.sights[i] = sight(row);
      own.parts[i] = part_of(first + i);
      from = std::min(from, tile_of(s, own.sights[i].first)), to = std::max(to, tile_of(s, own.sights[i].last));
      std::memcpy(own.queries + i * s.size, qkv + (static_cast<int64_t>(row) * s.all() + head) * s.size, s.size * sizeof(T));
    }
    from = std::max<int64_t>(from, span * kSpan), to = std::min<int64_t>(to, span * kSpan + kSpan - 1);
    const int64_t* table = tables + starts[row_of(first)];
    int tiles = 0;
    for (int64_t i = from; i <= to; ++i, ++tiles) {
      const int64_t index = i / s.tiles(), block = table[index];
      const int tile = i % s.tiles();
      own.tiles[tiles] = {tile_at(pool, s, kv, block, tile), tile_at(pool, s, s.kv_heads + kv, block, tile),
                          index * s.block_tokens + tile * kLanes, std::min(kLanes, s.block_tokens - tile * kLanes)};
    }
    for (int i = 0; i < 4; ++i) own.tiles[tiles + i].keys = own.tiles[std::min(i, std::max(tiles - 1, 0))].values;
    switch (count) {
      case 1: return look<1>(own, tiles, scale, cap, s);
      case 2: return look<2>(own, tiles, scale, cap, s);
      case 3: return look<3>(own, tiles, scale, cap, s);
      case 4: return look<4>(own, tiles, scale, cap, s);
      case 5: return look<5>(own, tiles, scale, cap, s);
      case 6: return look<6>(own, tiles, scale, cap, s);
      case 7: return look<7>(own, tiles, scale, cap, s);
      case 8: return look<8>(own, tiles, scale, cap, s);
    }
  }
};

// A task of few rows: `task.row` counts them; their parts go to the workspace.
template <typename T>
void look_together(const Rows<T>& rows, const Task& task, Plan& p, Scratch<T>& own) {
  const Shape& s = rows.shape;
  const auto row_of = [&](int query) { return p.few[task.row + query / s.group()]; };
  const auto part_of = [&](int query) {
    const int i = task.row + query / s.group(), span = task.span - rows.first_span(p.few[i]);
    return p.workspace.data() + (p.parts[i] + span * s.heads + task.kv * s.group() + query % s.group()) * part_floats(s);
  };
  const int queries = task.rows * s.group();
  for (int first = 0; first < queries; first += kQueries)
    rows.look_at(own, task.span, task.kv, first, std::min(kQueries, queries - first), row_of, part_of);
}

// A task of many rows of one sequence: their parts are merged as they come.
template <typename T>
void look_back(const Rows<T>& rows, const Task& task, Scratch<T>& own, std::vector<float>& totals) {
  const Shape& s = rows.shape;
  const int queries = task.rows * s.group();
  const auto row_of = [&](int query) { return task.row + query / s.group(); };
  totals.resize((queries + kQueries) * part_floats(s));
  float* fresh = totals.data() + queries * part_floats(s);
  const int from = rows.first_span(task.row), to = rows.last_span(task.row + task.rows - 1);
  for (int span = from; span <= to; ++span)
    for (int first = 0; first < queries; first += kQueries) {
      const int count = std::min(kQueries, queries - first);
      if (rows.last_span(row_of(first + count - 1)) < span) continue;
      rows.look_at(own, span, task.kv, first, count, row_of, [&](int query) {
        return span == from ? totals.data() + query * part_floats(s) : fresh + (query - first) * part_floats(s);
      });
      if (span > from)
        for (int i = 0; i < count; ++i) merge(totals.data() + (first + i) * part_floats(s), fresh + i * part_floats(s), s);
    }
  for (int i = 0; i < queries; ++i) {
    const int head = task.kv * s.group() + i % s.group();
    finish(totals.data() + i * part_floats(s), rows.out + (static_cast<int64_t>(row_of(i)) * s.heads + head) * s.size, s);
  }
}

// The results of all tasks and rows of a layer.
template <typename T>
void attend(Team& team, const Rows<T>& rows, Plan& p) {
  static thread_local Scratch<T> own;
  static thread_local std::vector<float> totals;
  const Shape& s = rows.shape;
  team.share(p.tasks.size(), 1, [&](int64_t i) {
    const Task& task = p.tasks[i];
    task.span == kAllSpans ? look_back(rows, task, own, totals) : look_together(rows, task, p, own);
  });
  team.share(static_cast<int64_t>(p.few.size()) * s.heads, 4, [&](int64_t i) {
    const int few = i / s.heads, head = i % s.heads, row = p.few[few], spans = rows.last_span(row) - rows.first_span(row) + 1;
    float* total = p.workspace.data() + (p.parts[few] + head) * part_floats(s);
    for (int span = 1; span < spans; ++span) merge(total, total + static_cast<int64_t>(span) * s.heads * part_floats(s), s);
    finish(total, rows.out + (static_cast<int64_t>(row) * s.heads + head) * s.size, s);
  });
}

}  // namespace

namespace sameway {

void plan(const Sights& sights, int rows, Plan& to) {
  const Shape& s = sights.shape;
  const Reach reach(sights);
  to.tasks.clear(), to.few.clear(), to.parts.clear();
  int64_t parts = 0;
  int spans = 0;
  for (int row = 0, stop; row < rows; row = stop) {
    for (stop = row + 1; stop < rows && reach.starts[stop] == reach.starts[row];) ++stop;
    if ((stop - row) * s.group() >= kManyQueries) {
      const int step = std::max(1, kManyQueries / s.group());
      for (int first = row; first < stop; first += step)
        for (int kv = 0; kv < s.kv_heads; ++kv) to.tasks.push_back({first, std::min(step, stop - first), kv, kAllSpans});
      continue;
    }
    for (int own = row; own < stop; ++own) {
      to.few.push_back(own), to.parts.push_back(parts);
      parts += static_cast<int64_t>(reach.last_span(own) - reach.first_span(own) + 1) * s.heads;
      spans = std::max(spans, reach.last_span(own) + 1);
    }
  }
  const int few = to.few.size();
  for (int span = 0; span < spans; ++span)
    for (int i = 0, stop; i < few; i = stop) {
      const auto sees = [&](int j) { return reach.first_span(to.few[j]) <= span && span <= reach.last_span(to.few[j]); };
      stop = i + 1;
      if (!sees(i)) continue;
      while (stop < few && sees(stop) && reach.share(to.few[stop - 1], to.few[stop], span)) ++stop;
      for (int kv = 0; kv < s.kv_heads; ++kv) to.tasks.push_back({i, stop - i, kv, span});
    }
  to.workspace.resize(parts * part_floats(s));
}

void attend(Team& team, int kind, const Sights& sights, Plan& plan, const void* qkv, const void* pool, float scale, float cap, void* out) {
  by_type(kind, [&](auto type) { ::attend(team, Rows<decltype(type)>(sights, qkv, pool, scale, cap, out), plan); });
}

}  // namespace sameway

extern "C" {

void sw_attend(int kind, const void* qkv, const void* pool, const int64_t* tables, const int64_t* starts, const int64_t* positions,
               int64_t window, float scale, float cap, void* out, int rows, int64_t work, int heads, int kv_heads, int size,
               int block_tokens, int64_t blocks) {
  using namespace sameway;
  static thread_local Plan own;  // of the calling thread; the others read it by this reference
  Plan& p = own;
  const Sights sights{tables, starts, positions, window, {heads, kv_heads, size, block_tokens, blocks}};
  plan(sights, rows, p);
  together(threads_if(work * heads * size > 1 << 20), [&](Team& team) { attend(team, kind, sights, p, qkv, pool, scale, cap, out); });
}

}  // extern "C"
