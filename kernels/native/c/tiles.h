// Products by AMX: a tile of 16 rows of x by 16 outputs, 16 words of each at a time.
//
// The chain of an output: for each 16 pairs of bf16, the even products and the odd products are summed from zero, and
// both sums are added to each other and to the earlier sum; denormal results become zero. Rows of a tile are
// independent of each other and of their number: one row uses the same instructions. Bytes give integers, which are
// exact in any order. A weight panel, [S][64] words, has the layout that these instructions need.
#pragma once
#include "lanes.h"
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1

typedef struct {
  uint8_t palette, start, none[14];
  uint16_t bytes[16];  // of a row of a tile
  uint8_t rows[16];
} Shape;
// Tiles 0 .. 3 hold sums, 4 and 5 `rows` rows of x, 6 and 7 weights, `words` words deep. Their contents are lost.
INLINE void shape_tiles(int64_t rows, int64_t words) {
  Shape s = {.palette = 1};
  for (int t = 0; t < 8; t++) s.bytes[t] = t == 4 || t == 5 ? words * 4 : 64, s.rows[t] = t < 6 ? rows : words;
  _tile_loadconfig(&s);
}
#define TILES_AT(DO, part, ld, more) \
  DO(0, (part), (ld) * 4), DO(1, (part) + 16, (ld) * 4), DO(2, (part) + (more), (ld) * 4), DO(3, (part) + (more) + 16, (ld) * 4)

// part [rows][ldp] += x w over `steps` depths of tiles, or = if `is_new`. Rows of x are ldx words apart, its depths
// `rise`. One tile of rows by `vecs` times 16 outputs, 1, 2 or 4; w [16 * steps][ldw]. `asks`: w is read from memory.
// The tiles of the next step are then prefetched in the order of their use, because the CPU prefetches too little for
// loads 256 bytes apart.
INLINE void wide_tiles(int is_new, int vecs, int asks, const uint32_t *w, int64_t ldw, const uint32_t *x, int64_t ldx, int64_t rise, int64_t steps, float *part, int64_t ldp) {
  if (is_new) _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  else {
    _tile_loadd(0, part, ldp * 4);
    if (vecs > 1) _tile_loadd(1, part + 16, ldp * 4);
    if (vecs > 2) _tile_loadd(2, part + 32, ldp * 4), _tile_loadd(3, part + 48, ldp * 4);
  }
  for (int64_t s = 0; s < steps; s++, x += rise, w += 16 * ldw) {
    _tile_loadd(4, x, ldx * 4);
#define ASK(n) for (int i = 0; asks && i < 16; i++) __builtin_prefetch(w + (16 + i) * ldw + (n) * 16, 0, 3)
    _tile_loadd(6, w, ldw * 4), _tile_dpbf16ps(0, 4, 6);
    ASK(0);
    if (vecs > 1) _tile_loadd(7, w + 16, ldw * 4), _tile_dpbf16ps(1, 4, 7);
    ASK(1);
    if (vecs > 2) _tile_loadd(6, w + 32, ldw * 4), _tile_dpbf16ps(2, 4, 6);
    ASK(2);
    if (vecs > 2) _tile_loadd(7, w + 48, ldw * 4), _tile_dpbf16ps(3, 4, 7);
    ASK(3);
#undef ASK
  }
  _tile_stored(0, part, ldp * 4);
  if (vecs > 1) _tile_stored(1, part + 16, ldp * 4);
  if (vecs > 2) _tile_stored(2, part + 32, ldp * 4), _tile_stored(3, part + 48, ldp * 4);
}
// Two tiles of rows by 32 outputs of a panel
INLINE void tall_tiles(int is_new, const uint32_t *w, const uint32_t *x, int64_t ldx, int64_t rise, int64_t steps, float *part) {
  if (is_new) _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  else TILES_AT(_tile_loadd, part, 64, 16 * 64);
  for (int64_t s = 0; s < steps; s++, x += rise, w += 16 * 64) {
    _tile_loadd(4, x, ldx * 4), _tile_loadd(6, w, 256), _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 16, 256), _tile_dpbf16ps(1, 4, 7), _tile_loadd(5, x + 16 * ldx, ldx * 4), _tile_dpbf16ps(2, 5, 6), _tile_dpbf16ps(3, 5, 7);
  }
  TILES_AT(_tile_stored, part, 64, 16 * 64);
}
// `rows` rows over the 64 outputs of a panel. More than 16 rows are a multiple of 16; their products take longer than
// memory
INLINE void rows_by_tiles(int is_new, int64_t rows, const uint32_t *w, const uint32_t *x, int64_t ldx, int64_t rise, int64_t steps, float *part) {
  const int asks = rows <= 16;
  for (; rows >= 32; rows -= 32, x += 32 * ldx, part += 32 * 64)
    tall_tiles(is_new, w, x, ldx, rise, steps, part), tall_tiles(is_new, w + 32, x, ldx, rise, steps, part + 32);
  if (rows) wide_tiles(is_new, 4, asks, w, 64, x, ldx, rise, steps, part, 64);
}
// Any number of rows and of 16 outputs, over S words: part [rows][ldp] += x [rows][ldx] w [S][ldw], or = if `is_new`.
// `shape`: the present configuration of the tiles, 0 = none. Configuring takes as long as the products of a few rows.
INLINE void products_by_tiles(int64_t *shape, int is_new, int64_t rows, int64_t outputs, const uint32_t *w, int64_t ldw, const uint32_t *x, int64_t ldx, int64_t S, float *part, int64_t ldp) {
  for (int64_t s = 0, words; s < S; s += words, is_new = 0) {
    words = S - s < 16 ? S - s : S / 16 * 16;
    for (int64_t r = 0; r < rows; r += 16) {
      const int64_t here = rows - r < 16 ? rows - r : 16, deep = words < 16 ? words : 16;
      if (*shape != here * 16 + deep) shape_tiles(here, deep), *shape = here * 16 + deep;
      const uint32_t *xs = x + r * ldx + s, *ws = w + s * ldw;
      float *to = part + r * ldp;
      int64_t e = 0;
      for (; outputs - e >= 64; e += 64) wide_tiles(is_new, 4, 0, ws + e, ldw, xs, ldx, 16, (words + 15) / 16, to + e, ldp);
      for (; outputs - e >= 32; e += 32) wide_tiles(is_new, 2, 0, ws + e, ldw, xs, ldx, 16, (words + 15) / 16, to + e, ldp);
      for (; e < outputs; e += 16) wide_tiles(is_new, 1, 0, ws + e, ldw, xs, ldx, 16, (words + 15) / 16, to + e, ldp);
    }
  }
}
#else
#define HAS_TILES 0
#endif
