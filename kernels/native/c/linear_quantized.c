// Linear layers whose weights remain quantized to codes of 2 to 8 bits. As in linear.c an output is one fixed chain, and
// a panel of 64 outputs is contiguous memory and one chunk of work.
//
// Codes: [ceil(N / 64)][K / 32][bits][64] words. The low 8, 4 or 2 bits of a code and the bits above them are separate
// planes: a word of a plane of b bits holds inputs 4 t + i of one output in byte i, from bit b t % 8 on, 32 / b inputs in
// a word; `codes` has the order of words. A weight is scale (code - offset) + zero, where a table may replace the code. Scales, by format:
//
//   group 0   scale [N], in y's dtype; no zero
//   span 0    (scale, zero) [K / group][N][2], in y's dtype
//   else      bytes of each panel, by `span` inputs: d [64] in fp16 or bf16 and, with has_min, least [64]; then by group
//             a factor of d [64] and one of least [64], as bytes or as nibbles of one byte. zero = -least
//
// If the CPU multiplies bytes, a row of bf16 becomes two integer digits for each group: x = step (128 high + low), step
// a power of two. Numbers within 2^6 of their group's largest are exact, others are off by at most 2^-14 of it. Sums of
// integers are exact in any order. With AVX2 alone the two are one digit of 16 bits, x = step high, in the memory of
// both: the same sums and bits. Otherwise, and for fp32, codes are converted to fp32: a chain over k, then the scale.
#include "linear.c"  // for its tiles
#define STRETCH 32  // inputs whose codes are converted at a time
#define BLOCK 256   // inputs whose codes are converted to bytes at a time: 16 KiB stay in the first-level cache

typedef struct {
  int64_t bits, group, offset, span, has_min, factor_bits, is_bf16, has_table;
  uint8_t table[16];
} Format;
typedef struct {
  const Output *outputs;
  const Format *format;
  int64_t first;          // rows from `first` on; scale, w, y, N: of the chunk's output
  const void *x, *scale;  // bf16 or fp32, as y, or bytes of a panel
  const uint32_t *w;      // of the chunk's panel, whose first output is `n0`
  void *y;
  int64_t M, N, K, n0, group;  // format->group, or the inputs that share a step
  int is_wide;
  int64_t of_factor, of_span, log;  // bytes of a group's factors, and of a span; log2 of groups in a span
  float *rows, *sums;  // x in fp32, [K / stretch][M][stretch]; sums over groups [K / group][M]
  int64_t stretch;
  int8_t *high, *low;         // [K / group][M][group]
  float *step;                // [K / group][M]
  int32_t *of_high, *of_low;  // sums of the digits, shaped as step
} Packed;

INLINE float number(const void *p, int64_t i, int is_wide) { return is_wide ? ((const float *)p)[i] : wide1(((const bf16 *)p)[i]); }
INLINE int64_t outputs(const Packed *p) { return p->N - p->n0 < PANEL ? p->N - p->n0 : PANEL; }
INLINE int has_zero(const Packed *p) { return !p->format->span || p->format->has_min; }
// Scales and zeros of the groups j to end -> to [groups][2][64]
static void pairs_of(const Packed *p, int64_t j, int64_t end, float *to) {
  const int64_t span = p->format->span, has_min = p->format->has_min, bits = p->format->factor_bits, is_bf16 = p->format->is_bf16, in_span = (1 << p->log) - 1;
  F d = {0}, least = {0};
  for (int n = 0; n < PANEL; n += 16)
    for (int64_t i = j; i < end; i++) {
      F scale = {0}, zero = {0};
      if (span) {
        const char *at = (const char *)p->scale + (i >> p->log) * p->of_span, *by = at + 2 * PANEL * (1 + has_min) + (i & in_span) * p->of_factor + n;
        if (i == j || !(i & in_span)) {
          d = is_bf16 ? wide(load(H, at + 2 * n)) : __builtin_convertvector(load(H16, at + 2 * n), F);
          if (has_min) least = -__builtin_convertvector(load(H16, at + 2 * PANEL + 2 * n), F);
        }
        scale = d, zero = least;
        if (bits == 8) scale *= __builtin_convertvector(load(B, by), F);
        if (bits == 8 && has_min) zero *= __builtin_convertvector(load(B, by + PANEL), F);
        if (bits == 4) scale *= __builtin_convertvector(load(B, by) & 15, F), zero *= __builtin_convertvector(load(B, by) >> 4 & 15, F);
      } else if (p->n0 + n < p->N) {
        const int64_t at = (i * p->N + p->n0 + n) * 2;
        if (p->is_wide) {
          F a = load(F, (const float *)p->scale + at), b = load(F, (const float *)p->scale + at + 16);
          scale = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
          zero = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        } else {
          U both = load(U, (const bf16 *)p->scale + at);
          scale = (F)(both << 16), zero = (F)(both & 0xffff0000u);
        }
      }
      store(to + (i - j) * 2 * PANEL + n, scale), store(to + (i - j) * 2 * PANEL + PANEL + n, zero);
    }
}
// Store one row's 16 outputs from n of the panel on, times their scales if each output has one
INLINE void put(const Packed *p, int64_t m, int64_t n, F v) {
  n += p->n0;
  const int64_t here = p->N - n < 16 ? p->N - n : 16, size = p->is_wide ? 4 : 2;
  if (!p->format->group) {
    float scale[16] = {0};
    for (int64_t i = 0; i < here; i++) scale[i] = number(p->scale, n + i, p->is_wide);
    v *= load(F, scale);
  }
  H h = narrow(v);
  memcpy((char *)p->y + (m * p->N + n) * size, p->is_wide ? (void *)&v : (void *)&h, here * size);
}

