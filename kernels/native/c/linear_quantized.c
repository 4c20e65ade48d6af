// Linear layers whose weights remain quantized to bytes or nibbles. As in linear.c an output is one fixed chain, and a
// panel of 64 outputs is contiguous memory and one chunk of work.
//
//   8 bits: [ceil(N / 64)][K / 4][64][4] bytes, q + 128;  w = scale[n] q
//   4 bits: [ceil(N / 64)][K / 8][64][4] bytes, the low nibbles for k = 8 j + 0 .. 3, the high ones for 4 .. 7;
//           w = scale[j, n] (q - 8) + zero[j, n] with (scale, zero) in [K / group][N][2]
//
// If the CPU multiplies bytes, a row of bf16 becomes two integer digits for each group: x = step (128 high + low), step
// a power of two. Numbers within 2^6 of their group's largest are exact, others are off by at most 2^-14 of it. Sums of
// integers are exact in any order. Otherwise, and for fp32, codes are converted to fp32: a chain over k, then the
// scale.
#include "linear.c"  // for its tiles
#define STRETCH 32  // inputs whose codes are converted at a time

typedef struct {
  const Output *outputs;
  int64_t first;          // rows from `first` on; scale, w, y, N: of the chunk's output
  const void *x, *scale;  // bf16 or fp32, as y
  const uint8_t *w;
  void *y;
  int64_t M, N, K, group;  // 8 bits: the inputs that share a step
  int bits, is_wide;
  float *rows, *sums;  // x in fp32, [K / stretch][M][stretch]; sums over groups [K / group][M]
  int64_t stretch;
  int8_t *high, *low;         // [K / group][M][group]
  float *step;                // [K / group][M]
  int32_t *of_high, *of_low;  // sums of the digits, shaped as step
} Packed;

INLINE float number(const void *p, int64_t i, int is_wide) { return is_wide ? ((const float *)p)[i] : wide1(((const bf16 *)p)[i]); }
INLINE int64_t outputs(const Packed *p, int c) { return p->N - c * PANEL < PANEL ? p->N - c * PANEL : PANEL; }
INLINE const uint8_t *panel(const Packed *p, int c) { return p->w + c * PANEL * p->K * p->bits / 8; }
// 16 pairs of (scale, zero) of group j, from output n on
INLINE void pair_of(const Packed *p, int64_t j, int64_t n, F *scale, F *zero) {
  const int64_t at = (j * p->N + n) * 2;
  if (p->is_wide) {
    F a = load(F, (const float *)p->scale + at), b = load(F, (const float *)p->scale + at + 16);
    *scale = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *zero = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  } else {
    U both = load(U, (const bf16 *)p->scale + at);
    *scale = (F)(both << 16), *zero = (F)(both & 0xffff0000u);
  }
}
// Store one row's 16 outputs from n on, times their scales if each output has one
INLINE void put(const Packed *p, int64_t m, int64_t n, F v) {
  const int64_t here = p->N - n < 16 ? p->N - n : 16, size = p->is_wide ? 4 : 2;
  if (p->bits == 8) {
    float scale[16] = {0};
    for (int64_t i = 0; i < here; i++) scale[i] = number(p->scale, n + i, p->is_wide);
    v *= load(F, scale);
  }
  H h = narrow(v);
  memcpy((char *)p->y + (m * p->N + n) * size, p->is_wide ? (void *)&v : (void *)&h, here * size);
}

// ---- codes converted to fp32 ----

