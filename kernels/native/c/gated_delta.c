// The gated delta rule over rows in order (arXiv 2412.06464), the convolution before it, and elementwise functions.
//
// Columns of a head's state are independent, so a job is several columns of one head, for all rows: they stay in the
// first-level cache. A row is one fixed chain over channels, independent of other rows in the call.
#define COLUMNS 32  // per job: two vectors

typedef struct {
  const void *q, *k, *v;                // rows of K, K and H heads, in the model's dtype
  const float *g, *beta, *before;       // [N, H] log of the decay, and rate; [H, Dk, Dv] or null = zeros
  float *state;                         // [H, Dk, Dv], after the last row
  void *out;                            // [N, H, Dv] in the model's dtype
  int64_t N, H, K, Dk, Dv;
  int64_t q_step, k_step, v_step;       // numbers from row to row
  int32_t is_wide, is_normed;           // is_normed: queries and keys are scaled to length 1
} GatedDelta;

// A row of one head, times `by`, scaled to length 1 before that if is_normed
static void delta_vector(const GatedDelta *a, const void *p, int64_t from, float by, float *to) {
  F squares = {0};
  for (int64_t i = 0; i < a->Dk; i += 16) {
    F x = get16((const char *)p + from * (a->is_wide ? 4 : 2), i, a->Dk - i, a->is_wide);
    store(to + i, x);
    squares = fma_(x, x, squares);
  }
  if (a->is_normed) by *= 1.f / __builtin_sqrtf(sum_across(squares) + 1e-6f);
  for (int64_t i = 0; i < a->Dk; i += 16) store(to + i, load(F, to + i) * by);
}
static void delta_row(const GatedDelta *a, int64_t n, int64_t h, int64_t column, const float *q, const float *k, float *s) {
  const int64_t left = a->Dv - column;
  const F decay = exp_(splat(a->g[n * a->H + h])), beta = splat(a->beta[n * a->H + h]);
  F held[4][2] = {0}, out[4][2] = {0}, delta[2];
  for (int64_t i = 0; i < a->Dk; i += 4)
    for (int j = 0; j < 4; j++)
      for (int c = 0; c < 2; c++) held[j][c] = fma_(load(F, s + (i + j) * COLUMNS + c * 16), splat(k[i + j]), held[j][c]);
  for (int c = 0; c < 2; c++) {
    if (left <= c * 16) { delta[c] = (F){0}; continue; }
    const F v = get16((const char *)a->v + (n * a->v_step + h * a->Dv + column) * (a->is_wide ? 4 : 2), c * 16, left - c * 16, a->is_wide);
    delta[c] = fma_(-decay, (held[0][c] + held[1][c]) + (held[2][c] + held[3][c]), v) * beta;
  }
  for (int64_t i = 0; i < a->Dk; i += 4)
    for (int j = 0; j < 4; j++)
      for (int c = 0; c < 2; c++) {
        float *at = s + (i + j) * COLUMNS + c * 16;
        F now = fma_(splat(k[i + j]), delta[c], load(F, at) * decay);
        store(at, now);
        out[j][c] = fma_(now, splat(q[i + j]), out[j][c]);
      }
  for (int c = 0; c < 2 && left > c * 16; c++)
    put16(a->out, (n * a->H + h) * a->Dv + column + c * 16, left - c * 16, (out[0][c] + out[1][c]) + (out[2][c] + out[3][c]), a->is_wide);
}
static void delta_job(void *arg, int job, char *room) {
  const GatedDelta *a = arg;
  const int64_t per = (a->Dv + COLUMNS - 1) / COLUMNS, h = job / per, column = job % per * COLUMNS, D = UP(a->Dk, 16);
  const int64_t there = a->Dv - column < COLUMNS ? a->Dv - column : COLUMNS, shared = h / (a->H / a->K);
  float *q = (float *)room, *k = q + D, *s = k + D;
  memset(s, 0, D * COLUMNS * 4);
  for (int64_t i = 0; a->before && i < a->Dk; i++)
    memcpy(s + i * COLUMNS, a->before + (h * a->Dk + i) * a->Dv + column, there * 4);
  for (int64_t n = 0; n < a->N; n++) {
    delta_vector(a, a->q, n * a->q_step + shared * a->Dk, 1.f / __builtin_sqrtf((float)a->Dk), q);
    delta_vector(a, a->k, n * a->k_step + shared * a->Dk, 1.f, k);
    delta_row(a, n, h, column, q, k, s);
  }
  for (int64_t i = 0; i < a->Dk; i++)
    memcpy(a->state + (h * a->Dk + i) * a->Dv + column, s + i * COLUMNS, there * 4);
}
EXPORT(gated_delta)(const GatedDelta *a) {
  const int64_t D = UP(a->Dk, 16);
  return pool_run(delta_job, (void *)a, (int)(a->H * ((a->Dv + COLUMNS - 1) / COLUMNS)), (2 + COLUMNS) * D * 4);
}

