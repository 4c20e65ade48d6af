// Dequantize slots of a KV head, 64 slots at a time.
//
// Layouts are those of kernels/quantize_kv. Numbers are rounded as there, so rows read the same numbers as after
// unpacking.
#pragma once
#include "attend_block.h"

typedef _Float16 X __attribute__((vector_size(32), aligned(2)));   // 16 x fp16
typedef int8_t S8 __attribute__((vector_size(16), aligned(1)));    // 16 codes of 8 bits
typedef uint8_t C16 __attribute__((vector_size(16), aligned(1)));  // 32 codes of 4 bits
typedef H2 H32;
typedef uint32_t U4 __attribute__((vector_size(16), aligned(1)));
typedef uint32_t U8 __attribute__((vector_size(32), aligned(1)));
typedef uint16_t C32 __attribute__((vector_size(16), aligned(1)));  // 32 codes of 4 bits, four to a word
typedef uint8_t C8 __attribute__((vector_size(8), aligned(1)));    // 16 codes of 4 bits
typedef uint8_t C4 __attribute__((vector_size(4), aligned(1)));    // 16 codes of 2 bits

typedef struct {
  const char *codes, *scale, *zero, *fine;  // fine: the lower halves of split 8-bit codes, with 4 bits alone; or null
  int64_t bits;   // 16 = not quantized
  int64_t group;  // slots that share a channel's scale (keys), channels that share a slot's (values); for 2 and 4 bits
  int64_t room;   // slots from channel to channel (values of 8 bits)
} Codes;
typedef struct {
  Codes k, v;
  const char *rest;  // keys of the last slots in full precision
  int64_t full;      // number of slots before them
} Packed;

