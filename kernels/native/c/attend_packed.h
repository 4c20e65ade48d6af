// Slots of a KV head that are stored in few bits -> the numbers that they stand for, 64 slots at a time.
//
// Layouts are those of kernels/pack; numbers are rounded as there, so rows read what they would read had it been unpacked.
#pragma once
#include "lanes.h"

typedef _Float16 X __attribute__((vector_size(32), aligned(2)));   // 16 x fp16
typedef int8_t S8 __attribute__((vector_size(16), aligned(1)));    // 16 codes of 8 bits
typedef uint8_t C16 __attribute__((vector_size(16), aligned(1)));  // 32 codes of 4 bits
typedef uint16_t H32 __attribute__((vector_size(64), aligned(2)));  // 32 x bf16
typedef uint32_t U4 __attribute__((vector_size(16), aligned(1)));
typedef uint32_t U8 __attribute__((vector_size(32), aligned(1)));
typedef uint16_t C32 __attribute__((vector_size(16), aligned(1)));  // the same, by four
typedef uint8_t C8 __attribute__((vector_size(8), aligned(1)));    // 16 codes of 4 bits
typedef uint8_t C4 __attribute__((vector_size(4), aligned(1)));    // 16 codes of 2 bits

typedef struct {
  const char *codes, *scale, *zero, *fine;  // the last of 4 bits alone, or null: the lower halves of codes of 8
  int64_t bits;   // 16 = the numbers themselves
  int64_t group;  // slots that share a channel's scale (keys), channels that share a slot's (values); of 2 and 4 bits
  int64_t room;   // slots from channel to channel (values of 8 bits)
} Codes;
typedef struct {
  Codes k, v;
  const char *rest;  // keys in full of the last slots
  int64_t full;      // slots before them
} Packed;

