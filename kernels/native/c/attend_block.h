// Attention of some rows over one block of 64 slots, always by the same instructions.
//
// The state of a row over the slots so far: the largest score `top`, the sum `mass` of 2^(score - top) (in 16 lanes,
// summed at the end), and the sum `o` of values with the same weights. Scores are in base 2. A masked slot has weight
// +0 and changes nothing, so a row may process a block with younger rows, or a fully masked block.
#pragma once
#include "lanes.h"
#include "tiles.h"
#define B 64
#define NEVER (-__builtin_inff())
#define STRETCH 32  // inputs per chain in fp32: longer chains have more rounding error

// How numbers are multiplied, as words of 32 bits: fp32; pairs of bf16; bf16 widened to fp32. Widening gives the same
// bits where a CPU has no products of pairs, and is faster there. For a few rows it is slower, because their block is
// done before twice the words are in the first-level cache.
enum { WIDE, PAIRED, WIDENED };
#if defined(__AVX512BF16__)
#define NARROW(rows) PAIRED
#define DOT2(acc, w, x) (F) _mm512_dpbf16_ps((__m512)(acc), (__m512bh)(w), (__m512bh)(x))
#else
#define DOT2(acc, w, x) dot2(acc, w, (x)[0])
#if defined(__AVX512F__)
#define NARROW(rows) ((rows) <= 4 ? PAIRED : WIDENED)
#else
#define NARROW(rows) ((rows) <= 2 ? PAIRED : WIDENED)
#endif
#endif

typedef uint16_t H2 __attribute__((vector_size(64), aligned(2)));  // 32 x bf16

typedef struct {
  int64_t n, D, E, width;   // rows; size of a key and of a value; value size in whole vectors
  int kind;
  float scale, cap;      // score = dot * scale, or cap * tanh(dot * scale) if cap > 0
  const uint32_t *q;     // [n, S], S = words of a key
  const int64_t *count;  // [n] slots of the sequence that a row sees, from its beginning
  const int64_t *low;    // [n] positions up to this one are masked; read if a block has positions
  float *top, *o;        // [n], [n, width]
  F *mass;               // [n]
} Rows;

typedef struct {
  uint32_t *kt, *vt;  // transposed keys [S, 64]; values in pairs [32, width], or [64, width]
  float *s, *shrink;  // scores [n, 64]; factors for earlier sums [n]
  uint32_t *p;        // weights [n, 64], or in pairs [n, 32]
  int64_t *shape;     // configuration of the tiles, see tiles.h
} Room;

typedef struct {
  const char *k, *v;            // of the first slot; v null: values are in vt already
  int64_t ldk, ldv;                // bytes from slot to slot
  const int32_t *pos;           // [64], null if no window masks a slot
  const char *next_k, *next_v;  // the next block, null if it is not contiguous
} Slots;

INLINE int64_t words(int kind, int64_t numbers) { return kind == PAIRED ? numbers / 2 : numbers; }

