// One block of 64 slots, for some rows: what attention does to the state of a row, always by the same instructions.
//
// The state of a row over the slots so far is the largest score `top`, the sum `mass` of 2^(score - top) (16 lanes of it, added
// up at the end) and the values' sum `o` with the same weights. Scores are in base 2. A slot that a row does not see has
// weight +0 and changes nothing: a row may meet a block that holds younger rows, or a block that it does not see at all.
// Numbers are handled as words of 32 bits: one fp32, or two bf16.
#pragma once
#include "lanes.h"
#define B 64
#define UP(n, to) (((n) + (to)-1) / (to) * (to))

typedef uint16_t H2 __attribute__((vector_size(64), aligned(2)));  // 32 x bf16

typedef struct {
  long n, S, E, width;        // rows; words of a key; channels of a value, and rounded up to vectors
  int is_wide;                // fp32
  float scale, cap;           // score = dot * scale, or cap * tanh(dot * scale) where there is a cap
  const uint32_t *q;          // [n, S]
  const int64_t *count;       // [n] slots of the sequence that a row sees, counted from its beginning
  const int64_t *low;         // [n] positions that it does not see, and all below; null without a window
  float *top, *o;             // [n], [n, width]
  F *mass;                    // [n]
} Rows;

typedef struct {
  uint32_t *kt, *vt;  // keys turned [S, 64]; values in pairs [32, width], or [64, width] in fp32
  float *s;           // scores [n, 64]
  uint32_t *p;        // weights [n, 64] in fp32, [n, 32] pairs
  float *shrink;      // [n]
} Room;

typedef struct {
  const char *k, *v;  // the first slot's
  long ldk, ldv;      // bytes from slot to slot
  const int32_t *pos;  // [64], null without a window
  const char *next_k, *next_v;  // the next block, if it lies behind this one
} Slots;

