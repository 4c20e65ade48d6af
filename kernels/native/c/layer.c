// Operations of a decoder layer between the products and the attention: norms, rotary embedding, activations and sums;
// and a layer in two calls, before its attention and after it.
//
// Numbers are rounded where PyTorch rounds them, so that bits equal those of the replaced modules, except for
// activations, whose e^x differs. Each row is computed by itself.
#include "lanes.h"
#include "pool.h"
#define BAND 4  // rows per chunk of work
#define LOG2E 1.44269504088896341f
#define LN2 0.693147180559945309f

typedef struct {  // arguments of `linear`, or, with a format, of `linear_quantized`
  const void *w, *scale, *bias;
  int64_t N, K;
  const Format *format;
} Product;
typedef struct {
  const void *w;
  int64_t H;  // numbers per row
  float eps;
  int32_t form;   // 0: w * round(x / rms), 1: (1 + w) * (x / rms), 2: w * (x / rms)
  int32_t lanes;  // lanes of the vectors in which squares are summed
  int32_t is_wide;
} Norm;
typedef struct { Product gate, up, down; int32_t act, is_wide; } Mlp;
typedef struct {
  Norm first, second;                      // before attention and MLP
  Norm of_q, of_k, of_attention, of_mlp;  // of each head, and of the outputs of attention and MLP; w null: no norm
  Product q, k, v, o;
  Mlp mlp;
  int64_t D;  // size of a head
} Layer;

// 16 numbers from index i on, of which n exist; the others are zeros
INLINE F get16(const void *p, int64_t i, int64_t n, int is_wide) {
  if (n >= 16) return is_wide ? load(F, (const float *)p + i) : wide(load(H, (const bf16 *)p + i));
  F v = {0};
  H h = {0};
  if (is_wide) memcpy(&v, (const float *)p + i, n * 4);
  else memcpy(&h, (const bf16 *)p + i, n * 2);
  return is_wide ? v : wide(h);
}
INLINE void put16(void *p, int64_t i, int64_t n, F v, int is_wide) {
  H h = narrow(v);
  if (is_wide) memcpy((float *)p + i, &v, (n >= 16 ? 16 : n) * 4);
  else memcpy((bf16 *)p + i, &h, (n >= 16 ? 16 : n) * 2);
}
INLINE F rounded(F v, int is_wide) { return is_wide ? v : wide(narrow(v)); }

typedef void (*row_fn)(const void *job, int64_t row);
typedef struct { row_fn fn; const void *job; int64_t M; } Rowwise;
static void band_of_rows(void *arg, int c, char *) {
  const Rowwise *r = arg;
  for (int64_t m = (int64_t)c * BAND; m < r->M && m < ((int64_t)c + 1) * BAND; m++) r->fn(r->job, m);
}
static void by_row(row_fn fn, const void *job, int64_t M) {
  Rowwise r = {fn, job, M};
  pool_run(band_of_rows, &r, (int)((M + BAND - 1) / BAND), 0);
}

// ---- norms ----