// ---- codes ----
// Shifts of codes are then constants, and sums remain in registers
#define UNROLL _Pragma("clang loop unroll(full)")

#define FORMATS(DO) DO(8, 0) DO(4, 0) DO(4, 1) DO(5, 0) DO(6, 0) DO(3, 0) DO(2, 0)  // bits, has a table
// The part of `bits` bits of inputs 4 t .. 4 t + 3, in word `at` of a unit
INLINE U plane(int bits, const uint32_t *w, int at, int t) { return load(U, w + at * PANEL) >> t * bits % 8 & 0x01010101u * ((1u << bits) - 1); }
// Inputs 4 t .. 4 t + 3 of a unit of 32 inputs in the bytes of each word, of 16 outputs from n on. A word of high bits
// is before the words of low bits with which it is read, so that memory is read in order.
INLINE U codes(int bits, int has_table, const Format *f, const uint32_t *w, int t, int n) {
  const int low = bits == 8 ? 8 : bits >= 4 ? 4 : 2, high = bits - low;
  U code = plane(low, w + n, t * low / 8 + (high == 2 ? 1 + t / 4 : high), t);
  if (high) code |= plane(high, w + n, high == 2 ? t / 4 * 3 : 0, t) << low;
  return has_table ? table_bytes(f->table, code) : code;
}
// Run DO(w, t) for `n` inputs, a multiple of 16, from input q of a panel on: w the words of their unit of 32 inputs, t 0
// or 4, as a constant, the first of 4 times 4 inputs
#define HALVES(bits, panel, q, n, DO) \
  for (int64_t here = (q), end_of = here + (n); here < end_of; here += 16) { \
    const uint32_t *unit = (panel) + here / 32 * (bits) * PANEL; \
    if (here & 16) { DO(unit, 4); } \
    else { DO(unit, 0); } \
  }
// Codes as bytes, [n / 4][64][4]
INLINE void to_bytes(int bits, int has_table, const Format *f, const uint32_t *w, int64_t q, int64_t n, uint8_t *to) {
#define DO(unit, from) \
  UNROLL for (int t = 0; t < 4; t++) \
    UNROLL for (int i = 0; i < 4; i++, to += 64) store(to, codes(bits, has_table, f, unit, from + t, i * 16))
  HALVES(bits, w, q, n, DO)
#undef DO
}

// ---- codes converted to fp32 ----