// The i-th code in each of 16 words
INLINE F code(int bits, U w, int i) {
  const int shift = bits == 8 ? 8 * i : i < 4 ? 8 * i : 8 * (i - 4) + 4;
  return __builtin_convertvector((I)(w >> shift & (bits == 8 ? 255 : 15)) - (bits == 8 ? 128 : 8), F);
}
// Few rows: codes are converted in registers
INLINE void few_rows(int bits, int rows, const uint32_t *w, const float *x, int64_t k, float *part) {
  const int each = 32 / bits, vecs = rows == 1 ? 4 : VECS;
  for (int n0 = 0; n0 < 4; n0 += vecs) {
    F acc[4][4];
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < vecs; n++) acc[m][n] = load(F, part + m * PANEL + (n0 + n) * 16);
#pragma clang loop unroll(disable)
    for (int64_t s = 0; s < k; s += each)
      for (int n = 0; n < vecs; n++) {
        const U word = load(U, w + s / each * PANEL + (n0 + n) * 16);
        for (int i = 0; i < each; i++) {
          const F c = code(bits, word, i);
          for (int m = 0; m < rows; m++) acc[m][n] = fma_(c, splat(x[m * k + s + i]), acc[m][n]);
        }
      }
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < vecs; n++) store(part + m * PANEL + (n0 + n) * 16, acc[m][n]);
  }
}
INLINE void widen_codes(int bits, const uint32_t *w, float *wide, int64_t k) {
  const int each = 32 / bits;
  for (int64_t s = 0; s < k; s += each, w += PANEL)
    for (int n = 0; n < 4; n++) {
      const U word = load(U, w + n * 16);
      for (int i = 0; i < each; i++) store(wide + (n / VECS * k + s + i) * VECS * 16 + n % VECS * 16, code(bits, word, i));
    }
}
INLINE void widened(int bits, const Packed *p, int c) {
  float part[p->M * PANEL], total[bits == 4 ? p->M * PANEL : 1], wide[STRETCH * PANEL];
  const uint32_t *w = (const uint32_t *)panel(p, c);
  const int64_t width = outputs(p, c), n0 = c * PANEL;
  memset(part, 0, sizeof part), memset(total, 0, sizeof total);
  for (int64_t k = 0; k < p->K; k += p->stretch, w += p->stretch * bits / 32 * PANEL) {
    const float *x = p->rows + k * p->M;
    switch (p->M) {
      case 1: few_rows(bits, 1, w, x, p->stretch, part); break;
      case 2: few_rows(bits, 2, w, x, p->stretch, part); break;
      case 3: few_rows(bits, 3, w, x, p->stretch, part); break;
      default:
        widen_codes(bits, w, wide, p->stretch);
        rows_over_panel(1, p->M, 1, (const uint32_t *)wide, (const uint32_t *)x, p->stretch, p->stretch, part);
    }
    const int64_t j = k / p->group;
    if (bits == 8 || (k + p->stretch) % p->group) continue;
    for (int64_t n = 0; n < width; n += 16) {
      F scale, zero;
      pair_of(p, j, n0 + n, &scale, &zero);
      for (int64_t m = 0; m < p->M; m++) {
        float *to = total + m * PANEL + n;
        store(to, fma_(splat(p->sums[j * p->M + m]), zero, fma_(load(F, part + m * PANEL + n), scale, load(F, to))));
      }
    }
    memset(part, 0, sizeof part);
  }
  for (int64_t m = 0; m < p->M; m++)
    for (int64_t n = 0; n < width; n += 16) put(p, m, n0 + n, load(F, (bits == 8 ? part : total) + m * PANEL + n));
}
// Return the job with the output of chunk c; c becomes the number of the panel
static Packed packed_of(const void *job, int *c) {
  Packed p = *(const Packed *)job;
  const Output *o = output_of(p.outputs, c);
  p.scale = o->scale, p.w = o->w, p.N = o->N, p.y = (char *)o->y + p.first * o->N * (p.is_wide ? 4 : 2);
  return p;
}
static void widened_chunk(void *arg, int c, char *) {
  const Packed mine = packed_of(arg, &c), *p = &mine;
  if (p->bits == 8) widened(8, p, c);
  else widened(4, p, c);
}
static void rows_chunk(void *arg, int m, char *) {
  const Packed *p = arg;
  for (int64_t k = 0; k < p->K; k += p->stretch)
    for (int64_t i = 0; i < p->stretch; i++) p->rows[k * p->M + m * p->stretch + i] = number(p->x, m * p->K + k + i, p->is_wide);
  for (int64_t j = 0; j < p->K / p->group; j++) {
    float sum = 0;
    for (int64_t k = j * p->group; k < (j + 1) * p->group; k++) sum += number(p->x, m * p->K + k, p->is_wide);
    p->sums[j * p->M + m] = sum;
  }
}

// ---- two digits ----