// ---- the convolution before it ----

typedef struct {
  const void *x, *w, *bias;     // [C, L], with rows before the call's; [C, W]; [C] or null
  void *y;                      // [N, C]: for the last N rows
  int64_t C, L, N, W;
  int32_t has_silu, is_wide;
} Conv;
INLINE float get1(const void *p, int64_t i, int is_wide) { return is_wide ? ((const float *)p)[i] : wide1(((const bf16 *)p)[i]); }
static void conv_job(void *arg, int job, char *) {
  const Conv *a = arg;
  const int64_t first = (int64_t)job * 64, last = first + 64 < a->C ? first + 64 : a->C;
  for (int64_t c = first; c < last; c += 16) {
    const int64_t there = last - c < 16 ? last - c : 16;
    for (int64_t n = 0; n < a->N; n++) {
      F sum = {0}, x = {0}, w = {0};
      for (int64_t t = 0; t < a->W; t++) {
        const int64_t at = a->L - a->N + n - a->W + 1 + t;
        for (int i = 0; at >= 0 && i < there; i++) {
          x[i] = get1(a->x, (c + i) * a->L + at, a->is_wide);
          w[i] = get1(a->w, (c + i) * a->W + t, a->is_wide);
        }
        sum = fma_(x, w, sum);
      }
      if (a->bias) sum += get16(a->bias, c, there, a->is_wide);
      sum = rounded(sum, a->is_wide);
      put16(a->y, n * a->C + c, there, a->has_silu ? activate(sum, 0) : sum, a->is_wide);
    }
  }
}
EXPORT(causal_conv)(const Conv *a) { return pool_run(conv_job, (void *)a, (int)((a->C + 63) / 64), 0); }

// ---- elementwise functions ----

INLINE F softplus_(F x) {
  const F e = exp_(pick(x > 20.f, splat(20.f), x)), u = 1.f + e;
  F y = e;
  for (int i = 0; i < 16; i++)
    if (u[i] != 1.f) y[i] = log2_(u[i]) / LOG2E * (e[i] / (u[i] - 1.f));
  return pick(x > 20.f, x, y);
}
typedef struct { const void *x; void *y; int64_t n; int function, is_wide; } Numbers;
static void numbers_job(void *arg, int job, char *) {
  const Numbers *a = arg;
  const int64_t last = ((int64_t)job + 1) * 4096 < a->n ? ((int64_t)job + 1) * 4096 : a->n;
  for (int64_t i = (int64_t)job * 4096; i < last; i += 16) {
    const F x = get16(a->x, i, last - i, a->is_wide);
    put16(a->y, i, last - i, a->function == 2 ? softplus_(x) : (a->function ? splat(1.f) : x) / (1.f + exp_(-x)), a->is_wide);
  }
}
// function 0 = silu, 1 = sigmoid, 2 = softplus
EXPORT(numbers)(const void *x, void *y, int64_t n, int function, int is_wide) {
  Numbers a = {x, y, n, function, is_wide};
  return pool_run(numbers_job, &a, (int)((n + 4095) / 4096), 0);
}