INLINE F code(const Packed *p, U four, int i) { return __builtin_convertvector((I)(four >> 8 * i & 255) - (int)p->format->offset, F); }
// Few rows: codes are converted in registers. x [rows][n]: inputs from q on
INLINE void few_rows(int bits, int has_table, int rows, const Packed *p, int64_t q, int64_t n, const float *x, float *part) {
  const int vecs = rows == 1 ? 4 : VECS;
  for (int n0 = 0; n0 < 4; n0 += vecs) {
    F acc[4][4];
    for (int m = 0; m < rows; m++)
      for (int v = 0; v < vecs; v++) acc[m][v] = load(F, part + m * PANEL + (n0 + v) * 16);
    const float *xs = x;
#define DO(unit, from) \
  UNROLL for (int t = 0; t < 4; t++, xs += 4) \
    UNROLL for (int v = 0; v < vecs; v++) { \
      const U four = codes(bits, has_table, p->format, unit, from + t, (n0 + v) * 16); \
      for (int i = 0; i < 4; i++) { \
        const F c = code(p, four, i); \
        for (int m = 0; m < rows; m++) acc[m][v] = fma_(c, splat(xs[m * n + i]), acc[m][v]); \
      } \
    }
    HALVES(bits, p->w, q, n, DO)
#undef DO
    for (int m = 0; m < rows; m++)
      for (int v = 0; v < vecs; v++) store(part + m * PANEL + (n0 + v) * 16, acc[m][v]);
  }
}
INLINE void widen_codes(int bits, int has_table, const Packed *p, int64_t q, int64_t n, float *wide) {
  int64_t s = 0;
#define DO(unit, from) \
  UNROLL for (int t = 0; t < 4; t++, s += 4) \
    for (int v = 0; v < 4; v++) { \
      const U four = codes(bits, has_table, p->format, unit, from + t, v * 16); \
      for (int i = 0; i < 4; i++) store(wide + (v / VECS * n + s + i) * VECS * 16 + v % VECS * 16, code(p, four, i)); \
    }
  HALVES(bits, p->w, q, n, DO)
#undef DO
}
INLINE void widened(int bits, int has_table, const Packed *p) {
  float part[p->M * PANEL], total[p->format->group ? p->M * PANEL : 1], wide[STRETCH * PANEL], pair[2 * PANEL];
  const int64_t width = outputs(p), n = p->stretch;
  memset(part, 0, sizeof part), memset(total, 0, sizeof total);
  for (int64_t k = 0; k < p->K; k += n) {
    const float *x = p->rows + k * p->M;
    switch (p->M) {
      case 1: few_rows(bits, has_table, 1, p, k, n, x, part); break;
      case 2: few_rows(bits, has_table, 2, p, k, n, x, part); break;
      case 3: few_rows(bits, has_table, 3, p, k, n, x, part); break;
      default:
        widen_codes(bits, has_table, p, k, n, wide);
        rows_over_panel(1, p->M, 1, (const uint32_t *)wide, (const uint32_t *)x, n, n, part);
    }
    const int64_t j = k / p->group;
    if (!p->format->group || (k + n) % p->group) continue;
    pairs_of(p, j, j + 1, pair);
    for (int64_t v = 0; v < width; v += 16) {
      const F scale = load(F, pair + v), zero = load(F, pair + PANEL + v);
      for (int64_t m = 0; m < p->M; m++) {
        float *to = total + m * PANEL + v;
        F sum = fma_(load(F, part + m * PANEL + v), scale, load(F, to));
        store(to, has_zero(p) ? fma_(splat(p->sums[j * p->M + m]), zero, sum) : sum);
      }
    }
    memset(part, 0, sizeof part);
  }
  for (int64_t m = 0; m < p->M; m++)
    for (int64_t v = 0; v < width; v += 16) put(p, m, v, load(F, (p->format->group ? total : part) + m * PANEL + v));
}
// Return the job with the output and the panel of chunk c
static Packed packed_of(const void *job, int c) {
  Packed p = *(const Packed *)job;
  const Output *o = output_of(p.outputs, &c);
  p.N = o->N, p.n0 = (int64_t)c * PANEL, p.y = (char *)o->y + p.first * o->N * (p.is_wide ? 4 : 2);
  p.w = (const uint32_t *)((const uint8_t *)o->w + p.n0 * p.K * p.format->bits / 8);
  p.scale = (const char *)o->scale + (p.format->span ? p.K / p.format->span * p.of_span * c : 0);
  return p;
}
static void widened_chunk(void *arg, int c, char *) {
  const Packed p = packed_of(arg, c);
#define DO(bits_, table) if (p.format->bits == bits_ && p.format->has_table == table) widened(bits_, table, &p);
  FORMATS(DO)
#undef DO
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

// ---- digits ----

#if defined(__AVX512BF16__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HAS_DIGITS 1
#if defined(__AVX512BF16__)
#define DIGIT_ROWS 2  // rows of a tile
#else
#define DIGIT_ROWS 4
typedef int16_t S __attribute__((vector_size(32), aligned(2)));   // 16 x int16
typedef uint16_t W __attribute__((vector_size(64), aligned(4)));  // 32 x uint16
#endif
static void digits_chunk(void *arg, int m, char *) {
  const Packed *p = arg;
  const bf16 *x = (const bf16 *)p->x + m * p->K;
  for (int64_t at = m; at < p->M * (p->K / p->group); at += p->M, x += p->group) {
#if defined(__AVX512BF16__)
    int8_t *high = p->high + at * p->group, *low = p->low + at * p->group;
#else
    int16_t *high = (int16_t *)p->high + at * p->group;
#endif
    U top = {0};
    for (int64_t k = 0; k < p->group; k += 16) top = __builtin_elementwise_max(top, __builtin_convertvector(load(H, x + k), U) & 0x7f80);
    const int e = (int)(__builtin_reduce_max(top) >> 7), least = e < 20 ? 20 : e;  // biased exponent of the largest number
    const uint32_t step = e == 255 ? 0x7fc00000u : (uint32_t)(least - 13) << 23, inverse = (uint32_t)(254 - (least - 13)) << 23;
    float times;
    memcpy(&times, &inverse, 4);
#if defined(__AVX512BF16__)
    I of_high = {0}, of_low = {0};
    for (int64_t k = 0; k < p->group; k += 16) {
      const I q = (I)_mm512_cvtps_epi32((__m512)(wide(load(H, x + k)) * times)), h = q >> 7, l = q & 127;
      of_high += h, of_low += l;
      _mm_storeu_si128((void *)(high + k), _mm512_cvtepi32_epi8((__m512i)h));
      _mm_storeu_si128((void *)(low + k), _mm512_cvtepi32_epi8((__m512i)l));
    }
    memcpy(p->step + at, &step, 4);
    p->of_high[at] = __builtin_reduce_add(of_high), p->of_low[at] = __builtin_reduce_add(of_low);
#else
    I sum = {0};
    for (int64_t k = 0; k < p->group; k += 16) {  // 3 * 2^22 has units in its last bit: the sum is rounded to even
      const I q = (I)(wide(load(H, x + k)) * times + 12582912.f) - 0x4b400000;
      sum += q;
      store(high + k, __builtin_convertvector(__builtin_shufflevector(q, q, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15), S));
    }
    memcpy(p->step + at, &step, 4);
    p->of_high[at] = __builtin_reduce_add(sum);
#endif
  }
}
#if defined(__AVX512BF16__)
INLINE __m512i same_four(const int8_t *x) {  // the same four bytes in all lanes
  __m512i v = _mm512_set1_epi32(*(const int *)x);
  __asm__("" : "+v"(v));
  return v;
}
// Groups from j to end, whose codes begin at w, for rows from m0 on, added to `part` [M][64].
INLINE void digits_tile(int bits, int has_table, int rows, const Packed *p, const uint32_t *w, const float *pairs, int64_t j, int64_t end, int64_t m0, float *part) {
  const int64_t group = p->group, first = j;
  const int offset = (int)p->format->offset, by_group = p->format->group != 0, zeros = by_group && has_zero(p);
  for (; j < end; j++, pairs += 2 * PANEL) {
    const int64_t of = j * p->M + m0;
    __m512i high[2][4], low[2][4];
    _Alignas(64) float sums[2 * PANEL], whole[2];
    UNROLL for (int m = 0; m < rows; m++) {
      whole[m] = (float)(p->of_high[of + m] * 128 + p->of_low[of + m]) * p->step[of + m];
      UNROLL for (int n = 0; n < 4; n++) {  // bytes are unsigned: subtract the offset in advance
        high[m][n] = _mm512_set1_epi32(p->of_high[of + m] * -offset);
        low[m][n] = _mm512_set1_epi32(p->of_low[of + m] * -offset);
      }
    }
    const int8_t *xh = p->high + of * group, *xl = p->low + of * group;
#define DO(unit, from) \
  UNROLL for (int t = 0; t < 4; t++, xh += 4, xl += 4) { \
    __m512i wv[4]; \
    UNROLL for (int n = 0; n < 4; n++) wv[n] = (__m512i)codes(bits, has_table, p->format, unit, from + t, n * 16); \
    UNROLL for (int m = 0; m < rows; m++) { \
      const __m512i h = same_four(xh + m * group), l = same_four(xl + m * group); \
      UNROLL for (int n = 0; n < 4; n++) { \
        high[m][n] = _mm512_dpbusd_epi32(high[m][n], wv[n], h); \
        low[m][n] = _mm512_dpbusd_epi32(low[m][n], wv[n], l); \
      } \
    } \
  }
    HALVES(bits, w, (j - first) * group, group, DO)
#undef DO
    UNROLL for (int m = 0; m < rows; m++)
      UNROLL for (int n = 0; n < 4; n++)  // products with a power of two are exact
        store(sums + m * PANEL + n * 16, __builtin_convertvector(((I)high[m][n] << 7) + (I)low[m][n], F) * p->step[of + m]);
    for (int n = 0; n < PANEL; n += 16)
      for (int m = 0; m < rows; m++) {
        float *to = part + (m0 + m) * PANEL + n;
        F sum = load(F, sums + m * PANEL + n);
        sum = by_group ? fma_(sum, load(F, pairs + n), load(F, to)) : sum + load(F, to);
        store(to, zeros ? fma_(splat(whole[m]), load(F, pairs + PANEL + n), sum) : sum);
      }
  }
}
#else
// sum + a0 * b0 + a1 * b1 by lane, of pairs of int16
INLINE I pairs16(I sum, U a, U b) {
  __m256i x[2], y[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  x[0] = _mm256_madd_epi16(x[0], y[0]), x[1] = _mm256_madd_epi16(x[1], y[1]);
  memcpy(&a, x, 64);
  return sum + (I)a;
}
// As above. A word of codes is two pairs, of inputs 4 t and 4 t + 2, and of those after them: so digits are stored
INLINE void digits_tile(int bits, int has_table, int rows, const Packed *p, const uint32_t *w, const float *pairs, int64_t j, int64_t end, int64_t m0, float *part) {
  const int64_t group = p->group, first = j;
  const int offset = (int)p->format->offset, by_group = p->format->group != 0, zeros = by_group && has_zero(p), vecs = rows == 1 ? 4 : VECS;
  for (; j < end; j++, pairs += 2 * PANEL) {
    const int64_t of = j * p->M + m0;
    if (!m0 && p->M > 2) ask_for((const char *)p->w + (j * group + BLOCK) * PANEL * p->format->bits / 8, group * PANEL * p->format->bits / 8);
    float whole[DIGIT_ROWS];
    UNROLL for (int m = 0; m < rows; m++) whole[m] = (float)p->of_high[of + m] * p->step[of + m];
    for (int n0 = 0; n0 < PANEL; n0 += vecs * 16) {
      I acc[DIGIT_ROWS][4];
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++) acc[m][n] = (I){} + p->of_high[of + m] * -offset;
      const uint32_t *x = (const uint32_t *)p->high + of * group / 2;
#define DO(unit, from) \
  UNROLL for (int t = 0; t < 4; t++, x += 2) { \
    U wv[4][2]; \
    UNROLL for (int n = 0; n < vecs; n++) { \
      const U four = codes(bits, has_table, p->format, unit, from + t, n0 + n * 16); \
      wv[n][0] = four & 0x00ff00ff, wv[n][1] = (U)((W)four >> 8); \
    } \
    UNROLL for (int m = 0; m < rows; m++) \
      UNROLL for (int i = 0; i < 2; i++) { \
        const U xv = (U)spread(x + m * group / 2 + i); \
        UNROLL for (int n = 0; n < vecs; n++) acc[m][n] = pairs16(acc[m][n], wv[n][i], xv); \
      } \
  }
      HALVES(bits, w, (j - first) * group, group, DO)
#undef DO
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++) {
          const float *scale = pairs + n0 + n * 16;
          float *to = part + (m0 + m) * PANEL + n0 + n * 16;
          const F v = __builtin_convertvector(acc[m][n], F) * p->step[of + m], sum = by_group ? fma_(v, load(F, scale), load(F, to)) : v + load(F, to);
          store(to, zeros ? fma_(splat(whole[m]), load(F, scale + PANEL), sum) : sum);
        }
    }
  }
}
#endif
// All rows by DIGIT_ROWS. `size` bytes at `next` are read afterwards: they are prefetched meanwhile
INLINE void digits_rows(int bits, int has_table, const Packed *p, const void *w, const float *pairs, int64_t j, int64_t end, float *part, const char *next, int64_t size) {
  const int64_t share = UP(size * DIGIT_ROWS / UP(p->M, DIGIT_ROWS), 64);
  for (int64_t m = 0, at = 0; m < p->M; m += DIGIT_ROWS, at += share) {
    ask_for(next + at, size - at < share ? size - at : share);
#if DIGIT_ROWS > 2
    if (p->M - m > 3) digits_tile(bits, has_table, 4, p, w, pairs, j, end, m, part);
    else if (p->M - m > 2) digits_tile(bits, has_table, 3, p, w, pairs, j, end, m, part);
    else
#endif
    if (p->M - m > 1) digits_tile(bits, has_table, 2, p, w, pairs, j, end, m, part);
    else digits_tile(bits, has_table, 1, p, w, pairs, j, end, m, part);
  }
}
static void digits_of_bytes(const Packed *p, const void *w, const float *pairs, int64_t j, int64_t end, float *part, const char *next, int64_t size) {
  digits_rows(8, 0, p, w, pairs, j, end, part, next, size);
}
#if HAS_TILES
#include "linear_quantized_tiles.h"
#else
#define FEW_DIGITS INT64_MAX
#define digits_by_tiles(bits, has_table, p, part)
#endif
INLINE void digits_panel(int bits, int has_table, const Packed *p) {
  const int64_t groups = p->K / p->group, some = BLOCK / p->group, size = BLOCK * PANEL * bits / 8;
  const int few = bits == 4 && !has_table ? 8 : DIGIT_ROWS;  // most rows for which codes are taken apart again for each tile
  float part[p->M * PANEL];
  const char *w = (const char *)p->w;
  memset(part, 0, sizeof part);
  if (p->M >= FEW_DIGITS) digits_by_tiles(bits, has_table, p, part);
  else for (int64_t j = 0, end; j < groups; j = end, w += size) {
    _Alignas(64) uint8_t bytes[bits < 8 ? BLOCK * PANEL : 1];
    _Alignas(64) float pairs[BLOCK / 16 * 2 * PANEL];
    end = groups - j < some ? groups : j + some;
    const int64_t ahead = DIGIT_ROWS < 4 && end < groups && p->M > 2 ? size : 0;  // higher tiles ask by group
    if (p->format->group) pairs_of(p, j, end, pairs);
    if (bits == 8) digits_of_bytes(p, w, pairs, j, end, part, w + size, ahead);
    else if (p->M <= few) digits_rows(bits, has_table, p, w, pairs, j, end, part, w + size, ahead);
    else {
      to_bytes(bits, has_table, p->format, p->w, j * p->group, (end - j) * p->group, bytes);
      digits_of_bytes(p, bytes, pairs, j, end, part, w + size, ahead);
    }
  }
  for (int64_t m = 0; m < p->M; m++)
    for (int64_t n = 0; n < outputs(p); n += 16) put(p, m, n, load(F, part + m * PANEL + n));
}
static void digits_panel_chunk(void *arg, int c, char *) {
  const Packed p = packed_of(arg, c);
#define DO(bits_, table) if (p.format->bits == bits_ && p.format->has_table == table) digits_panel(bits_, table, &p);
  FORMATS(DO)
#undef DO
}
#else
#define HAS_DIGITS 0
#define digits_chunk rows_chunk
#define digits_panel_chunk widened_chunk
#endif