// Sum of squares in PyTorch's order: four vectors side by side, in runs of 16 whose sums are added in levels
INLINE float squares(const float *x, int64_t n, int64_t lanes) {
  const int64_t vectors = n / lanes, rows = vectors / 4, wide = 4 * lanes;
  float sum[4][64] = {0}, all = 0;
  for (int64_t i = 0; i < rows;) {
    for (int64_t c = 0; c < wide; c++) sum[0][c] += x[i * wide + c] * x[i * wide + c];
    if (++i % 16) continue;
    for (int level = 1; level < 4; level++) {
      for (int64_t c = 0; c < wide; c++) sum[level][c] += sum[level - 1][c], sum[level - 1][c] = 0;
      if (i >> level * 4 & 15) break;
    }
  }
  for (int level = 1; level < 4; level++)
    for (int64_t c = 0; c < wide; c++) sum[0][c] += sum[level][c];
  for (int64_t v = rows * 4; v < vectors; v++)
    for (int64_t c = 0; c < lanes; c++) sum[0][c] += x[v * lanes + c] * x[v * lanes + c];
  for (int k = 1; k < 4; k++)
    for (int64_t c = 0; c < lanes; c++) sum[0][c] += sum[0][k * lanes + c];
  for (int64_t i = vectors * lanes; i < n; i++) all += x[i] * x[i];
  for (int64_t c = 0; c < lanes; c++) all += sum[0][c];
  return all;
}
static void norm_row(const Norm *w, const void *x, void *y) {
  const int64_t n = w->H;
  const int is_wide = w->is_wide;
  float row[n + 16];
  for (int64_t i = 0; i < n; i += 16) store(row + i, get16(x, i, n - i, is_wide));
  const float sum = w->lanes == 16 ? squares(row, n, 16) : w->lanes == 8 ? squares(row, n, 8) : squares(row, n, 4);
  const F by = 1.f / __builtin_elementwise_sqrt(splat(sum / (float)n + w->eps));
  for (int64_t i = 0; i < n; i += 16) {
    F v = load(F, row + i) * by, by_channel = get16(w->w, i, n - i, is_wide);
    if (w->form == 0) v = rounded(v, is_wide);
    if (w->form == 1) by_channel += 1.f;
    put16(y, i, n - i, v * by_channel, is_wide);
  }
}
typedef struct { const Norm *w; const char *x; char *y; } NormJob;
static void norm_job(const void *job, int64_t m) {
  const NormJob *j = job;
  const int64_t bytes = j->w->H * (j->w->is_wide ? 4 : 2);
  norm_row(j->w, j->x + m * bytes, j->y + m * bytes);
}
// x [M, H] -> y [M, H], which may be the same
EXPORT(rms_norm)(const Norm *w, const void *x, void *y, int64_t M) {
  NormJob j = {w, x, y};
  by_row(norm_job, &j, M);
  return 1;
}

// ---- the MLP ----