#if defined(__AVX512BF16__)
#define HAS_DIGITS 1
static void digits_chunk(void *arg, int m, char *) {
  const Packed *p = arg;
  const bf16 *x = (const bf16 *)p->x + m * p->K;
  for (int64_t at = m; at < p->M * (p->K / p->group); at += p->M, x += p->group) {
    int8_t *high = p->high + at * p->group, *low = p->low + at * p->group;
    U top = {0};
    for (int64_t k = 0; k < p->group; k += 16) top = __builtin_elementwise_max(top, __builtin_convertvector(load(H, x + k), U) & 0x7f80);
    const int e = (int)(__builtin_reduce_max(top) >> 7), least = e < 20 ? 20 : e;  // biased exponent of the largest number
    const uint32_t step = e == 255 ? 0x7fc00000u : (uint32_t)(least - 13) << 23, inverse = (uint32_t)(254 - (least - 13)) << 23;
    float times;
    memcpy(&times, &inverse, 4);
    I of_high = {0}, of_low = {0};
    for (int64_t k = 0; k < p->group; k += 16) {
      const I q = (I)_mm512_cvtps_epi32((__m512)(wide(load(H, x + k)) * times)), h = q >> 7, l = q & 127;
      of_high += h, of_low += l;
      _mm_storeu_si128((void *)(high + k), _mm512_cvtepi32_epi8((__m512i)h));
      _mm_storeu_si128((void *)(low + k), _mm512_cvtepi32_epi8((__m512i)l));
    }
    memcpy(p->step + at, &step, 4);
    p->of_high[at] = __builtin_reduce_add(of_high), p->of_low[at] = __builtin_reduce_add(of_low);
  }
}
INLINE __m512i four(const int8_t *x) {  // the same four bytes in all lanes
  __m512i v = _mm512_set1_epi32(*(const int *)x);
  __asm__("" : "+v"(v));
  return v;
}
// Groups from j to end for rows from m0 on x (vecs * 16) outputs from n0 of panel c, added to `part` [M][64]
INLINE void digits_tile(int bits, int rows, int vecs, const Packed *p, int c, int64_t j, int64_t end, int64_t m0, int64_t n0,
                        float *part) {
  const int64_t group = p->group, each = 32 / bits;
  const uint8_t *w = panel(p, c) + j * group / each * PANEL * 4 + n0 * 4;
  F total[4][4];
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) total[m][n] = load(F, part + (m0 + m) * PANEL + n0 + n * 16);
  for (; j < end; j++) {
    const int64_t of = j * p->M + m0;
    __m512i high[4][4], low[4][4];
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < vecs; n++) {  // bytes are unsigned: subtract their middle in advance
        high[m][n] = _mm512_set1_epi32(p->of_high[of + m] * (bits == 8 ? -128 : -8));
        low[m][n] = _mm512_set1_epi32(p->of_low[of + m] * (bits == 8 ? -128 : -8));
      }
    const int8_t *xh = p->high + of * group, *xl = p->low + of * group;