// x [M, K] -> n outputs, all bf16 or all fp32, weights of one format. K is a multiple of 16 and of the group; without
// span, but with a group, N is one of 16.
static int packed_all(const void *x, const Output *outputs, int n, int64_t M, int64_t K, const Format *f, int is_wide) {
  const int by_digits = HAS_DIGITS && !is_wide, size = is_wide ? 4 : 2;
  const int64_t even = K % 128 == 0 ? 128 : K % 64 == 0 ? 64 : K % 32 == 0 ? 32 : 16, most = M < TALL ? M : TALL;
  const int64_t group = f->group ? f->group : even;
  char *scratch = take_room(OF_ROWS, most * K * 4 + most * (K / group) * 12 + 16 * 128);  // tiles read 16 rows
  if (!scratch) return 0;
  for (int64_t m = 0; m < M; m += TALL) {
    const int64_t rows = M - m < TALL ? M - m : TALL;
    Packed p = {.outputs = outputs, .format = f, .first = m, .x = (const char *)x + m * K * size, .M = rows, .K = K};
    p.group = group, p.is_wide = is_wide;
    p.of_factor = f->factor_bits ? PANEL * (f->factor_bits == 8 ? 1 + f->has_min : 1) : 0;
    p.log = f->span ? __builtin_ctzll(f->span / group) : 0, p.of_span = 2 * PANEL * (1 + f->has_min) + (p.of_factor << p.log);
    const int64_t steps = rows * (K / p.group);
    p.stretch = group < STRETCH ? group : STRETCH;
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
EXPORT(linear_quantized)(const void *x, const void *w, const void *scale, void *y, int64_t M, int64_t N, int64_t K, const Format *f, int is_wide) {
  return packed_all(x, &(Output){w, scale, 0, y, N}, 1, M, K, f, is_wide);
}