INLINE F halves(const char *p, int64_t i) { return __builtin_convertvector(load(X, (const _Float16 *)p + i), F); }
INLINE float half1(const char *p, int64_t i) { return (float)((const _Float16 *)p)[i]; }
INLINE void put(int is_wide, char *to, int64_t i, F x) {
  if (is_wide) store((float *)to + i, x);
  else store((bf16 *)to + i, narrow(x));
}
// Sixteen codes of 4 or 2 bits from the i-th on
INLINE F codes_at(const char *p, int64_t bits, int64_t i) {
  const U by4 = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4}, by2 = {0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6};
  if (bits == 4) {
    const C8 c = load(C8, p + i / 2);
    return __builtin_convertvector(__builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), U) >> by4 & 15, F);
  }
  const C4 c = load(C4, p + i / 4);
  return __builtin_convertvector(__builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), U) >> by2 & 3, F);
}
// The same, and what their lower halves, if any, say between two steps
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
// Keys of 4 bits to bf16, 32 numbers at a time, of slots that share their channels' scales
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
// Keys of slots [at, at + n), D numbers each
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
#if defined(__AVX512BW__)
#define HAS_LOOKUP 1
// Values of 4 bits to bf16: the sixteen numbers that a group's codes stand for are made once and looked up, 32 at a time
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
// What a block multiplies in pairs, of 64 slots, without the numbers in between: the two codes of a pair are looked up at once, in
// a table of the sixteen numbers that the first may stand for and the sixteen of the second. 5 bits are looked at.
#define AS_IT_IS(where, x) __asm__("" : where(x))  // or the compiler finds a way that takes longer
#define LOOK_UP(codes, table) (U)_mm512_permutexvar_epi16((__m512i)(codes), (__m512i)(table))
INLINE H32 table_of(const float *zero, const float *scale, int64_t first, int64_t second) {
  const F each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define NUMBERS(i) (F)_mm512_set1_ps(zero[i]) + each * (F)_mm512_set1_ps(scale[i])  // `splat` would add
  return narrow2(NUMBERS(first), NUMBERS(second));
#undef NUMBERS
}
INLINE int can_turn_by_four(const Codes *c, int64_t D) { return c->bits == 4 && !c->fine && D % 32 == 0 && c->group % 16 == 0; }
INLINE int can_pair_by_four(const Codes *c) { return c->bits == 4 && !c->fine && c->group % 32 == 0; }
// Codes of 32 numbers, a: of each 16 slots 4 words of 4 pairs -> 16 rows of kt, for `parts` times 16 slots that share scales
INLINE void look_up_keys(int parts, const Codes *c, int64_t at, const U *a, uint32_t *kt) {
  float zero[32], scale[32];
  for (int i = 0; i < 32; i += 16) store(zero + i, halves(c->zero, at + i)), store(scale + i, halves(c->scale, at + i));
  AS_IT_IS("+m", zero); AS_IT_IS("+m", scale);
#pragma clang loop unroll(full)
  for (int word = 0; word < 4; word++, kt += 4 * 64) {
    U first[4], second[4];
    for (int part = 0; part < parts; part++) {
      first[part] = a[part * 4 + word] & 0x0f0f0f0f, second[part] = (a[part * 4 + word] >> 4 & 0x0f0f0f0f) | 0x10101010;
      AS_IT_IS("+v", first[part]); AS_IT_IS("+v", second[part]);
    }
#pragma clang loop unroll(full)
    for (int byte = 0; byte < 4; byte++) {
      const H32 table = table_of(zero, scale, 8 * word + 2 * byte, 8 * word + 2 * byte + 1);
      for (int part = 0; part < parts; part++) {
        const U high = byte < 2 ? second[part] << (16 - 8 * byte) : second[part] >> (8 * byte - 16);
        store(kt + byte * 64 + part * 16, LOOK_UP((first[part] >> 8 * byte & 0xffff) | (high & 0xffff0000), table));
      }
    }
  }
}
// Keys -> [D / 2][64]: a byte of codes is a pair
INLINE void turn_by_four(const Codes *c, int64_t D, int64_t at, uint32_t *kt) {
  ask_for(c->codes + (at + 64) * D / 2, 32 * D);
  for (int64_t d = 0; d < D; d += 32) {
    const char *codes = c->codes + (at * D + d) / 2;
    U a[16];
    for (int i = 0; i < 16; i++, codes += D / 2) {
#define PART(i) load(U4, codes + (i) * 8 * D)
      const U8 low = __builtin_shufflevector(PART(0), PART(1), 0, 1, 2, 3, 4, 5, 6, 7), high = __builtin_shufflevector(PART(2), PART(3), 0, 1, 2, 3, 4, 5, 6, 7);
      a[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#undef PART
    }
    turn16(a);
    if (c->group % 64 == 0) look_up_keys(4, c, at / c->group * D + d, a, kt + d * 32);
    else
      for (int part = 0; part < 4; part++) look_up_keys(1, c, (at + part * 16) / c->group * D + d, a + part * 4, kt + d * 32 + part * 16);
  }
}
// Values -> [32][width]: of two slots the codes of a channel
INLINE void pair_by_four(const Codes *c, int64_t E, int64_t at, uint32_t *vt, int64_t width) {
  const H32 from = {0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12};
  const H32 where = {0, 8, 0, 8, 0, 8, 0, 8, 1, 9, 1, 9, 1, 9, 1, 9, 2, 10, 2, 10, 2, 10, 2, 10, 3, 11, 3, 11, 3, 11, 3, 11};
  const int64_t groups = E / c->group, pieces = c->group / 32;
  const char *x = c->codes + at * E / 2, *y = x + E / 2;
  ask_for(x + 32 * E, 32 * E);
  float zero[64 * groups], scale[64 * groups];
  for (int64_t i = 0; i < 64 * groups; i += 16) store(zero + i, halves(c->zero, at * groups + i)), store(scale + i, halves(c->scale, at * groups + i));
  for (int64_t i = 0; i < 64 * groups; i += 2 * groups, x = y, y += E / 2, vt += width) {
    uint32_t *to = vt;
    for (int64_t g = i; g < i + groups; g++) {
      const H32 table = table_of(zero, scale, g, g + groups);
      for (int64_t piece = 0; piece < pieces; piece++, x += 16, y += 16, to += 32) {
        __m256i both = (__m256i)__builtin_shufflevector(load(C32, x), load(C32, y), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        AS_IT_IS("+v", both);
        for (int half = 0; half < 2; half++) {
          const U codes = (U)((H32)_mm512_permutexvar_epi16((__m512i)(where + (uint16_t)(half * 4)), _mm512_castsi256_si512(both)) >> from);
          store(to + half * 16, LOOK_UP((codes & 0xf000f) | 0x100000, table));
        }
      }
    }
  }
}
#else
#define HAS_LOOKUP 0
#define values_by_four(c, D, at, n, to)
#define can_turn_by_four(c, D) 0
#define can_pair_by_four(c) 0
#define turn_by_four(c, D, at, kt)
#define pair_by_four(c, D, at, vt, width)
#endif
// Values of 8 bits of 64 slots in pairs of bf16, [32][width]: where they lie by channels pairs need one turn
INLINE void pair_by_channels(const Codes *c, int64_t E, int64_t at, uint32_t *vt, int64_t width) {
  for (int64_t d = 0; d < E; d += 16) {
    const char *codes = c->codes + d * c->room + at;
    for (int r = 0; r < 16; r++) __builtin_prefetch(codes + r * c->room + 64, 0, 2);
    for (int64_t i = 0; i < 64; i += 32) {
      const F first = halves(c->scale, at + i), second = halves(c->scale, at + i + 16);
      U a[16];
      for (int r = 0; r < 16; r++) {
        const char *from = codes + r * c->room + i;
        a[r] = (U)narrow2(__builtin_convertvector(load(S8, from), F) * first, __builtin_convertvector(load(S8, from + 16), F) * second);
      }
      turn16(a);
      for (int r = 0; r < 16; r++) store(vt + (i / 2 + r) * width + d, a[r]);
    }
  }
}
// Values of 8 bits lie by channels; of each channel the next block's line is asked for
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
// Values of slots [at, at + n)
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
// Slots [at, at + n) -> keys of D and values of E numbers, or null: none; up to 15 values more are written
static void unpack_slots(const Packed *p, int is_wide, int64_t D, int64_t E, int64_t at, int64_t n, char *k, char *v) {
  if (k && is_wide) unpack_keys(p, 1, D, at, n, k);
  else if (k) unpack_keys(p, 0, D, at, n, k);
  if (!v) return;
  if (is_wide) unpack_values(p, 1, E, at, n, v);
  else unpack_values(p, 0, E, at, n, v);
}
