// Linear layers. Each output of each row is one accumulator in one lane, which runs over k in order and is rounded once:
// nothing in it depends on how many rows or outputs come along, on the thread or on the place in a tile.
//
// A row's numbers are read 32 bits at a time: one fp32, or two bf16. Weights are packed in panels of 64 outputs,
// [ceil(N / 64)][S][64] such words with S = words of a row; outputs beyond N are zeros. A panel is one stream of memory
// and one chunk of work.
#include "lanes.h"
#include "pool.h"
#define PANEL 64
#define DEPTH 512  // words at a time when there are many rows: a stretch of a panel, 128 KiB, stays in cache for all of them
#define TALL 1024  // rows at a time, so that what they have summed up lies on the stack
#define KEEP(v) __asm__("" : "+r"(v))  // in a register, once for all lanes

typedef struct {
  const uint32_t *x, *w;
  const void *bias;  // [N], as y
  void *y;           // [M, N] bf16 or fp32
  long M, N, S;
  int is_wide;  // fp32
} Linear;

// rows x (vecs * 16) outputs over S words; `part` [rows][64] holds the sums between stretches
INLINE void tile(int is_wide, int rows, int vecs, const uint32_t *w, const uint32_t *x, long ldx, long S, float *part) {
  F acc[4][4];
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) acc[m][n] = load(F, part + m * PANEL + n * 16);
#pragma clang loop unroll(disable)
  for (long s = 0; s < S; s++) {
    U wv[4];
    for (int n = 0; n < vecs; n++) wv[n] = load(U, w + s * PANEL + n * 16);
    for (int m = 0; m < rows; m++) {
      uint32_t word = x[m * ldx + s];
      KEEP(word);
      float number;
      memcpy(&number, &word, 4);
      for (int n = 0; n < vecs; n++) acc[m][n] = is_wide ? fma_((F)wv[n], splat(number), acc[m][n]) : dot2(acc[m][n], wv[n], word);
    }
  }
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(part + m * PANEL + n * 16, acc[m][n]);
}
INLINE void rows_over_panel(int is_wide, long rows, const uint32_t *w, const uint32_t *x, long ldx, long S, float *part) {
  long m = 0;
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
  for (; rows - m >= 4; m += 4) tile(is_wide, 4, 4, w, x + m * ldx, ldx, S, part + m * PANEL);
#else  // 16 of half the width
  for (; rows - m >= 4; m += 4)
    for (int n = 0; n < PANEL; n += 16) tile(is_wide, 4, 1, w + n, x + m * ldx, ldx, S, part + m * PANEL + n);
#endif
  for (; m < rows; m++) tile(is_wide, 1, 4, w, x + m * ldx, ldx, S, part + m * PANEL);
}
static void linear_chunk(void *arg, int c) {
  const Linear *l = arg;
  const long n0 = (long)c * PANEL, width = l->N - n0 < PANEL ? l->N - n0 : PANEL, size = l->is_wide ? 4 : 2;
  const uint32_t *w = l->w + n0 * l->S;
  float part[(l->M < TALL ? l->M : TALL) * PANEL], bias[PANEL] = {0};
  for (long n = 0; l->bias && n < width; n++) bias[n] = l->is_wide ? ((const float *)l->bias)[n0 + n] : wide1(((const bf16 *)l->bias)[n0 + n]);
  for (long m0 = 0; m0 < l->M; m0 += TALL) {
    const long rows = l->M - m0 < TALL ? l->M - m0 : TALL, depth = rows <= 4 ? l->S : DEPTH;
    memset(part, 0, rows * PANEL * 4);
    for (long s = 0; s < l->S; s += depth) {
      const long here = l->S - s < depth ? l->S - s : depth;
      const uint32_t *x = l->x + m0 * l->S + s;
      if (l->is_wide) rows_over_panel(1, rows, w + s * PANEL, x, l->S, here, part);
      else rows_over_panel(0, rows, w + s * PANEL, x, l->S, here, part);
    }
    for (long m = 0; m < rows; m++)
      for (long n = 0; n < PANEL; n += 16) {
        F v = load(F, part + m * PANEL + n);
        if (l->bias) v += load(F, bias + n);
        H h = narrow(v);
        char *y = (char *)l->y + ((m0 + m) * l->N + n0 + n) * size;
        const void *from = l->is_wide ? (void *)&v : (void *)&h;
        if (n + 16 <= width) memcpy(y, from, 16 * size);
        else if (n < width) memcpy(y, from, (width - n) * size);
      }
  }
}
// x [M, K], w packed, bias [N] or null -> y [M, N]; all fp32 (S = K) or all bf16 (S = K / 2)
EXPORT(linear)(const void *x, const void *w, const void *bias, void *y, long M, long N, long S, int is_wide) {
  Linear l = {x, w, bias, y, M, N, S, is_wide};
  pool_run(linear_chunk, &l, (int)((N + PANEL - 1) / PANEL));
}