// acc[rows][vecs * 16] over S words of x and S times 16 words of w: one chain per lane. `next`, unless null, is
// prefetched into the second-level cache, as many bytes as w was made of.
INLINE void chains(int kind, int rows, int vecs, const uint32_t *w, int64_t ldw, const uint32_t *x, int64_t ldx, int64_t S, const char *next, F acc[4][4]) {
  const int step = kind == WIDENED ? 32 : 64;
#pragma clang loop unroll(disable)
  for (int64_t s = 0; s < S; s++) {
    if (next)
      for (int n = 0; n < vecs; n += 64 / step) __builtin_prefetch(next + (s * vecs + n) * step, 0, 2);
    U wv[4];
    for (int n = 0; n < vecs; n++) wv[n] = load(U, w + s * ldw + n * 16);
    for (int m = 0; m < rows; m++) {
      U xv = (U){0} + x[m * ldx + s];
#if defined(__AVX512F__)
      __asm__("" : "+v"(xv));  // read once for all vectors
#endif
      for (int n = 0; n < vecs; n++) acc[m][n] = kind == PAIRED ? DOT2(acc[m][n], wv[n], xv) : fma_((F)wv[n], (F)xv, acc[m][n]);
    }
  }
}
INLINE void scores(int kind, int rows, int vecs, const Rows *a, const Room *room, const char *next, int64_t r, int64_t slot) {
  F acc[4][4];
  const int64_t S = words(kind, a->D), bytes = kind == WIDE ? 4 : 2, most = kind == WIDE ? STRETCH : S;
  for (int64_t s = 0; s < S; s += most) {
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < vecs; n++) acc[m][n] = splat(0.f);
    const char *ahead = next && r == 0 ? next + slot * a->D * bytes + s * vecs * 64 : 0;
    chains(kind, rows, vecs, room->kt + s * B + slot, B, a->q + r * S + s, S, S - s < most ? S - s : most, ahead, acc);
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < vecs; n++) {
        float *sum = room->s + (r + m) * B + slot + n * 16;
        store(sum, s ? load(F, sum) + acc[m][n] : acc[m][n]);
      }
  }
}
INLINE void weigh(int kind, int rows, int vecs, const Rows *a, const Room *room, const uint32_t *vt, int64_t ldv, const char *next, int64_t r, int64_t e) {
  F acc[4][4];
  const int64_t S = words(kind, B), bytes = kind == WIDE ? 4 : 2;
  float *o = a->o + r * a->width + e;
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) acc[m][n] = splat(0.f);
  chains(kind, rows, vecs, vt + e, ldv, room->p + r * S, S, S, next && r == 0 ? next + e * B * bytes : 0, acc);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(o + m * a->width + n * 16, fma_(load(F, o + m * a->width + n * 16), splat(room->shrink[r + m]), acc[m][n]));
}
#if HAS_TILES
#define BY_TILES(kind) ((kind) == PAIRED)
INLINE void scores_by_tiles(const Rows *a, const Room *room) {
  const int64_t S = a->D / 2;
  products_by_tiles(room->shape, 1, a->n, B, room->kt, B, a->q, S, S, room->s, B);
}
INLINE void weigh_by_tiles(const Rows *a, const Room *room) {
  for (int64_t r = 0; r < a->n; r++)
    for (int64_t e = 0; e < a->width && room->shrink[r] != 1.f; e += 16)
      store(a->o + r * a->width + e, load(F, a->o + r * a->width + e) * room->shrink[r]);
  products_by_tiles(room->shape, 0, a->n, a->width, room->vt, a->width, room->p, B / 2, B / 2, a->o, a->width);
}
// After the last block: release the tiles, because other code may not expect them
INLINE void release(const Room *room) {
  if (*room->shape) _tile_release();
  *room->shape = 0;
}
#else
#define BY_TILES(kind) 0
#define scores_by_tiles(a, room)
#define weigh_by_tiles(a, room)
#define release(room)
#endif
// Apply softcap and masks to the scores of a row; compute its top and the factor for its earlier sums
INLINE void find_top(const Rows *a, const Room *room, const int32_t *pos, int64_t at, int64_t r, float scale) {
  const I count = (I){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t left = a->count[r] - at;
  F x[4];
  for (int g = 0; g < 4; g++) x[g] = load(F, room->s + r * B + g * 16);
  if (a->cap > 0)
    for (int g = 0; g < 4; g++) x[g] = tanh_(x[g] * a->scale);
  if (left < B)
    for (int g = 0; g < 4; g++) x[g] = pick(count < (int32_t)(left < 0 ? 0 : left) - g * 16, x[g], splat(NEVER));
  if (pos)
    for (int g = 0; g < 4; g++) x[g] = pick(load(I, pos + g * 16) > (int32_t)a->low[r], x[g], splat(NEVER));
  for (int g = 0; g < 4 && (a->cap > 0 || left < B || pos); g++) store(room->s + r * B + g * 16, x[g]);
  const float was = a->top[r], top = top_across(larger(larger(x[0], x[1]), larger(x[2], x[3]))) * scale, now = top > was ? top : was;
  room->shrink[r] = now == was ? 1.f : exp2_1(was - now);
  a->top[r] = now;
}
// Compute from the scores of all rows their weights, tops and masses, and the factors for their earlier sums. `at`:
// index of the first slot in the sequence. First all tops, then all weights, because steps of one row wait for each
// other.
INLINE void soften(int kind, int64_t rows, const Rows *a, const Room *room, const int32_t *pos, int64_t at) {
  const float scale = a->cap > 0 ? a->cap : a->scale;
  for (int64_t r = 0; r < rows; r++) find_top(a, room, pos, at, r, scale);
  for (int64_t r = 0; r < rows; r++) {
    const float base = a->top[r] == NEVER ? 0.f : a->top[r];
    F x[4];
    for (int g = 0; g < 4; g++) {
      x[g] = exp2_(fma_(load(F, room->s + r * B + g * 16), splat(scale), splat(-base)));
      if (kind != WIDE) {  // sum the rounded weights that values are multiplied by
        H h = narrow(x[g]);
        x[g] = wide(h);
        if (kind == PAIRED) store((bf16 *)(room->p + r * (B / 2)) + g * 16, h);
      }
      if (kind != PAIRED) store(room->p + r * B + g * 16, x[g]);
    }
    a->mass[r] = a->mass[r] * room->shrink[r] + ((x[0] + x[1]) + (x[2] + x[3]));
  }
}
// Transpose the words of 16 keys in memory, all of them present if `is_whole`, to columns of kt
INLINE void turn_some(int kind, int is_whole, int64_t n, const char *k, int64_t ld, uint32_t *kt) {
  U a[16];
  for (int i = 0; i < 16; i++) a[i] = is_whole ? load(U, k + i * ld) : load_some(k + i * ld, n);
  turn16(a);
  for (int i = 0; i < 16; i++) {
    if (!is_whole && i >= n) break;
    if (kind == WIDENED) store(kt + 2 * i * B, a[i] << 16), store(kt + (2 * i + 1) * B, a[i] & 0xffff0000u);
    else store(kt + i * B, a[i]);
  }
}
INLINE void turn_keys(int kind, const Rows *a, const Room *room, const Slots *b) {
  const int64_t S = kind == WIDE ? a->D : a->D / 2, rise = kind == WIDENED ? 2 : 1;
  for (int64_t slot = 0; slot < B; slot += 16) {
    const char *k = b->k + slot * b->ldk;
    int64_t s = 0;
    for (; s + 16 <= S; s += 16) turn_some(kind, 1, 16, k + s * 4, b->ldk, room->kt + s * rise * B + slot);
    if (s < S) turn_some(kind, 0, S - s, k + s * 4, b->ldk, room->kt + s * rise * B + slot);
  }
}
// Interleave 32 numbers of two values in vt
INLINE void pair_some(int kind, int is_whole, int64_t n, const char *v, int64_t ld, uint32_t *vt, int64_t ldt) {
  H2 x = {0}, y = {0};
  if (is_whole) x = load(H2, v), y = load(H2, v + ld);
  else memcpy(&x, v, n * 2), memcpy(&y, v + ld, n * 2);
  for (int half = 0; half < 2; half++) {
    if (!is_whole && half && n <= 16) break;
    const H a = load(H, (bf16 *)&x + half * 16), b = load(H, (bf16 *)&y + half * 16);
    if (kind == WIDENED) store(vt + half * 16, wide(a)), store(vt + ldt + half * 16, wide(b));
  }
  if (kind == WIDENED) return;
  store(vt, (U)__builtin_shufflevector(x, y, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47));
  if (is_whole || n > 16)
    store(vt + 16, (U)__builtin_shufflevector(x, y, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63));
}
INLINE void pair_values(int kind, const Rows *a, const Room *room, const Slots *b) {
  for (int64_t j = 0; j < B && kind == WIDE; j++) memcpy(room->vt + j * a->width, b->v + j * b->ldv, a->E * 4);
  for (int64_t j = 0; j < B && kind != WIDE; j += 2) {
    const char *v = b->v + j * b->ldv;
    uint32_t *vt = room->vt + words(kind, j) * a->width;
    int64_t e = 0;
    if (BY_TILES(kind)) ask_for(b->next_k ? b->next_k + j * b->ldk : 0, 2 * b->ldk), ask_for(b->next_v ? b->next_v + j * b->ldv : 0, 2 * b->ldv);
    for (; e + 32 <= a->E; e += 32) pair_some(kind, 1, 32, v + e * 2, b->ldv, vt + e, a->width);
    if (e < a->E) pair_some(kind, 0, a->E - e, v + e * 2, b->ldv, vt + e, a->width);
  }
}
// Put key and value of one slot at index i of the block
INLINE void place(const Rows *a, const Room *room, int64_t i, const char *k, const char *v) {
  const bf16 *kn = (const bf16 *)k, *vn = (const bf16 *)v;
  if (a->kind == WIDE) {
    for (int64_t d = 0; d < a->D; d++) memcpy(room->kt + d * B + i, k + d * 4, 4);
    memcpy(room->vt + i * a->width, v, a->E * 4);
  } else if (a->kind == PAIRED) {
    for (int64_t s = 0; s < a->D / 2; s++) memcpy(room->kt + s * B + i, k + s * 4, 4);
    for (int64_t e = 0; e < a->E; e++) ((bf16 *)(room->vt + (i / 2) * a->width + e))[i % 2] = vn[e];
  } else {
    for (int64_t d = 0; d < a->D; d++) room->kt[d * B + i] = (uint32_t)kn[d] << 16;
    for (int64_t e = 0; e < a->E; e++) room->vt[i * a->width + e] = (uint32_t)vn[e] << 16;
  }
}
#if defined(__AVX512F__)  // 32 registers of 16 lanes hold 4 rows of 4 vectors; fewer registers hold 4 rows of 1
#define WIDEST 4
#else
#define WIDEST 1
#endif
// CALL(rows, vecs, row, lane) for all rows and lanes, in tiles
#define TILES(rows, lanes, CALL)                                       \
  {                                                                    \
    int64_t r = 0;                                                        \
    for (; (rows)-r >= 4; r += 4) ROW_OF_TILES(4, lanes, WIDEST, CALL) \
    for (; (rows)-r >= 2; r += 2) ROW_OF_TILES(2, lanes, WIDEST, CALL) \
    if (r < (rows)) ROW_OF_TILES(1, lanes, 4, CALL)                    \
  }
#define ROW_OF_TILES(m, lanes, most, CALL)                            \
  {                                                                   \
    int64_t e = 0;                                                       \
    for (; (most) == 4 && (lanes)-e >= 64; e += 64) CALL(m, 4, r, e); \
    for (; (most) == 4 && (lanes)-e >= 32; e += 32) CALL(m, 2, r, e); \
    for (; e < (lanes); e += 16) CALL(m, 1, r, e);                    \
  }
// Process the block `b`, or the block in kt and vt if b->k is null
INLINE void block_of(int kind, const Rows *a, const Room *room, const Slots *b, int64_t at) {
  const uint32_t *vt = room->vt;
  int64_t ldv = a->width;
  if (b->k) turn_keys(kind, a, room, b);
#define CALL(m, n, r, e) scores(kind, m, n, a, room, b->next_k, r, e)
  if (BY_TILES(kind)) scores_by_tiles(a, room);
  else TILES(a->n, B, CALL)
#undef CALL
  soften(kind, a->n, a, room, b->pos, at);
  if (kind == WIDE && b->k && a->E == a->width) vt = (const uint32_t *)b->v, ldv = b->ldv / 4;  // without a copy
  else if (b->v) pair_values(kind, a, room, b);
#define CALL(m, n, r, e) weigh(kind, m, n, a, room, vt, ldv, b->next_v, r, e)
  if (BY_TILES(kind)) weigh_by_tiles(a, room);
  else TILES(a->n, a->width, CALL)
#undef CALL
}
__attribute__((noinline)) static inline void block(const Rows *a, const Room *room, const Slots *b, int64_t at) {
  if (a->kind == WIDE) block_of(WIDE, a, room, b, at);
  else if (a->kind == PAIRED) block_of(PAIRED, a, room, b, at);
  else block_of(WIDENED, a, room, b, at);
}
// Arrange a block's keys and values in kt and vt, for use by several rows
static inline void lay(const Rows *a, const Room *room, const Slots *b) {
  if (a->kind == WIDE) turn_keys(WIDE, a, room, b), pair_values(WIDE, a, room, b);
  else if (a->kind == PAIRED) turn_keys(PAIRED, a, room, b), pair_values(PAIRED, a, room, b);
  else turn_keys(WIDENED, a, room, b), pair_values(WIDENED, a, room, b);
}