#pragma clang loop unroll(disable)
    for (int64_t k = 0; k < group; k += each, w += PANEL * 4) {
      __m512i wv[2][4];
      for (int n = 0; n < vecs; n++) {
        wv[0][n] = _mm512_loadu_si512(w + n * 64);
        if (bits == 8) continue;
        wv[1][n] = _mm512_and_si512(_mm512_srli_epi16(wv[0][n], 4), _mm512_set1_epi8(15));
        wv[0][n] = _mm512_and_si512(wv[0][n], _mm512_set1_epi8(15));
      }
      for (int half = 0; half < 8 / bits; half++)
        for (int m = 0; m < rows; m++) {
          const __m512i h = four(xh + m * group + k + half * 4), l = four(xl + m * group + k + half * 4);
          for (int n = 0; n < vecs; n++) {
            high[m][n] = _mm512_dpbusd_epi32(high[m][n], wv[half][n], h);
            low[m][n] = _mm512_dpbusd_epi32(low[m][n], wv[half][n], l);
          }
        }
    }
    for (int n = 0; n < vecs; n++) {
      const int64_t at = c * PANEL + n0 + n * 16;
      F scale = {0}, zero = {0};
      if (bits == 4 && at < p->N) pair_of(p, j, at, &scale, &zero);
      for (int m = 0; m < rows; m++) {
        const F v = __builtin_convertvector(((I)high[m][n] << 7) + (I)low[m][n], F);
        if (bits == 8) total[m][n] = fma_(v, splat(p->step[of + m]), total[m][n]);
        else {  // products with a power of two are exact
          total[m][n] = fma_(v * p->step[of + m], scale, total[m][n]);
          total[m][n] = fma_(splat((float)(p->of_high[of + m] * 128 + p->of_low[of + m]) * p->step[of + m]), zero, total[m][n]);
        }
      }
    }
  }
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) store(part + (m0 + m) * PANEL + n0 + n * 16, total[m][n]);
}
#if HAS_TILES
#include "linear_quantized_tiles.h"
#else
#define FEW_DIGITS INT64_MAX
#define digits_by_tiles(bits, p, c, part)
#endif
INLINE void digits_panel(int bits, const Packed *p, int c) {
  const int64_t groups = p->K / p->group, some = DEPTH * 32 / bits / p->group;  // as many as stay in the first-level cache
  float part[p->M * PANEL];
  memset(part, 0, sizeof part);
  if (p->M >= FEW_DIGITS) digits_by_tiles(bits, p, c, part);
  else for (int64_t j = 0, end; j < groups; j = end) {
    end = groups - j < some || p->M <= 2 ? groups : j + some;
    for (int64_t m = 0; m < p->M; m += 2)
      if (p->M - m > 1) digits_tile(bits, 2, 4, p, c, j, end, m, 0, part);
      else digits_tile(bits, 1, 4, p, c, j, end, m, 0, part);
  }
  for (int64_t m = 0; m < p->M; m++)
    for (int64_t n = 0; n < outputs(p, c); n += 16) put(p, m, c * PANEL + n, load(F, part + m * PANEL + n));
}
static void digits_panel_chunk(void *arg, int c, char *) {
  const Packed mine = packed_of(arg, &c), *p = &mine;
  if (p->bits == 8) digits_panel(8, p, c);
  else digits_panel(4, p, c);
}
#else
#define HAS_DIGITS 0
#define digits_chunk rows_chunk
#define digits_panel_chunk widened_chunk
#endif

// x [M, K] -> n outputs, all bf16 or all fp32, weights quantized alike. K is a multiple of 16; with 4 bits of the
// group, N of 16.
static int packed_all(const void *x, const Output *outputs, int n, int64_t M, int64_t K, int bits, int64_t group, int is_wide) {
  const int by_digits = HAS_DIGITS && !is_wide, size = is_wide ? 4 : 2;
  const int64_t even = K % 128 == 0 ? 128 : K % 64 == 0 ? 64 : K % 32 == 0 ? 32 : 16, most = M < TALL ? M : TALL;
  char *scratch = take_room(OF_ROWS, most * K * 4 + most * (K / (bits == 8 ? even : group)) * 12 + 16 * 128);  // tiles read 16 rows
  if (!scratch) return 0;
  for (int64_t m = 0; m < M; m += TALL) {
    const int64_t rows = M - m < TALL ? M - m : TALL;
    Packed p = {.outputs = outputs, .first = m, .x = (const char *)x + m * K * size, .M = rows, .K = K};
    p.group = bits == 8 ? even : group, p.bits = bits, p.is_wide = is_wide;
    const int64_t steps = rows * (K / p.group);
    p.stretch = even < STRETCH ? even : STRETCH;
    p.rows = (float *)scratch, p.sums = p.rows + rows * K;
    p.step = (float *)scratch, p.of_high = (int32_t *)p.step + steps, p.of_low = p.of_high + steps;
    p.high = (int8_t *)(p.of_low + steps), p.low = p.high + rows * K;
    const job_fn before = by_digits ? digits_chunk : rows_chunk;
    if (rows >= MANY) pool_run(before, &p, (int)rows, 0);
    else for (int r = 0; r < rows; r++) before(&p, r, 0);
    pool_run(by_digits ? digits_panel_chunk : widened_chunk, &p, panels(outputs, n), 0);
  }
  give_room(OF_ROWS, scratch);
  return 1;
}
// x [M, K], quantized w, scales -> y [M, N]
EXPORT(linear_quantized)(const void *x, const void *w, const void *scale, void *y, int64_t M, int64_t N, int64_t K, int bits, int64_t group, int is_wide) {
  return packed_all(x, &(Output){w, scale, 0, y, N}, 1, M, K, bits, group, is_wide);
}