INLINE F halves(const char *p, int64_t i) { return __builtin_convertvector(load(X, (const _Float16 *)p + i), F); }
INLINE float half1(const char *p, int64_t i) { return (float)((const _Float16 *)p)[i]; }
INLINE void put(int is_wide, char *to, int64_t i, F x) {
  if (is_wide) store((float *)to + i, x);
  else store((bf16 *)to + i, narrow(x));
}
// Sixteen codes of 4 or 2 bits from the i-th on, with other codes in the bits above
INLINE U codes_above(const char *p, int64_t bits, int64_t i) {
  const U by4 = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4}, by2 = {0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6};
  if (bits == 4) {
    const C8 c = load(C8, p + i / 2);
    return __builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), U) >> by4;
  }
  const C4 c = load(C4, p + i / 4);
  return __builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), U) >> by2;
}
INLINE F codes_at(const char *p, int64_t bits, int64_t i) { return __builtin_convertvector(codes_above(p, bits, i) & (bits == 4 ? 15 : 3), F); }
// Codes at i; with the lower halves, if any, a number between two steps
INLINE F refined_at(const Codes *c, int64_t slot, int64_t D, int64_t i) {
  const int64_t at = slot * D * c->bits / 8;
  const F q = codes_at(c->codes + at, c->bits, i);
  return c->fine ? q + (codes_at(c->fine + at, 4, i) - 7.5f) / 16 : q;
}
INLINE H32 narrow2(F a, F b) {
#if defined(__AVX512BF16__)
  return (H32)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
  return __builtin_shufflevector(narrow(a), narrow(b), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
}
#define EVENS(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODDS(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
// Dequantize keys of 4 bits to bf16, 32 numbers at a time, of slots that share their channels' scales
INLINE void keys_by_four(const Codes *c, int64_t D, int64_t group, int64_t at, int64_t n, bf16 *to) {
  for (int64_t d = 0; d < D; d += 32) {
    const F s0 = halves(c->scale, group + d), s1 = halves(c->scale, group + d + 16), z0 = halves(c->zero, group + d), z1 = halves(c->zero, group + d + 16);
    const F se = EVENS(s0, s1), so = ODDS(s0, s1), ze = EVENS(z0, z1), zo = ODDS(z0, z1);
    for (int64_t i = 0; i < n; i++) {
      const U u = __builtin_convertvector(load(C16, c->codes + ((at + i) * D + d) / 2), U);
      const F e = ze + __builtin_convertvector((I)(u & 15), F) * se, o = zo + __builtin_convertvector((I)(u >> 4), F) * so;
      H32 both = narrow2(e, o);
      store(to + i * D + d, __builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
  }
}
// Dequantize keys of slots [at, at + n), D numbers each
INLINE void unpack_keys(const Packed *p, int is_wide, int64_t D, int64_t at, int64_t n, char *to) {
  const Codes *c = &p->k;
  const int64_t size = D * (is_wide ? 4 : 2);
  for (int64_t i = 0; i < n; i++, to += size) {
    const int64_t slot = at + i;
    if (!is_wide && c->bits == 4 && !c->fine && D % 32 == 0 && slot < p->full) {
      int64_t end = (slot / c->group + 1) * c->group;
      if (end > p->full) end = p->full;
      if (end > at + n) end = at + n;
      keys_by_four(c, D, slot / c->group * D, slot, end - slot, (bf16 *)to);
      i += end - slot - 1, to += (end - slot - 1) * size;
      continue;
    }
    if (slot >= p->full) memcpy(to, p->rest + (slot - p->full) * size, size);
    else if (c->bits == 16) memcpy(to, c->codes + slot * size, size);
    else if (c->bits == 8) {
      const float scale = half1(c->scale, slot);
      for (int64_t d = 0; d < D; d += 16) put(is_wide, to, d, __builtin_convertvector(load(S8, c->codes + slot * D + d), F) * scale);
    } else {
      const int64_t group = slot / c->group * D;
      for (int64_t d = 0; d < D; d += 16)
        put(is_wide, to, d, halves(c->zero, group + d) + refined_at(c, slot, D, d) * halves(c->scale, group + d));
    }
  }
}
// Transpose 16 bytes of each of 64 slots to 4 vectors of words per 16 slots
INLINE void turn_codes(const char *codes, int64_t size, const char *next, U *a) {
  for (int i = 0; i < 16; i++, codes += size) {
    __builtin_prefetch(next + i * 64, 0, 2);
#define PART(i) load(U4, codes + (i) * 16 * size)
    const U8 low = __builtin_shufflevector(PART(0), PART(1), 0, 1, 2, 3, 4, 5, 6, 7), high = __builtin_shufflevector(PART(2), PART(3), 0, 1, 2, 3, 4, 5, 6, 7);
    a[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#undef PART
  }
  turn16(a);
}
// Load zeros and scales of groups
INLINE void floats_of(const Codes *c, int64_t at, int64_t n, float *zero, float *scale) {
  for (int64_t i = 0; i < n; i += 16) store(zero + i, halves(c->zero, at + i)), store(scale + i, halves(c->scale, at + i));
}
// Code that prepares a block of 64 slots for products, without intermediate numbers in memory. With `rows` 0 the block
// is arranged in kt or vt. Otherwise it is multiplied by `rows` rows immediately, by the same chains, and never stored.
#define AS_IT_IS(where, x) __asm__("" : where(x))  // keeps the compiler from a slower form
#if defined(__AVX2__) && !defined(__AVX512BF16__)
#define LAID_OUT WIDENED
#else
#define LAID_OUT PAIRED
#endif
INLINE int can_turn(const Codes *c, int64_t D) { return !c->fine && (c->bits == 8 ? D % 16 == 0 : c->bits < 8 && D * c->bits % 128 == 0 && c->group % 16 == 0); }
INLINE int can_pair(const Codes *c, int64_t E) { return !c->fine && (c->bits == 8 ? E % 16 == 0 : c->bits < 8 && c->group * c->bits % 128 == 0); }
// The rows of an immediate product, and the sums: [4][4] vectors
typedef struct {
  const uint32_t *x;  // words of a row, ldx words from row to row
  int64_t ldx;
  F acc[4][4];
} Sums;
INLINE void none_yet(Sums *s, int rows, int vecs) {
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < vecs; n++) s->acc[m][n] = splat(0.f);
}
// Multiply or store `vecs` vectors of words; the first adds to sums `from`
INLINE void meet_some(int rows, int from, int vecs, const U *w, int64_t word, Sums *s, uint32_t *to) {
  for (int n = 0; n < vecs && !rows; n++) store(to + (from + n) * 16, (U)w[n]);
  for (int m = 0; m < rows; m++) {
    U x = (U){0} + s->x[m * s->ldx + word];
#if defined(__AVX512F__)
    AS_IT_IS("+v", x);
#endif
    for (int n = 0; n < vecs; n++) {
      F *acc = &s->acc[m][from + n];
      *acc = LAID_OUT == PAIRED ? DOT2(*acc, w[n], x) : fma_((F)w[n], (F)x, *acc);
    }
  }
}
INLINE void meet_words(int rows, int vecs, const U *w, int64_t word, Sums *s, uint32_t *to) { meet_some(rows, 0, vecs, w, word, s, to); }
#if defined(__AVX512BF16__)
#define HAS_LOOKUP 1
// Dequantize values of 4 bits to bf16: the sixteen numbers of a group's codes are computed once and looked up, 32 at a
// time
INLINE void values_by_four(const Codes *c, int64_t D, int64_t at, int64_t n, bf16 *to) {
  const F each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t d0 = 0; d0 < D; d0 += c->group)
    for (int64_t i = 0; i < n; i++) {
      const int64_t g = ((at + i) * D + d0) / c->group;
      const __m512i table = _mm512_castsi256_si512((__m256i)narrow(splat(half1(c->zero, g)) + each * splat(half1(c->scale, g))));
      for (int64_t d = d0; d < d0 + c->group; d += 32) {
        const U u = __builtin_convertvector(load(C16, c->codes + ((at + i) * D + d) / 2), U);
        store(to + i * D + d, (H32)_mm512_permutexvar_epi16((__m512i)((u | u << 12) & 0x000f000f), table));
      }
    }
}
// Dequantize in pairs. 4 bits: the two codes of a pair are looked up at once, in a table of the sixteen numbers of the
// first code and the sixteen of the second; the lookup reads 5 bits. 2 bits: a pair has sixteen values, found by one
// lookup of 4 bits.
#define LOOK_UP(codes, table) (U)_mm512_permutexvar_epi16((__m512i)(codes), (__m512i)(table))
#define LOOK_UP_PAIR(codes, table) (U)_mm512_permutexvar_epi32((__m512i)(codes), (__m512i)(table))
#define NUMBERS(each, zero, scale) fma_(each, (F)_mm512_set1_ps(scale), (F)_mm512_set1_ps(zero))  // exact: 4 times 11 bits; `splat` would add 0
INLINE U in_pairs(F first, F second) {
  const H32 mixed = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return LOOK_UP(mixed, narrow2(first, second));
}
// Convert two bytes of each word, the lower one at bit `up`, with a scale 2^24 too small, because a byte is read from
// the highest bits
INLINE U bytes_in_pairs(U code, int up, F scale0, F scale1) {
  const I first = (I)(code << (24 - up) & 0xff000000), second = (I)(code << (16 - up) & 0xff000000);
  return in_pairs(__builtin_convertvector(first, F) * scale0, __builtin_convertvector(second, F) * scale1);
}
INLINE H32 table_of(int bits, float zero0, float scale0, float zero1, float scale1) {
  const F each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F low = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, high = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  if (bits == 4) return narrow2(NUMBERS(each, zero0, scale0), NUMBERS(each, zero1, scale1));
  return (H32)in_pairs(NUMBERS(low, zero0, scale0), NUMBERS(high, zero1, scale1));
}
// Load 16 bytes of 4 slots
INLINE __m512i of_four_slots(const char *codes, int64_t size) {
  __m512i a = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)codes));
  a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(codes + 4 * size)), 1);
  a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(codes + 8 * size)), 2);
  return _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(codes + 12 * size)), 3);
}
#define SLOT_OF(i) ((i) < 4 ? (i) : (i) + 12)  // of 32, by fours, so that pairs are in slot order after unpacking
// Transpose 8 words of each of 32 slots
INLINE void turn_words(const __m512i *a, __m512i *w) {
  __m512i b[8], c[8];
  for (int i = 0; i < 8; i += 2) b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) c[i + 2 * j] = _mm512_unpacklo_epi32(b[i + j], b[i + j + 2]), c[i + 2 * j + 1] = _mm512_unpackhi_epi32(b[i + j], b[i + j + 2]);
  for (int i = 0; i < 4; i++) w[2 * i] = _mm512_unpacklo_epi64(c[i], c[i + 4]), w[2 * i + 1] = _mm512_unpackhi_epi64(c[i], c[i + 4]);
}
INLINE __m512i twice(const H32 *table, int half) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)table + half)); }
// Keys of 4 bits of slots [at, at + 64), which share their scales, a channel at a time -> [D / 2][64] or sums. Each
// table is stored twice, so that a fifth bit does not matter.
INLINE void turn_keys_by_four(int rows, const Codes *c, int64_t D, int64_t at, Sums *s, uint32_t *kt) {
  const int64_t size = D / 2, group = at / c->group * D;
  const char *codes = c->codes + at * size, *next = codes + 64 * size;
  float zero[D], scale[D];
  H32 tables[D / 2];
  floats_of(c, group, D, zero, scale);
  for (int64_t i = 0; i < D / 2; i++) tables[i] = table_of(4, zero[2 * i], scale[2 * i], zero[2 * i + 1], scale[2 * i + 1]);
  AS_IT_IS("+m", tables);
  none_yet(s, rows, 4);
  __m512i a[8];
#pragma clang loop unroll(full)
  for (int i = 0; i < 8; i++) a[i] = of_four_slots(codes + SLOT_OF(i) * size, size);
#pragma clang loop unroll(full)
  for (int half = 0; half < 2; half++) {
#pragma clang loop unroll(disable)
    for (int64_t d = 0; d < D; d += 32) {
      const char *then = codes + (d + 32 < D ? half * 32 * size + d / 2 + 16 : 32 * size);
      __m512i w[8];
      turn_words(a, w);
#pragma clang loop unroll(full)
      for (int i = 0; i < 16; i++) {
        const int64_t word = d / 2 + i;
        const __m512i x = _mm512_srli_epi16(w[i / 2], i % 2 * 8);
        const __m512i a0 = _mm512_permutexvar_epi16(x, twice(tables + word, 0)), b = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), twice(tables + word, 1));
        const U both[2] = {(U)_mm512_unpacklo_epi16(a0, b), (U)_mm512_unpackhi_epi16(a0, b)};
        meet_some(rows, half * 2, 2, both, word, s, kt + word * 64);
        if (i % 2) continue;
        a[i / 2] = of_four_slots(then + SLOT_OF(i / 2) * size, size);
        __builtin_prefetch(next + (half * D / 4 + d / 4 + i / 2) * 64, 0, 3);
      }
    }
  }
}
// Keys of slots [at, at + 64), a pair of channels at a time -> [D / 2][64] or sums
INLINE void turn_keys_of(int bits, int is_one, int rows, const Codes *c, int64_t D, int64_t at, Sums *s, uint32_t *kt) {
  if (bits == 4 && is_one) return turn_keys_by_four(rows, c, D, at, s, kt);
  const int64_t size = D * bits / 8;
  const int wide = 128 / bits, parts = is_one ? 1 : 4;  // channels at a time; groups of slots
  F by_slot[4];
  for (int n = 0; n < 4 && bits == 8; n++) by_slot[n] = halves(c->scale, at + n * 16) * 0x1p-24f;
  none_yet(s, rows, 4);
  for (int64_t d = 0; d < D; d += wide) {
    U a[16];
    float zero[4][64], scale[4][64];
    turn_codes(c->codes + at * size + d * bits / 8, size, c->codes + (at + 64) * size + d * bits * 8, a);
    for (int n = 0; n < parts && bits < 8; n++)
      for (int i = 0; i < wide; i += 16) {
        const int64_t from = (at + n * 16) / c->group * D + d + i;
        store(zero[n] + i, halves(c->zero, from)), store(scale[n] + i, halves(c->scale, from));
      }
    AS_IT_IS("+m", zero); AS_IT_IS("+m", scale);
#pragma clang loop unroll(full)
    for (int word = 0; word < 4; word++) {
      U first[4], second[4];
      for (int n = 0; n < 4 && bits == 4; n++) {
        first[n] = a[n * 4 + word] & 0x0f0f0f0f, second[n] = (a[n * 4 + word] >> 4 & 0x0f0f0f0f) | 0x10101010;
        AS_IT_IS("+v", first[n]); AS_IT_IS("+v", second[n]);
      }
#pragma clang loop unroll(full)
      for (int pair = 0; pair < 16 / bits; pair++) {
        const int i = word * 32 / bits + pair * 2, up = pair * bits * 2;
        U w[4];
        H32 table;
        for (int n = 0; n < 4; n++) {
          const U code = a[n * 4 + word];
          if (bits < 8 && n < parts) table = table_of(bits, zero[n][i], scale[n][i], zero[n][i + 1], scale[n][i + 1]);
          if (bits == 8) w[n] = bytes_in_pairs(code, up, by_slot[n], by_slot[n]);
          else if (bits == 2) w[n] = LOOK_UP_PAIR(code >> up, table);
          else {
            const U high = up < 16 ? second[n] << (16 - up) : second[n] >> (up - 16);
            w[n] = LOOK_UP((first[n] >> up & 0xffff) | (high & 0xffff0000), table);
          }
        }
        meet_words(rows, 4, w, (d + i) / 2, s, kt + (d + i) / 2 * 64);
      }
    }
  }
}
// Values of 4 bits of channels [e, e + 64) -> sums alone: even and odd channels of 32 bytes, which are reordered once
// at the end
INLINE void meet_values_by_four(int rows, const Codes *c, int64_t E, int64_t e, int64_t at, const float *zero, const float *scale, Sums *s) {
  const int64_t groups = E / c->group, size = E / 2;
  const char *x = c->codes + at * size + e / 2, *next = c->codes + (at + 64) * size + e * 32;
  H32 tables[32];
  for (int64_t j = 0, g = e / c->group; j < 32; j++, g += 2 * groups) tables[j] = table_of(4, zero[g], scale[g], zero[g + groups], scale[g + groups]);
  AS_IT_IS("+m", tables);
  none_yet(s, rows, 4);
#pragma clang loop unroll(disable)
  for (int64_t j = 0; j < 32; j++, x += 2 * size) {
    const __m512i first = twice(tables + j, 0), second = twice(tables + j, 1);
    __builtin_prefetch(next + j * 64, 0, 3);
    const __m512i a = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)x)), b = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(x + size)));
    const __m512i a0 = _mm512_permutexvar_epi16(a, first), a1 = _mm512_permutexvar_epi16(_mm512_srli_epi16(a, 4), first);
    const __m512i b0 = _mm512_permutexvar_epi16(b, second), b1 = _mm512_permutexvar_epi16(_mm512_srli_epi16(b, 4), second);
    const U w[4] = {(U)_mm512_unpacklo_epi16(a0, b0), (U)_mm512_unpackhi_epi16(a0, b0), (U)_mm512_unpacklo_epi16(a1, b1), (U)_mm512_unpackhi_epi16(a1, b1)};
    meet_words(rows, 4, w, j, s, 0);
  }
  for (int m = 0; m < rows; m++) {
    __m512 *acc = (__m512 *)s->acc[m], t[4], u[4];
    for (int i = 0; i < 2; i++) t[2 * i] = _mm512_unpacklo_ps(acc[i], acc[i + 2]), t[2 * i + 1] = _mm512_unpackhi_ps(acc[i], acc[i + 2]);
    for (int i = 0; i < 2; i++) u[2 * i] = _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x44), u[2 * i + 1] = _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xee);
    for (int i = 0; i < 2; i++) acc[2 * i] = _mm512_shuffle_f32x4(u[i], u[i + 2], 0x88), acc[2 * i + 1] = _mm512_shuffle_f32x4(u[i], u[i + 2], 0xdd);
  }
}
// Values of 4 or 2 bits of these slots, a pair of slots at a time: channels [e, e + vecs * 16), which share a group ->
// [32][width] or sums
INLINE void lay_values_of(int bits, int rows, int vecs, const Codes *c, int64_t E, int64_t e, int64_t at, const float *zero, const float *scale, Sums *s, uint32_t *vt, int64_t width) {
  const H32 from = {0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12};
  const H32 where = {0, 8, 0, 8, 0, 8, 0, 8, 1, 9, 1, 9, 1, 9, 1, 9, 2, 10, 2, 10, 2, 10, 2, 10, 3, 11, 3, 11, 3, 11, 3, 11};
  const U from2 = {0, 8, 4, 12, 16, 24, 20, 28, 0, 8, 4, 12, 16, 24, 20, 28}, where2 = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  if (bits == 4 && vecs == 4 && rows) return meet_values_by_four(rows, c, E, e, at, zero, scale, s);
  const int64_t groups = E / c->group, size = E * bits / 8;
  const char *x = c->codes + at * size + e * bits / 8;
  none_yet(s, rows, vecs);
#pragma clang loop unroll(disable)
  for (int64_t j = 0; j < 32; j++, x += 2 * size) {
    const int64_t g = j * 2 * groups + e / c->group;
    __builtin_prefetch(x + 64 * size, 0, 2), __builtin_prefetch(x + 65 * size, 0, 2);
    const H32 table = table_of(bits, zero[g], scale[g], zero[g + groups], scale[g + groups]);
    U w[4];
    for (int n = 0; n < vecs; n += bits == 4 ? 2 : 4) {
      if (bits == 4) {
        __m256i both = (__m256i)__builtin_shufflevector(load(C32, x + n * 8), load(C32, x + size + n * 8), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        AS_IT_IS("+v", both);
        for (int half = 0; half < 2; half++) {
          const U codes = (U)((H32)_mm512_permutexvar_epi16((__m512i)(where + (uint16_t)(half * 4)), _mm512_castsi256_si512(both)) >> from);
          w[n + half] = LOOK_UP((codes & 0xf000f) | 0x100000, table);
        }
      } else {  // codes of two slots side by side, in 4 bits: even channels, odd channels, and both alternately
        const U4 p = load(U4, x), q = load(U4, x + size);
        const C16 even = (C16)((p & 0x33333333) | (q << 2 & 0xcccccccc)), odd = (C16)((p >> 2 & 0x33333333) | (q & 0xcccccccc));
        __m256i both = (__m256i)__builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        AS_IT_IS("+v", both);
        for (int part = 0; part < 4; part++)
          w[part] = LOOK_UP_PAIR((U)_mm512_permutexvar_epi32((__m512i)(where2 + 2 * (uint32_t)part), _mm512_castsi256_si512(both)) >> from2, table);
      }
    }
    meet_words(rows, vecs, w, j, s, vt + j * width + e);
  }
}
// Values of 8 bits of channels [e, e + 16), which are stored by channel
INLINE void lay_channels_of(int rows, const Codes *c, int64_t e, int64_t at, Sums *s, uint32_t *vt, int64_t width) {
  U a[16];
  float scale[64];
  for (int i = 0; i < 64; i += 16) store(scale + i, halves(c->scale, at + i) * 0x1p-24f);
  for (int r = 0; r < 16; r++) {
    const char *codes = c->codes + (e + r) * c->room + at;
    __builtin_prefetch(codes + 64, 0, 2);
    a[r] = load(U, codes);
  }
  turn16(a);
  none_yet(s, rows, 1);
  for (int i = 0; i < 32; i++) {
    const U w = bytes_in_pairs(a[i / 2], i % 2 * 16, (F)_mm512_set1_ps(scale[2 * i]), (F)_mm512_set1_ps(scale[2 * i + 1]));
    meet_words(rows, 1, &w, i, s, vt + i * width + e);
  }
}
#elif defined(__AVX2__)
// In fp32, rounded to bf16. The numbers of a group's codes are computed once and looked up, by 4 bits or by 2.
#define HAS_LOOKUP 0
#define values_by_four(c, D, at, n, to)
INLINE U look_up(int bits, F table, U codes) {
#if defined(__AVX512F__)
  (void)bits;
  return (U)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
  __m256 half[2], out[2];
  __m256i at[2];
  memcpy(half, &table, 64), memcpy(at, &codes, 64);
  for (int i = 0; i < 2; i++) {
    out[i] = _mm256_permutevar8x32_ps(half[0], at[i]);
    if (bits == 4) out[i] = _mm256_blendv_ps(out[i], _mm256_permutevar8x32_ps(half[1], at[i]), _mm256_castsi256_ps(_mm256_slli_epi32(at[i], 28)));
  }
  U found;
  memcpy(&found, out, 64);
  return found;
#endif
}
INLINE F rounded(F x) { return wide(narrow(x)); }
INLINE F table_of(int bits, float zero, float scale) {
  const F each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, by2 = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  return rounded(splat(zero) + (bits == 4 ? each : by2) * splat(scale));
}
#if !defined(__AVX512F__)
#define BY_BYTES 1
// The bf16 numbers of a group's sixteen codes, their lower bytes and then their upper ones: equal to `narrow` for all
// numbers that float16 scales can give; some NaN become 0. Products of 4 and 11 bits are exact.
INLINE void bytes_of(float zero, float scale, __m256i *table) {
  const __m256 some = {0, 1, 2, 3, 8, 9, 10, 11}, others = {4, 5, 6, 7, 12, 13, 14, 15}, z = _mm256_set1_ps(zero), by = _mm256_set1_ps(scale);
  const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1);
#define LANES_OF(a) _mm256_broadcastsi128_si256(_mm_setr_epi8 a)
  const __m256i first = LANES_OF((2, 6, 10, 14, -1, -1, -1, -1, 3, 7, 11, 15, -1, -1, -1, -1)), second = LANES_OF((-1, -1, -1, -1, 2, 6, 10, 14, -1, -1, -1, -1, 3, 7, 11, 15));
  __m256i x = (__m256i)_mm256_fmadd_ps(some, by, z), y = (__m256i)_mm256_fmadd_ps(others, by, z);
  x = _mm256_add_epi32(_mm256_add_epi32(x, half), _mm256_and_si256(_mm256_srli_epi32(x, 16), one));
  y = _mm256_add_epi32(_mm256_add_epi32(y, half), _mm256_and_si256(_mm256_srli_epi32(y, 16), one));
  *table = _mm256_permute4x64_epi64(_mm256_or_si256(_mm256_shuffle_epi8(x, first), _mm256_shuffle_epi8(y, second)), 0xd8);
}
// Look up the lower or upper bytes of 32 codes
INLINE __m256i look_up_bytes(const __m256i *table, int upper, __m256i codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table + upper)), codes);
}
INLINE __m256i lower_codes(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE __m256i upper_codes(__m256i x) { return lower_codes(_mm256_srli_epi16(x, 4)); }
// Lower and upper bytes -> 32 numbers in fp32, in the order of the bytes in halves of a vector
INLINE void widen_bytes(__m256i low, __m256i high, U *w) {
  const __m256i none = _mm256_setzero_si256(), a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  const __m256i out[4] = {_mm256_unpacklo_epi16(none, a), _mm256_unpackhi_epi16(none, a), _mm256_unpacklo_epi16(none, b), _mm256_unpackhi_epi16(none, b)};
  memcpy(w, out, sizeof out);
}
// Transpose 16 bytes of each of 32 slots, in an order of slots that `widen_bytes` restores
INLINE void turn_bytes(const char *codes, int64_t size, __m256i *a) {
  __m256i b[16];
  for (int i = 0; i < 16; i++) {
    const char *from = codes + (i / 4 * 8 + i % 4) * size;
    a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from)), _mm_loadu_si128((const __m128i *)(from + 4 * size)), 1);
  }
