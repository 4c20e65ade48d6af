// Linear layers. Each output of each row is one accumulator in one lane, which runs over k in order and is rounded
// once. It does not depend on the number of rows or outputs, on the thread or on the position in a tile.
//
// A row's numbers are read 32 bits at a time: one fp32, or two bf16. Weights are packed in panels of 64 outputs,
// [ceil(N / 64)][S][64] such words with S = words of a row; outputs beyond N are zeros. A panel is contiguous memory
// and one chunk of work. If the CPU does not multiply pairs of bf16, several rows share a part of the panel that was
// converted to fp32 in cache: the same products and sums in the same order.
#pragma once
#include "lanes.h"
#include "pool.h"
#include "tiles.h"
#include <stdlib.h>
#define PANEL 64
#define TALL 512  // rows at a time, so that their sums fit on the stack
#define MANY 16   // rows from which copying x into parts, each contiguous in memory, is faster
// A tile has ROWS rows and VECS * 16 outputs: as much as the registers hold. Up to FEW rows need no converted panel.
#if defined(__AVX512F__)
#define ROWS 4
#define VECS 4
#define FEW 12
#else
#define ROWS 6
#define VECS 1
#define FEW 1
#endif
#if defined(__AVX512BF16__)
#define WIDENS 0
#define DEPTH 64  // words at a time when rows share them: 16 KiB of a panel stay in the first-level cache for all rows
#define ONCE 4    // most rows that read a panel only once
#else
#define WIDENS 1  // bf16 is multiplied as fp32
#define DEPTH 32
#define ONCE 1
#endif

// One of several products of the same rows in one job, so that a thread waits once for all of them.
typedef struct {
  const void *w, *scale, *bias;  // scale: of quantized weights; bias [N], in y's dtype
  void *y;                       // [M, N] bf16 or fp32
  int64_t N;
} Output;
static int panels(const Output *o, int n) {
  int64_t all = 0;
  for (int i = 0; i < n; i++) all += (o[i].N + PANEL - 1) / PANEL;
  return (int)all;
}
// Return the output that chunk c of the job belongs to; c becomes the number of the panel within it
INLINE const Output *output_of(const Output *o, int *c) {
  for (int n; *c >= (n = panels(o, 1)); o++) *c -= n;
  return o;
}

typedef struct {
  const Output *outputs;
  const uint32_t *x, *w;
  const void *bias;
  void *y;
  int64_t first, M, N, S;  // rows from `first` on; w, bias, y, N: of the chunk's output
  int is_wide;      // fp32
  uint32_t *apart;  // x in parts of `depth` words, [ceil(S / depth)][rows][depth], fp32 if w is converted; or null
  int widens;
  int64_t depth, rows;  // rows: padded with zeros, for tiles of more than 16 rows, to a multiple of 16
} Linear;

