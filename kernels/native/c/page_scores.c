// Scores of stored pages for sparse attention, and the masses that they sum to.
//
// A page is consecutive slots whose keys are known approximately: as codes with a scale, or as minimum and maximum of
// each channel. The score of a slot is one chain over channels, that of a page one chain over its slots, a row's mass
// one over pages: it does not depend on other rows or pages.
#include "attend_block.h"
#include "pool.h"
#define LOG2E 1.44269504088896341f
#define TILE 64    // rows at a time
#define PIECE 2048 // slots per job, about

typedef struct {
  const float *rows;                    // [K, R, D]
  const char *codes, *high;             // [K, S, ..]: codes; or minima, with the maxima in `high`
  const bf16 *scale, *error;            // [K, S] or null: scale of a slot's code; largest distance of its key
  const float *mean, *spread;           // [K, D] or null: a key is mean + spread * code
  float *out;                           // [K, R, S / page]
  int64_t K, R, D, S, page, bits;       // bits: 2, 8, 16 (bf16) or 32 (fp32)
  float factor, cap;                    // score = dot * factor, or cap * tanh(dot * factor / cap) if cap > 0
} PageScores;

typedef struct {  // the work memory of a job
  float *x, *bias, *length;  // rows [TILE, W] prepared for keys; number added to all scores of a row; norm of a row
  float *keys, *scored;      // [64, W]; [TILE, slots]
  Room room;
} Scratch;

INLINE int64_t width(const PageScores *a) { return a->high ? 2 * a->D : a->D; }
static void widen(const PageScores *a, const char *from, int64_t slot, float *to) {
  const int64_t D = a->D, quarter = (D + 3) / 4;
  if (a->bits == 32) memcpy(to, (const float *)from + slot * D, D * 4);
  else if (a->bits == 16)
    for (int64_t d = 0; d < D; d++) to[d] = wide1(((const bf16 *)from)[slot * D + d]);
  else if (a->bits == 8)
    for (int64_t d = 0; d < D; d++) to[d] = ((const int8_t *)from)[slot * D + d];
  else
    for (int64_t p = 0; p < 4 && p * quarter < D; p++) {
      const uint8_t *c = (const uint8_t *)from + slot * quarter;
      const int64_t n = D - p * quarter < quarter ? D - p * quarter : quarter;
      for (int64_t i = 0; i < n; i++) to[p * quarter + i] = (float)((c[i] >> 2 * p & 3) * 2 - 3);
    }
}
// Prepare rows [first, first + n) of head h for products with keys
static void prepare(const PageScores *a, Scratch *s, int64_t h, int64_t first, int64_t n) {
  const int64_t D = a->D, W = width(a);
  for (int64_t r = 0; r < n; r++) {
    const float *q = a->rows + (h * a->R + first + r) * D;
    float bias = 0, square = 0;
    for (int64_t d = 0; d < D; d++) {
      if (a->mean) bias = __builtin_fmaf(q[d], a->mean[h * D + d], bias);
      square = __builtin_fmaf(q[d], q[d], square);
      if (a->high) s->x[r * W + d] = q[d] < 0 ? q[d] : 0, s->x[r * W + D + d] = q[d] < 0 ? 0 : q[d];
      else s->x[r * W + d] = a->spread ? q[d] * a->spread[h * D + d] : q[d];
    }
    s->bias[r] = bias, s->length[r] = __builtin_sqrtf(square);
  }
}
// Scores of a block's slots [at, at + 64) for all rows -> scored + to
static void score_block(const PageScores *a, Scratch *s, int64_t h, int64_t at, int64_t n, int64_t to, int64_t ld) {
  const int64_t D = a->D, W = width(a), left = a->S - at < B ? a->S - at : B, size = a->bits == 2 ? (D + 3) / 4 : D * a->bits / 8;
  bf16 scale[B] = {0}, error[B] = {0};
  for (int64_t i = 0; i < left; i++) {
    widen(a, a->codes + h * a->S * size, at + i, s->keys + i * W);
    if (a->high) widen(a, a->high + h * a->S * size, at + i, s->keys + i * W + D);
  }
  memset(s->keys + left * W, 0, (B - left) * W * 4);
  if (a->scale) memcpy(scale, a->scale + h * a->S + at, left * 2);
  if (a->error) memcpy(error, a->error + h * a->S + at, left * 2);
  const Rows rows = {.n = n, .D = W, .kind = WIDE, .q = (const uint32_t *)s->x};
  const Slots b = {.k = (const char *)s->keys, .ldk = W * 4};
  turn_keys(WIDE, &rows, &s->room, &b);
#define CALL(m, v, r, e) scores(WIDE, m, v, &rows, &s->room, 0, r, e)
  TILES(n, B, CALL)
#undef CALL
  for (int64_t r = 0; r < n; r++)
    for (int64_t g = 0; g < B; g += 16) {
      F x = load(F, s->room.s + r * B + g);
      if (a->scale) x = fma_(x, wide(load(H, scale + g)), splat(s->bias[r]));
      if (a->error) x = fma_(splat(s->length[r]), wide(load(H, error + g)), x);
      x = a->cap > 0 ? tanh_(x * (a->factor / a->cap)) * a->cap : x * a->factor;
      store(s->scored + r * ld + to + g, x);
    }
}
// Log of a sum of e^x by lane: NaN if a number is NaN or infinite
INLINE F log_of(F top, F sum, I is_bad) {
  F found;
  for (int i = 0; i < 16; i++) found[i] = top[i] == NEVER ? NEVER : top[i] + log2_(sum[i]) / LOG2E;
  return pick(is_bad | (top == splat(-NEVER)), splat(__builtin_nanf("")), found);
}
// Masses of sixteen pages, one per lane, from a row's scores
INLINE F page_mass(const float *x, int64_t page) {
  if (page == 1) return load(F, x);
  F top = splat(NEVER), sum = splat(0.f), v;
  I is_bad = {0};
  for (int64_t i = 0; i < page; i++) {
    for (int p = 0; p < 16; p++) v[p] = x[p * page + i];
    is_bad |= v != v, top = larger(v, top);
  }
  for (int64_t i = 0; i < page; i++) {
    for (int p = 0; p < 16; p++) v[p] = x[p * page + i];
    sum += exp2_((v - top) * LOG2E);
  }
  return log_of(top, sum, is_bad);
}
static int64_t at_once(const PageScores *a) { return a->page >= 4 ? 16 : 64; }  // pages
static int64_t per_job(const PageScores *a) { return UP(PIECE / a->page + 1, at_once(a)); }  // pages
static int64_t slots_at_once(const PageScores *a) { return UP(at_once(a) * a->page, B); }
static void *take(char **at, int64_t numbers) {
  void *found = *at;
  *at += UP(numbers * 4, 64);
  return found;
}
// Divide the memory from `at` on for a job; return its end
static char *lay_out(const PageScores *a, Scratch *s, char *at) {
  const int64_t n = a->R < TILE ? a->R : TILE, W = width(a);
  s->keys = take(&at, B * W), s->room.kt = take(&at, B * W), s->room.s = take(&at, n * B);
  s->scored = take(&at, n * slots_at_once(a)), s->x = take(&at, n * W), s->bias = take(&at, n), s->length = take(&at, n);
  return at;
}
static void pages_chunk(void *arg, int c, char *room) {
  const PageScores *a = arg;
  const int64_t P = a->S / a->page, some = at_once(a), slots = slots_at_once(a), per = per_job(a);
  const int64_t pieces = (P + per - 1) / per, h = c / pieces, from = c % pieces * per, to = from + per < P ? from + per : P;
  Scratch s;
  lay_out(a, &s, room);
  for (int64_t first = 0; first < a->R; first += TILE) {
    const int64_t n = a->R - first < TILE ? a->R - first : TILE;
    prepare(a, &s, h, first, n);
    for (int64_t p = from; p < to; p += some) {
      for (int64_t i = 0; i < slots && p * a->page + i < a->S; i += B) score_block(a, &s, h, p * a->page + i, n, i, slots);
      for (int64_t r = 0; r < n; r++)
        for (int64_t q = 0; q < some && p + q < to; q += 16) {
          const F found = page_mass(s.scored + r * slots + q * a->page, a->page);
          const int64_t left = to - p - q;
          memcpy(a->out + (h * a->R + first + r) * P + p + q, &found, (left < 16 ? left : 16) * 4);
        }
    }
  }
}
EXPORT(page_scores)(const void *arg) {
  const PageScores *a = arg;
  Scratch s;
  const int64_t P = a->S / a->page, per = per_job(a);
  return P ? pool_run(pages_chunk, (void *)a, (int)(a->K * ((P + per - 1) / per)), (size_t)lay_out(a, &s, 0)) : 1;
}