#define IN_PAIRS(to, from, by, name)                                            \
  for (int i = 0; i < 16; i += 2 * (by))                                        \
    for (int j = 0; j < (by); j++) {                                            \
      (to)[i + 2 * j] = _mm256_unpacklo_##name((from)[i + j], (from)[i + j + (by)]);     \
      (to)[i + 2 * j + 1] = _mm256_unpackhi_##name((from)[i + j], (from)[i + j + (by)]); \
    }
  IN_PAIRS(b, a, 1, epi8) IN_PAIRS(a, b, 2, epi16) IN_PAIRS(b, a, 4, epi32) IN_PAIRS(a, b, 8, epi64)
#undef IN_PAIRS
}
// Keys of 4 bits of slots [at, at + 64), which share their scales -> [D][64] or sums
INLINE void turn_keys_by_bytes(int rows, const Codes *c, int64_t D, int64_t at, Sums *s, uint32_t *kt) {
  const int64_t size = D / 2, group = at / c->group * D;
  none_yet(s, rows, 4);
  for (int64_t d = 0; d < D; d += 32) {
    float zero[32], scale[32];
    __m256i tables[32], codes[16];
    floats_of(c, group + d, 32, zero, scale);
    for (int i = 0; i < 32; i++) bytes_of(zero[i], scale[i], tables + i);
    for (int half = 0; half < 2; half++) {
      turn_bytes(c->codes + (at + half * 32) * size + d / 2, size, codes);
#pragma clang loop unroll(disable)
      for (int i = 0; i < 16; i++) {
        const __m256i x[2] = {lower_codes(codes[i]), upper_codes(codes[i])};
        __builtin_prefetch(c->codes + (at + 64) * size + d * 32 + half * 512 + i / 2 * 64, 0, 3);
        for (int odd = 0; odd < 2; odd++) {
          const __m256i *table = tables + 2 * i + odd;
          const int64_t word = d + 2 * i + odd;
          U w[2];
          widen_bytes(look_up_bytes(table, 0, x[odd]), look_up_bytes(table, 1, x[odd]), w);
          meet_some(rows, half * 2, 2, w, word, s, kt + word * 64);
        }
      }
    }
  }
}
// Values of 4 bits of channels [e, e + 64), which share a group -> [64][width] or sums
INLINE void lay_values_by_bytes(int rows, const Codes *c, int64_t E, int64_t e, int64_t at, const float *zero, const float *scale, Sums *s, uint32_t *vt, int64_t width) {
  const int64_t groups = E / c->group, size = E / 2;
  const __m256i by_words = LANES_OF((0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const char *codes = c->codes + at * size + e / 2;
  __m256i tables[64];
  for (int64_t j = 0; j < 64; j++) bytes_of(zero[j * groups + e / c->group], scale[j * groups + e / c->group], tables + j);
  none_yet(s, rows, 4);
#pragma clang loop unroll(disable)
  for (int64_t j = 0; j < 64; j++, codes += size) {
    const __m256i x = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)codes), by_words), 0xd8);
    const __m256i even = lower_codes(x), odd = upper_codes(x);
    const __m256i low[2] = {look_up_bytes(tables + j, 0, even), look_up_bytes(tables + j, 0, odd)}, high[2] = {look_up_bytes(tables + j, 1, even), look_up_bytes(tables + j, 1, odd)};
    U w[4];
    __builtin_prefetch(codes + 64 * size, 0, 3);
    widen_bytes(_mm256_unpacklo_epi8(low[0], low[1]), _mm256_unpacklo_epi8(high[0], high[1]), w);
    widen_bytes(_mm256_unpackhi_epi8(low[0], low[1]), _mm256_unpackhi_epi8(high[0], high[1]), w + 2);
    meet_words(rows, 4, w, j, s, vt + j * width + e);
  }
}
#else
#define BY_BYTES 0
#define turn_keys_by_bytes(rows, c, D, at, s, kt)
#define lay_values_by_bytes(rows, c, E, e, at, zero, scale, s, vt, width)
#endif
// Keys of slots [at, at + 64), a channel at a time -> [D][64] or sums
INLINE void turn_keys_of(int bits, int is_one, int rows, const Codes *c, int64_t D, int64_t at, Sums *s, uint32_t *kt) {
  if (BY_BYTES && bits == 4 && is_one) {
    turn_keys_by_bytes(rows, c, D, at, s, kt);
    return;
  }
  const int64_t size = D * bits / 8;
  const int wide = 128 / bits, parts = is_one ? 1 : 4;  // channels at a time; groups of slots
  F by_slot[4];
  for (int n = 0; n < 4 && bits == 8; n++) by_slot[n] = halves(c->scale, at + n * 16);
  none_yet(s, rows, 4);
  for (int64_t d = 0; d < D; d += wide) {
    U a[16];
    float zero[4][64], scale[4][64];
    turn_codes(c->codes + at * size + d * bits / 8, size, c->codes + (at + 64) * size + d * bits * 8, a);
    for (int n = 0; n < parts && bits < 8; n++) floats_of(c, (at + n * 16) / c->group * D + d, wide, zero[n], scale[n]);
#pragma clang loop unroll(disable)
    for (int i = 0; i < wide; i++) {
      const int up = i % (32 / bits) * bits;
      U w[4];
      F table = {0};
      for (int n = 0; n < 4; n++) {
        const U code = a[n * 4 + i * bits / 32] >> up;
        if (bits < 8 && n < parts) table = table_of(bits, zero[n][i], scale[n][i]);
        w[n] = bits < 8 ? look_up(bits, table, code) : (U)rounded(__builtin_convertvector((I)(code << 24) >> 24, F) * by_slot[n]);
      }
      meet_words(rows, 4, w, d + i, s, kt + (d + i) * 64);
    }
  }
}
// Values of 4 or 2 bits of these slots, a slot at a time: channels [e, e + vecs * 16), which share a group ->
// [64][width] or sums
INLINE void lay_values_of(int bits, int rows, int vecs, const Codes *c, int64_t E, int64_t e, int64_t at, const float *zero, const float *scale, Sums *s, uint32_t *vt, int64_t width) {
  if (BY_BYTES && bits == 4 && vecs == 4) {
    lay_values_by_bytes(rows, c, E, e, at, zero, scale, s, vt, width);
    return;
  }
  const int64_t groups = E / c->group, size = E * bits / 8;
  const char *codes = c->codes + at * size;
  none_yet(s, rows, vecs);
#pragma clang loop unroll(disable)
  for (int64_t j = 0; j < 64; j++, codes += size) {
    const F table = table_of(bits, zero[j * groups + e / c->group], scale[j * groups + e / c->group]);
    U w[4];
    __builtin_prefetch(codes + 64 * size + e * bits / 8, 0, 2);
    for (int n = 0; n < vecs; n++) w[n] = look_up(bits, table, codes_above(codes, bits, e + n * 16));
    meet_words(rows, vecs, w, j, s, vt + j * width + e);
  }
}
// Values of 8 bits of channels [e, e + 16), which are stored by channel
INLINE void lay_channels_of(int rows, const Codes *c, int64_t e, int64_t at, Sums *s, uint32_t *vt, int64_t width) {
  const char *codes = c->codes + e * c->room + at;
  for (int r = 0; r < 16; r++) __builtin_prefetch(codes + r * c->room + 64, 0, 2);
  none_yet(s, rows, 1);
  for (int i = 0; i < 64; i += 16) {
    const F scale = halves(c->scale, at + i);
    U a[16];
    for (int r = 0; r < 16; r++) a[r] = (U)rounded(__builtin_convertvector(load(S8, codes + r * c->room + i), F) * scale);
    turn16(a);
    for (int r = 0; r < 16; r++) meet_words(rows, 1, a + r, i + r, s, vt + (i + r) * width + e);
  }
}
#else
#define HAS_LOOKUP 0
#define values_by_four(c, D, at, n, to)
#endif
#if defined(__AVX2__)
// Arrange keys in kt
INLINE void turn_block(const Codes *c, int64_t D, int64_t at, uint32_t *kt) {
  Sums none;
  if (c->bits == 8) turn_keys_of(8, 0, 0, c, D, at, &none, kt);
  else if (c->bits == 2) turn_keys_of(2, 0, 0, c, D, at, &none, kt);
  else if (c->group % 64 == 0) turn_keys_of(4, 1, 0, c, D, at, &none, kt);
  else turn_keys_of(4, 0, 0, c, D, at, &none, kt);
}
// EACH(bits, vecs, e): values of a block, by as many channels as one call processes
#define BY_CHANNELS(c, E, EACH)                                                         \
  if ((c)->bits == 8) for (int64_t e = 0; e < (E); e += 16) EACH(8, 1, e)               \
  else if ((c)->bits == 2) for (int64_t e = 0; e < (E); e += 64) EACH(2, 4, e)          \
  else if ((c)->group % 64 == 0) for (int64_t e = 0; e < (E); e += 64) EACH(4, 4, e)    \
  else for (int64_t e = 0; e < (E); e += 32) EACH(4, 2, e)