// One number, or one pair of bf16, in all lanes. Kept in a register, because the compiler would load it for each
// product.
INLINE F spread(const uint32_t *p) {
#if defined(__AVX512F__)
  __m512i v = _mm512_set1_epi32((int)*p);
  __asm__("" : "+v"(v));
  return (F)v;
#elif defined(__AVX2__)
  __m256 v = _mm256_broadcast_ss((const float *)p);
  __asm__("" : "+x"(v));
  return (F)__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return splat(*(const float *)p);
#endif
}
// acc + w0 * x0 + w1 * x1 by lane, of pairs of bf16
INLINE F pairs(F acc, U w, U x) {
#if WIDENS
  return fma_((F)(w & 0xffff0000u), (F)(x & 0xffff0000u), fma_((F)(w << 16), (F)(x << 16), acc));
#else
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#endif
}
// rows x (vecs * 16) outputs over S words; `part` [rows][64] holds the sums between parts of the panel
INLINE void tile(int is_wide, int rows, int vecs, const uint32_t *w, int64_t ldw, const uint32_t *x, int64_t ldx, int64_t S, float *part) {
  F acc[6][4];
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) acc[m][n] = load(F, part + m * PANEL + n * 16);
#pragma clang loop unroll(disable)
  for (int64_t s = 0; s < S; s++) {
    U wv[4];
    for (int n = 0; n < vecs; n++) wv[n] = load(U, w + s * ldw + n * 16);
    for (int m = 0; m < rows; m++) {
      F xv = spread(x + m * ldx + s);
      for (int n = 0; n < vecs; n++) acc[m][n] = is_wide ? fma_((F)wv[n], xv, acc[m][n]) : pairs(acc[m][n], wv[n], (U)xv);
    }
  }
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(part + m * PANEL + n * 16, acc[m][n]);
}
// `rows` rows, at most ROWS, over all outputs of the panel; `is_cut`: w is [4 / VECS][S][VECS * 16], contiguous by tile
INLINE void band(int is_wide, int rows, int is_cut, const uint32_t *w, const uint32_t *x, int64_t ldx, int64_t S, float *part) {
  const int vecs = rows == 1 && !is_cut ? 4 : WIDENS && !is_wide ? (VECS + 1) / 2 : VECS;
  for (int n = 0; n < 4; n += vecs)
    if (is_cut) tile(is_wide, rows, vecs, w + n * 16 * S, vecs * 16, x, ldx, S, part + n * 16);
    else tile(is_wide, rows, vecs, w + n * 16, PANEL, x, ldx, S, part + n * 16);
}
INLINE void rows_over_panel(int is_wide, int64_t rows, int is_cut, const uint32_t *w, const uint32_t *x, int64_t ldx, int64_t S, float *part) {
  for (; rows >= ROWS; rows -= ROWS, x += ROWS * ldx, part += ROWS * PANEL) band(is_wide, ROWS, is_cut, w, x, ldx, S, part);
  switch (rows) {
    case 1: band(is_wide, 1, is_cut, w, x, ldx, S, part); break;
    case 2: band(is_wide, 2, is_cut, w, x, ldx, S, part); break;
    case 3: band(is_wide, 3, is_cut, w, x, ldx, S, part); break;
#if ROWS > 4
    case 4: band(is_wide, 4, is_cut, w, x, ldx, S, part); break;
    case 5: band(is_wide, 5, is_cut, w, x, ldx, S, part); break;
#endif
  }
}
// Convert S pairs of bf16 to 2 S of fp32, arranged for tiles
INLINE void widen(const uint32_t *w, uint32_t *wide, int64_t S) {
  for (int64_t s = 0; s < S; s++)
    for (int n = 0; n < 4; n++) {
      uint32_t *to = wide + (n / VECS * 2 * S + 2 * s) * VECS * 16 + n % VECS * 16;
      U both = load(U, w + s * PANEL + n * 16);
      store(to, both << 16);
      store(to + VECS * 16, both & 0xffff0000u);
    }
}
static void finish(const Linear *l, int64_t n0, const float *part) {
  const int64_t width = l->N - n0 < PANEL ? l->N - n0 : PANEL, size = l->is_wide ? 4 : 2;
  float bias[PANEL] = {0};
  for (int64_t n = 0; l->bias && n < width; n++) bias[n] = l->is_wide ? ((const float *)l->bias)[n0 + n] : wide1(((const bf16 *)l->bias)[n0 + n]);
  for (int64_t m = 0; m < l->M; m++)
    for (int64_t n = 0; n < width; n += 16) {
      F v = load(F, part + m * PANEL + n);
      if (l->bias) v += load(F, bias + n);
      H h = narrow(v);
      char *y = (char *)l->y + (m * l->N + n0 + n) * size;
      const void *from = l->is_wide ? (void *)&v : (void *)&h;
      if (n + 16 <= width && l->is_wide) memcpy(y, &v, 64);
      else if (n + 16 <= width) memcpy(y, &h, 32);
      else memcpy(y, from, (width - n) * size);
    }
}
#if HAS_TILES
#define BY_TILES(is_wide) !(is_wide)
#define TILE_DEPTH 128  // words: 32 KiB of a panel, which stay in the first-level cache for all rows
static void tiles_chunk(const Linear *l, int c) {
  const uint32_t *w = l->w + (int64_t)c * PANEL * l->S;
  const int64_t whole = l->S / 16 * 16, left = l->S - whole, depth = l->apart ? TILE_DEPTH : whole;
  const int64_t ldx = l->apart ? 16 : l->S, rise = l->apart ? 16 * l->rows : 16, some = l->rows < 16 ? l->rows : 16;
  float part[l->rows * PANEL];
  shape_tiles(some, 16);
  for (int64_t s = 0; s < whole; s += depth) {
    const int64_t here = whole - s < depth ? whole - s : depth;
    rows_by_tiles(!s, l->rows, w + s * PANEL, l->apart ? l->apart + s * l->rows : l->x + s, ldx, rise, here / 16, part);
  }
  if (left) {
    shape_tiles(some, left);
    rows_by_tiles(!whole, l->rows, w + whole * PANEL, l->apart ? l->apart + whole * l->rows : l->x + whole, ldx, rise, 1, part);
  }
  _tile_release();
  finish(l, (int64_t)c * PANEL, part);
}
#else
#define BY_TILES(is_wide) 0
#define tiles_chunk(l, c)
#endif
static void linear_chunk(void *arg, int c, char *) {
  Linear mine = *(const Linear *)arg, *l = &mine;
  const Output *o = output_of(l->outputs, &c);
  l->w = o->w, l->bias = o->bias, l->N = o->N, l->y = (char *)o->y + l->first * o->N * (l->is_wide ? 4 : 2);
  if (BY_TILES(l->is_wide)) {
    tiles_chunk(l, c);
    return;
  }
  const uint32_t *w = l->w + (int64_t)c * PANEL * l->S;
  const int64_t depth = l->M <= ONCE && !l->apart ? l->S : DEPTH, times = l->widens ? 2 : 1;
  float part[l->M * PANEL];
  uint32_t wide[WIDENS ? 2 * DEPTH * PANEL : 1];
  memset(part, 0, sizeof part);
  for (int64_t s = 0; s < l->S; s += depth) {
    const int64_t here = l->S - s < depth ? l->S - s : depth;
    const uint32_t *x = l->apart ? l->apart + s * l->M * times : l->x + s, *ws = w + s * PANEL;
    const int64_t ldx = l->apart ? DEPTH * times : l->S;
    if (l->widens) widen(ws, wide, here);
    if (l->widens) rows_over_panel(1, l->M, 1, wide, x, ldx, here * 2, part);
    else if (l->is_wide) rows_over_panel(1, l->M, 0, ws, x, ldx, here, part);
    else rows_over_panel(0, l->M, 0, ws, x, ldx, here, part);
  }
  finish(l, (int64_t)c * PANEL, part);
}
static void apart_chunk(void *arg, int m, char *) {
  const Linear *l = arg;
  for (int64_t s = 0; s < l->S; s += l->depth) {
    const int64_t here = l->S - s < l->depth ? l->S - s : l->depth, at = s * l->rows + m * l->depth;
    const uint32_t *x = l->x + m * l->S + s;
    if (m >= l->M) memset(l->apart + at, 0, here * 4);
    else if (here == 16 && !l->widens) memcpy(l->apart + at, x, 64);
    else if (!l->widens) memcpy(l->apart + at, x, here * 4);
    else
      for (uint32_t i = 0, *to = l->apart + at * 2; i < here; i++) to[2 * i] = x[i] << 16, to[2 * i + 1] = x[i] & 0xffff0000u;
  }
}
// x [M, K] -> n outputs; all fp32 (S = K) or all bf16 (S = K / 2)
static int linear_all(const void *x, const Output *outputs, int n, int64_t M, int64_t S, int is_wide) {
  const int may_widen = WIDENS && !is_wide;
  const int64_t most = M < TALL ? M : TALL;
  uint32_t *apart = 0;
  if (most >= MANY || (may_widen && most > FEW)) {
    apart = take_room(OF_ROWS, (most + 15) * (S + DEPTH) * 4 * (may_widen ? 2 : 1));
    if (!apart) return 0;
  }
  for (int64_t m = 0; m < M; m += TALL) {
    const int64_t rows = M - m < TALL ? M - m : TALL;
    Linear l = {.outputs = outputs, .x = (const uint32_t *)x + m * S, .first = m, .M = rows, .S = S, .is_wide = is_wide};
    l.widens = may_widen && rows > FEW, l.depth = DEPTH, l.rows = rows;
    if (BY_TILES(is_wide)) l.depth = 16, l.rows = rows > 16 ? UP(rows, 16) : rows;
    if (l.widens || rows >= MANY) {
      l.apart = apart;
      if (rows >= MANY) pool_run(apart_chunk, &l, (int)l.rows, 0);
      else for (int r = 0; r < rows; r++) apart_chunk(&l, r, 0);
    }
    pool_run(linear_chunk, &l, panels(outputs, n), 0);
  }
  give_room(OF_ROWS, apart);
  return 1;
}
// x [M, K], w packed, bias [N] or null -> y [M, N]
EXPORT(linear)(const void *x, const void *w, const void *bias, void *y, int64_t M, int64_t N, int64_t S, int is_wide) {
  return linear_all(x, &(Output){w, 0, bias, y, N}, 1, M, S, is_wide);
}