typedef struct {
  const float *x;       // [K, G, N, P]
  const uint8_t *mask;  // [K, N, P], or [K, P] if is_shared
  float *out;           // [K, G, N]: log of the sum of e^x where the mask is set; -inf = set nowhere
  int64_t K, G, N, P, is_shared;
} Masses;
static void masses_chunk(void *arg, int c, char *room) {
  (void)room;
  const Masses *a = arg;
  const int64_t k = c / a->G, n_rows = a->N;
  for (int64_t n = 0; n < n_rows; n++) {
    const float *x = a->x + (c * n_rows + n) * a->P;
    const uint8_t *mask = a->mask + (a->is_shared ? k : k * n_rows + n) * a->P;
    F tops = splat(NEVER), sum = splat(0.f), one;
    I bad = {0};
    for (int pass = 0; pass < 2; pass++) {
      const float top = top_across(tops), base = top == NEVER ? 0.f : top;
      for (int64_t p = 0; p < a->P; p += 16) {
        for (int i = 0; i < 16; i++) one[i] = p + i < a->P && mask[p + i] ? x[p + i] : NEVER;
        if (pass) sum += exp2_((one - base) * LOG2E);
        else bad |= one != one, tops = larger(one, tops);
      }
    }
    int is_bad = 0;
    for (int i = 0; i < 16; i++) is_bad |= bad[i];
    const float top = top_across(tops);
    a->out[c * n_rows + n] = is_bad || top == -NEVER ? __builtin_nanf("") : top == NEVER ? NEVER : top + log2_(sum_across(sum)) / LOG2E;
  }
}
EXPORT(log_masses)(const void *arg) {
  const Masses *a = arg;
  return pool_run(masses_chunk, (void *)a, (int)(a->K * a->G), 0);
}