#define SOME_VALUES(bits, rows, vecs, e, s, vt)                                          \
  if (bits == 8) lay_channels_of(rows, c, e, at, s, vt, width);                          \
  else lay_values_of(bits == 2 ? 2 : 4, rows, vecs, c, E, e, at, zero, scale, s, vt, width);
#define VALUES_BEGIN                                                    \
  const int64_t groups = c->bits == 8 ? 0 : E / c->group;               \
  float zero[64 * groups + 1], scale[64 * groups + 1];                  \
  floats_of(c, at * groups, 64 * groups, zero, scale);
// Arrange values in vt
static void pair_block(const Codes *c, int64_t E, int64_t at, uint32_t *vt, int64_t width) {
  Sums none;
  VALUES_BEGIN
#define EACH(bits, vecs, e) { SOME_VALUES(bits, 0, vecs, e, &none, vt) }
  BY_CHANNELS(c, E, EACH)
#undef EACH
}
// Rows whose sums fit into registers; tiles multiply arranged blocks
#if HAS_TILES
#define FEW 0
#elif defined(__AVX512F__)
#define FEW 4
#else
#define FEW 1
#endif
INLINE void score_few(int bits, int rows, const Rows *a, const Room *room, const Codes *c, int64_t at) {
  Sums s = {.x = a->q, .ldx = words(LAID_OUT, a->D)};
  turn_keys_of(bits, 1, rows, c, a->D, at, &s, 0);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < 4; n++) store(room->s + m * B + n * 16, s.acc[m][n]);
}
INLINE void add_few(int rows, int vecs, const Rows *a, const Room *room, const Sums *s, int64_t e) {
  const int64_t width = a->width;
  const float *shrink = room->shrink;
  float *o = a->o + e;
  for (int m = 0; m < rows; m++, o += width, shrink++)
    for (int n = 0; n < vecs; n++) store(o + n * 16, fma_(load(F, o + n * 16), (F){} + *shrink, s->acc[m][n]));
}
INLINE void weigh_few(int rows, const Rows *a, const Room *room, const Codes *c, int64_t at) {
  const int64_t E = a->E, width = 0;
  VALUES_BEGIN
#define EACH(bits, vecs, e)                            \
  {                                                    \
    Sums s = {.x = room->p, .ldx = words(LAID_OUT, B)};             \
    SOME_VALUES(bits, rows, vecs, e, &s, 0)            \
    add_few(rows, vecs, a, room, &s, e);               \
  }
  BY_CHANNELS(c, E, EACH)
#undef EACH
}
INLINE void block_for(int rows, const Rows *a, const Room *room, const Packed *p, const int32_t *pos, int64_t at) {
  if (p->k.bits == 8) score_few(8, rows, a, room, &p->k, at);
  else if (p->k.bits == 4) score_few(4, rows, a, room, &p->k, at);
  else score_few(2, rows, a, room, &p->k, at);
  soften(LAID_OUT, rows, a, room, pos, at);
  weigh_few(rows, a, room, &p->v, at);
}
// `block` for a whole block of codes and few rows, those for which `can_multiply` is true
INLINE int can_multiply(const Rows *a, const Packed *p) {
  return a->n <= FEW && a->kind == LAID_OUT && can_turn(&p->k, a->D) && can_pair(&p->v, a->E) && (p->k.bits == 8 || p->k.group % 64 == 0);
}
static void block_of_codes(const Rows *a, const Room *room, const Packed *p, const int32_t *pos, int64_t at) {
  if (a->n == 1) block_for(1, a, room, p, pos, at);
  else if (a->n == 2) block_for(2, a, room, p, pos, at);
  else if (a->n == 3) block_for(3, a, room, p, pos, at);
  else block_for(4, a, room, p, pos, at);
}
#else
#define can_turn(c, D) 0
#define can_pair(c, E) ((c)->bits == 8)
#define turn_block(c, D, at, kt)
#define pair_block(c, E, at, vt, width) \
  for (int64_t e = 0; e < E; e += 16) pair_by_channels(c, e, at, vt, width)