// e^x. Outside of the limits the correction is 0, because with infinity it would be NaN
INLINE F exp_(F x) {
  const F log2e = splat(LOG2E), y = x * log2e, lost = fma_(x, splat(1.925963033500e-8f), fma_(x, log2e, -y));
  const F held = pick(y > 126.f, splat(126.f), y), e = exp2_(held);
  return fma_(e * LN2, pick((y > 126.f) | (y < -126.f), splat(0.f), lost), e);
}
// Complementary error function, with a relative error of 1.2e-7 (Numerical Recipes, Chebyshev)
INLINE F erfc_(F x) {
  static const float C[] = {.17087277f, -.82215223f, 1.48851587f, -1.13520398f, .27886807f, -.18628806f, .09678418f, .37409196f, 1.00002368f};
  const F z = (F)((U)x & 0x7fffffffu), t = 1.f / (1.f + .5f * z);
  F y = splat(C[0]);
  for (int i = 1; i < 9; i++) y = fma_(y, t, splat(C[i]));
  y = t * exp_(fma_(y, t, splat(-1.26551223f)) - z * z);
  return pick(x < 0.f, 2.f - y, y);
}
INLINE F activate(F x, int act) {
  if (act == 0) return x / (1.f + exp_(-x));  // silu
  if (act == 1) return .5f * x * (1.f + tanh_(.797884560802865356f * (x + .044715f * x * x * x)));
  return .5f * x * erfc_(-.707106781186547524f * x);  // gelu
}
typedef struct { const Mlp *w; char *gate; const char *up; } Gated;
static void gated_row(const void *job, int64_t m) {
  const Gated *j = job;
  const int64_t n = j->w->gate.N;
  const int is_wide = j->w->is_wide;
  char *g = j->gate + m * n * (is_wide ? 4 : 2);
  const char *u = j->up + m * n * (is_wide ? 4 : 2);
  for (int64_t i = 0; i < n; i += 16) {
    const F a = rounded(activate(get16(g, i, n - i, is_wide), j->w->act), is_wide);
    put16(g, i, n - i, a * get16(u, i, n - i, is_wide), is_wide);
  }
}
typedef struct { const char *a; char *y; int64_t n, step; int is_wide; } Sum;
static void sum_row(const void *job, int64_t m) {
  const Sum *j = job;
  const int64_t size = j->is_wide ? 4 : 2;
  const char *a = j->a + m * j->step * size;
  char *y = j->y + m * j->n * size;
  for (int64_t i = 0; i < j->n; i += 16)
    put16(y, i, j->n - i, get16(a, i, j->n - i, j->is_wide) + get16(y, i, j->n - i, j->is_wide), j->is_wide);
}
// Add a [M, n], or with step 0 [n], to y [M, n]
static void add(const void *a, void *y, int64_t M, int64_t n, int64_t step, int is_wide) {
  Sum j = {a, y, n, step, is_wide};
  by_row(sum_row, &j, M);
}
// n products of the same rows, those of one weight format in one job
static int products(const Product *const *w, void *const *y, int n, const void *x, int64_t M, int is_wide) {
  Output some[3];
  for (int i = 0, end; i < n; i = end) {
    const Product *p = w[i];
    for (end = i; end < n && w[end]->format == p->format; end++)
      some[end - i] = (Output){w[end]->w, w[end]->scale, w[end]->bias, y[end], w[end]->N};
    if (!(p->format ? packed_all(x, some, end - i, M, p->K, p->format, is_wide)
                    : linear_all(x, some, end - i, M, is_wide ? p->K : p->K / 2, is_wide))) return 0;
    for (int k = i; k < end; k++)
      if (p->format && w[k]->bias) add(w[k]->bias, y[k], M, w[k]->N, 0, is_wide);
  }
  return 1;
}
static int product(const Product *w, const void *x, void *y, int64_t M, int is_wide) { return products(&w, &y, 1, x, M, is_wide); }
static int mlp_some(const Mlp *w, const void *x, void *y, int64_t M) {
  const size_t bytes = (size_t)M * w->gate.N * (w->is_wide ? 4 : 2);
  char *gate = take_room(OF_MLP, 2 * bytes), *up = gate + (gate ? bytes : 0);
  int is_done = gate && products((const Product *[]){&w->gate, &w->up}, (void *[]){gate, up}, 2, x, M, w->is_wide);
  if (is_done) {
    Gated j = {w, gate, up};
    by_row(gated_row, &j, M);
    is_done = product(&w->down, gate, y, M, w->is_wide);
  }
  give_room(OF_MLP, gate);
  return is_done;
}
// As many rows at a time as products take, so that work memory does not grow with a long prompt.
#define BY_BLOCKS(some) \
  for (int64_t m = 0; m < M; m += TALL) { \
    const int64_t rows = M - m < TALL ? M - m : TALL; \
    if (!(some)) return 0; \
  } \
  return 1
#define AT(t, width) ((char *)(t) + m * (width) * size)
// x [M, E] -> y [M, E]: down(act(gate(x)) * up(x)); act 0 = silu, 1 = gelu by tanh, 2 = gelu
EXPORT(mlp)(const Mlp *w, const void *x, void *y, int64_t M) {
  const int64_t size = w->is_wide ? 4 : 2;
  BY_BLOCKS(mlp_some(w, AT(x, w->gate.K), AT(y, w->down.N), rows));
}

// ---- a layer ----