// acc[rows][vecs * 16] over S words of x and S times 16 words of w: one chain a lane. `next`: asked for meanwhile, as many
// lines as are read of w, into the second cache; null = nothing
INLINE void chains(int is_wide, int rows, int vecs, const uint32_t *w, long ldw, const uint32_t *x, long ldx, long S, const char *next, F acc[4][4]) {
#pragma clang loop unroll(disable)
  for (long s = 0; s < S; s++) {
    if (next)
      for (int n = 0; n < vecs; n++) __builtin_prefetch(next + (s * vecs + n) * 64, 0, 2);
    U wv[4];
    for (int n = 0; n < vecs; n++) wv[n] = load(U, w + s * ldw + n * 16);
    for (int m = 0; m < rows; m++) {
      uint32_t word = x[m * ldx + s];
      __asm__("" : "+r"(word));  // read once for all lanes
      float number;
      memcpy(&number, &word, 4);
      for (int n = 0; n < vecs; n++) acc[m][n] = is_wide ? fma_((F)wv[n], splat(number), acc[m][n]) : dot2(acc[m][n], wv[n], word);
    }
  }
}
INLINE void scores(int is_wide, int rows, int vecs, const Rows *a, const Room *room, const char *next, long r, long slot) {
  F acc[4][4];
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) acc[m][n] = splat(0.f);
  chains(is_wide, rows, vecs, room->kt + slot, B, a->q + r * a->S, a->S, a->S, next && r == 0 ? next + slot * a->S * 4 : 0, acc);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(room->s + (r + m) * B + slot + n * 16, acc[m][n]);
}
INLINE void weigh(int is_wide, int rows, int vecs, const Rows *a, const Room *room, const uint32_t *vt, long ldv, const char *next, long r, long e) {
  F acc[4][4];
  const long S = is_wide ? B : B / 2;
  float *o = a->o + r * a->width + e;
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) acc[m][n] = load(F, o + m * a->width + n * 16) * room->shrink[r + m];
  chains(is_wide, rows, vecs, vt + e, ldv, room->p + r * S, S, S, next && r == 0 ? next + e * S * 4 : 0, acc);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(o + m * a->width + n * 16, acc[m][n]);
}
// Scores of a row -> its weights, top and mass; what its sums shrink by. `at`: the first slot's place in the sequence.
INLINE void soften(int is_wide, const Rows *a, const Room *room, const int32_t *pos, int64_t at, long r) {
  const I count = (I){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F never = splat(-__builtin_inff());
  const int64_t left = a->count[r] - at;
  F x[4], high = never;
  for (int g = 0; g < 4; g++) {
    x[g] = load(F, room->s + r * B + g * 16) * a->scale;
    if (a->cap > 0) x[g] = tanh_(x[g]) * a->cap;
    if (left < B) x[g] = pick(count < (int32_t)(left < 0 ? 0 : left) - g * 16, x[g], never);
    if (pos) x[g] = pick(load(I, pos + g * 16) > (int32_t)a->low[r], x[g], never);
  }
  high = larger(larger(x[0], x[1]), larger(x[2], x[3]));
  const float top = top_across(high), now = top > a->top[r] ? top : a->top[r];
  const float shrink = now == a->top[r] ? 1.f : exp2_1(a->top[r] - now);
  F w[4];
  for (int g = 0; g < 4; g++) {
    w[g] = pick(x[g] != never, exp2_(x[g] - now), splat(0.f));
    if (is_wide) store(room->p + r * B + g * 16, w[g]);
    else {
      H h = narrow(w[g]);  // what is added up is what values are multiplied by
      store((bf16 *)room->p + r * B + g * 16, h);
      w[g] = wide(h);
    }
  }
  a->mass[r] = a->mass[r] * shrink + ((w[0] + w[1]) + (w[2] + w[3]));
  a->top[r] = now;
  room->shrink[r] = shrink;
}
// 16 keys' words, all of them there if `is_whole` -> 16 columns of room->kt
INLINE void turn_some(int is_whole, long n, const char *k, long ld, uint32_t *kt) {
  U a[16];
  for (int i = 0; i < 16; i++) a[i] = is_whole ? load(U, k + i * ld) : load_some(k + i * ld, n);
  turn16(a);
  for (int i = 0; i < 16; i++)
    if (is_whole || i < n) store(kt + i * B, a[i]);
}
static void turn_keys(const Rows *a, const Room *room, const Slots *b) {
  for (long slot = 0; slot < B; slot += 16) {
    const char *k = b->k + slot * b->ldk;
    long s = 0;
    for (; s + 16 <= a->S; s += 16) turn_some(1, 16, k + s * 4, b->ldk, room->kt + s * B + slot);
    if (s < a->S) turn_some(0, a->S - s, k + s * 4, b->ldk, room->kt + s * B + slot);
  }
}
// Values [64] as bf16 -> room->vt, by pairs of slots
INLINE void pair(int is_whole, long n, const char *v, long ld, uint32_t *to) {
  H2 x = {0}, y = {0};
  if (is_whole) x = load(H2, v), y = load(H2, v + ld);
  else memcpy(&x, v, n * 2), memcpy(&y, v + ld, n * 2);
  store(to, (U)__builtin_shufflevector(x, y, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47));
  if (is_whole || n > 16)
    store(to + 16, (U)__builtin_shufflevector(x, y, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63));
}
static void pair_values(const Rows *a, const Room *room, const Slots *b) {
  for (long j = 0; j < B / 2; j++) {
    const char *v = b->v + 2 * j * b->ldv;
    long e = 0;
    for (; e + 32 <= a->E; e += 32) pair(1, 32, v + e * 2, b->ldv, room->vt + j * a->width + e);
    if (e < a->E) pair(0, a->E - e, v + e * 2, b->ldv, room->vt + j * a->width + e);
  }
}
#if defined(__AVX512F__)  // 32 registers of 16 lanes hold 4 rows of 4 vectors; others hold 4 of 1
#define WIDEST 4
#else
#define WIDEST 1
#endif
// CALL(rows, vecs, row, lane) for all rows and lanes, in tiles
#define TILES(rows, lanes, CALL)                                              \
  {                                                                           \
    long r = 0;                                                               \
    for (; (rows)-r >= 4; r += 4) ROW_OF_TILES(4, lanes, WIDEST, CALL)        \
    for (; (rows)-r >= 2; r += 2) ROW_OF_TILES(2, lanes, WIDEST, CALL)        \
    if (r < (rows)) ROW_OF_TILES(1, lanes, 4, CALL)                           \
  }
#define ROW_OF_TILES(m, lanes, most, CALL)                                    \
  {                                                                           \
    long e = 0;                                                               \
    for (; (most) == 4 && (lanes)-e >= 64; e += 64) CALL(m, 4, r, e);         \
    for (; (most) == 4 && (lanes)-e >= 32; e += 32) CALL(m, 2, r, e);         \
    for (; e < (lanes); e += 16) CALL(m, 1, r, e);                            \
  }
INLINE void block_of(int is_wide, const Rows *a, const Room *room, const Slots *b, int64_t at) {
  const uint32_t *vt = room->vt;
  long ldv = a->width;
  turn_keys(a, room, b);
#define CALL(m, n, r, e) scores(is_wide, m, n, a, room, b->next_k, r, e)
  TILES(a->n, B, CALL)
#undef CALL
  for (long r = 0; r < a->n; r++) soften(is_wide, a, room, b->pos, at, r);
  if (!is_wide) pair_values(a, room, b);
  else if (a->E == a->width) vt = (const uint32_t *)b->v, ldv = b->ldv / 4;  // as they lie
  else
    for (long j = 0; j < B; j++) memcpy(room->vt + j * a->width, b->v + j * b->ldv, a->E * 4);
#define CALL(m, n, r, e) weigh(is_wide, m, n, a, room, vt, ldv, b->next_v, r, e)
  TILES(a->n, a->width, CALL)
#undef CALL
}
static void block(const Rows *a, const Room *room, const Slots *b, int64_t at) {
  if (a->is_wide) block_of(1, a, room, b, at);
  else block_of(0, a, room, b, at);
}