#define can_multiply(a, p) 0
#define block_of_codes(a, room, p, pos, at)
// Values of 8 bits of channels [e, e + 16) in pairs of bf16 -> [32][width]: stored by channel, they need one
// transposition
INLINE void pair_by_channels(const Codes *c, int64_t e, int64_t at, uint32_t *vt, int64_t width) {
  const char *codes = c->codes + e * c->room + at;
  for (int r = 0; r < 16; r++) __builtin_prefetch(codes + r * c->room + 64, 0, 2);
  for (int64_t i = 0; i < 64; i += 32) {
    const F first = halves(c->scale, at + i), second = halves(c->scale, at + i + 16);
    U a[16];
    for (int r = 0; r < 16; r++) {
      const char *from = codes + r * c->room + i;
      a[r] = (U)narrow2(__builtin_convertvector(load(S8, from), F) * first, __builtin_convertvector(load(S8, from + 16), F) * second);
    }
    turn16(a);
    for (int r = 0; r < 16; r++) store(vt + (i / 2 + r) * width + e, a[r]);
  }
}
#endif
// Values of 8 bits are stored by channel; the next block's cache line of each channel is prefetched
INLINE void turn_values(const Codes *c, int is_wide, int64_t D, int64_t at, int64_t n, char *to) {
  const int64_t size = is_wide ? 4 : 2;
  for (int64_t d = 0; d < D; d += 16) {
    const char *codes = c->codes + d * c->room + at;
    for (int r = 0; r < 16; r++) __builtin_prefetch(codes + r * c->room + 64, 0, 2);
    for (int64_t i = 0; i < n; i += 16) {
      const F scale = halves(c->scale, at + i);
      U a[16];
      for (int r = 0; r < 16; r++) a[r] = (U)(__builtin_convertvector(load(S8, codes + r * c->room + i), F) * scale);
      turn16(a);
      for (int r = 0; r < 16; r++) put(is_wide, to + (i + r) * D * size, d, (F)a[r]);
    }
  }
}
// Dequantize values of slots [at, at + n)
INLINE void unpack_values(const Packed *p, int is_wide, int64_t D, int64_t at, int64_t n, char *to) {
  const Codes *c = &p->v;
  const int64_t size = D * (is_wide ? 4 : 2), groups = c->group ? D / c->group : 0;
  if (c->bits == 16) memcpy(to, c->codes + at * size, n * size);
  else if (c->bits == 8) turn_values(c, is_wide, D, at, n, to);
  else if (HAS_LOOKUP && !is_wide && c->bits == 4 && !c->fine && c->group % 32 == 0) values_by_four(c, D, at, n, (bf16 *)to);
  else
    for (int64_t i = 0; i < n; i++)
      for (int64_t d = 0; d < D; d += 16) {
        const int64_t first = (at + i) * groups;
        F scale = splat(half1(c->scale, first + d / c->group)), zero = splat(half1(c->zero, first + d / c->group));
        for (int r = 1; c->group % 16 && r < 16; r++) {
          const int64_t g = first + (d + r) / c->group;
          scale[r] = half1(c->scale, g), zero[r] = half1(c->zero, g);
        }
        put(is_wide, to + i * size, d, zero + refined_at(c, at + i, D, d) * scale);
      }
}
// Dequantize slots [at, at + n) -> keys of size D and values of size E, or null: none; up to 15 values more are written
static void unpack_slots(const Packed *p, int is_wide, int64_t D, int64_t E, int64_t at, int64_t n, char *k, char *v) {
  if (k && is_wide) unpack_keys(p, 1, D, at, n, k);
  else if (k) unpack_keys(p, 0, D, at, n, k);
  if (!v) return;
  if (is_wide) unpack_values(p, 1, E, at, n, v);
  else unpack_values(p, 0, E, at, n, v);
}