typedef struct { const Norm *norm; const char *cos, *sin; char *x; int64_t heads, D, R; int is_wide; } Turn;
// Norm a row's heads and rotate them in place: x * cos + (-b, a) * sin over the halves a, b of the first R channels
static void turn_row(const void *job, int64_t m) {
  const Turn *j = job;
  const int is_wide = j->is_wide;
  const int64_t size = is_wide ? 4 : 2, half = j->R / 2;
  const char *cos = j->cos + m * j->R * size, *sin = j->sin + m * j->R * size;
  for (int64_t h = 0; h < j->heads; h++) {
    char *a = j->x + (m * j->heads + h) * j->D * size, *b = a + half * size;
    if (j->norm->w) norm_row(j->norm, a, a);
    for (int64_t i = 0; i < half; i += 16) {
      const int64_t n = half - i;
      const F low = get16(a, i, n, is_wide), high = get16(b, i, n, is_wide);
#define BY(v, t, at) rounded((v) * get16(t, at, n, is_wide), is_wide)
      put16(a, i, n, BY(low, cos, i) + BY(-high, sin, i), is_wide);
      put16(b, i, n, BY(high, cos, half + i) + BY(low, sin, half + i), is_wide);
    }
  }
}
static int before_some(const Layer *l, const void *x, const void *cos, const void *sin, void *q, void *k, void *v, int64_t M, int64_t R) {
  const int is_wide = l->mlp.is_wide;
  void *normed = take_room(OF_LAYER, (size_t)M * l->first.H * (is_wide ? 4 : 2));
  const int is_done = normed && JOIN(rms_norm, LEVEL)(&l->first, x, normed, M) &&
                      products((const Product *[]){&l->q, &l->k, &l->v}, (void *[]){q, k, v}, 3, normed, M, is_wide);
  give_room(OF_LAYER, normed);
  if (!is_done) return 0;
  Turn of_q = {&l->of_q, cos, sin, q, l->q.N / l->D, l->D, R, is_wide}, of_k = {&l->of_k, cos, sin, k, l->k.N / l->D, l->D, R, is_wide};
  by_row(turn_row, &of_q, M);
  by_row(turn_row, &of_k, M);
  return 1;
}
// x [M, E] -> q [M, heads, D], k, v [M, KV heads, D]; cos, sin [M, R], R = 0: no rotation
EXPORT(layer_before)(const Layer *l, const void *x, const void *cos, const void *sin, void *q, void *k, void *v, int64_t M, int64_t R) {
  const int64_t size = l->mlp.is_wide ? 4 : 2;
  BY_BLOCKS(before_some(l, AT(x, l->first.H), AT(cos, R), AT(sin, R), AT(q, l->q.N), AT(k, l->k.N), AT(v, l->v.N), rows, R));
}
static int after_some(const Layer *l, const void *x, const void *attended, void *y, int64_t M) {
  const int is_wide = l->mlp.is_wide;
  const int64_t E = l->first.H;
  const size_t bytes = (size_t)M * E * (is_wide ? 4 : 2);
  char *middle = take_room(OF_LAYER, 2 * bytes), *normed = middle + (middle ? bytes : 0);
  int is_done = middle && product(&l->o, attended, middle, M, is_wide);
  if (is_done) {
    if (l->of_attention.w) JOIN(rms_norm, LEVEL)(&l->of_attention, middle, middle, M);
    add(x, middle, M, E, E, is_wide);
    JOIN(rms_norm, LEVEL)(&l->second, middle, normed, M);
    is_done = mlp_some(&l->mlp, normed, y, M);
  }
  if (is_done) {
    if (l->of_mlp.w) JOIN(rms_norm, LEVEL)(&l->of_mlp, y, y, M);
    add(middle, y, M, E, E, is_wide);
  }
  give_room(OF_LAYER, middle);
  return is_done;
}
// Attention output [M, heads, D], and x [M, E] -> y [M, E]
EXPORT(layer_after)(const Layer *l, const void *x, const void *attended, void *y, int64_t M) {
  const int64_t size = l->mlp.is_wide ? 4 : 2;
  BY_BLOCKS(after_some(l, AT(x, l->first.H), AT(attended, l->o.K), AT(y, l->first.H), rows));
}
