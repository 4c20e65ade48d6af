// Slots of a KV head that are stored in few bits -> the numbers that they stand for, 64 slots at a time.
//
// Layouts are those of kernels/pack; numbers are rounded as there, so rows read what they would read had it been unpacked.
#pragma once
#include "lanes.h"

typedef _Float16 X __attribute__((vector_size(32), aligned(2)));   // 16 x fp16
typedef int8_t S8 __attribute__((vector_size(16), aligned(1)));    // 16 codes of 8 bits
typedef uint8_t C8 __attribute__((vector_size(8), aligned(1)));    // 16 codes of 4 bits
typedef uint8_t C4 __attribute__((vector_size(4), aligned(1)));    // 16 codes of 2 bits

typedef struct {
  const char *codes, *scale, *zero;
  int64_t bits;   // 16 = the numbers themselves
  int64_t group;  // slots that share a channel's scale (keys), channels that share a slot's (values); of 2 and 4 bits
  int64_t room;   // slots from channel to channel (values of 8 bits)
} Codes;
typedef struct {
  Codes k, v;
  const char *rest;  // keys in full of the last slots
  int64_t full;      // slots before them
} Packed;

INLINE F halves(const char *p, long i) { return __builtin_convertvector(load(X, (const _Float16 *)p + i), F); }
INLINE float half1(const char *p, long i) { return (float)((const _Float16 *)p)[i]; }
INLINE void put(int is_wide, char *to, long i, F x) {
  if (is_wide) store((float *)to + i, x);
  else store((bf16 *)to + i, narrow(x));
}
// Sixteen codes of 4 or 2 bits from the i-th on
INLINE F codes_at(const char *p, int64_t bits, long i) {
  const U by4 = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4}, by2 = {0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6};
  if (bits == 4) {
    const C8 c = load(C8, p + i / 2);
    return __builtin_convertvector(__builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), U) >> by4 & 15, F);
  }
  const C4 c = load(C4, p + i / 4);
  return __builtin_convertvector(__builtin_convertvector(__builtin_shufflevector(c, c, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), U) >> by2 & 3, F);
}
// Keys of slots [at, at + n), D numbers each
INLINE void unpack_keys(const Packed *p, int is_wide, long D, int64_t at, long n, char *to) {
  const Codes *c = &p->k;
  const long size = D * (is_wide ? 4 : 2);
  for (long i = 0; i < n; i++, to += size) {
    const int64_t slot = at + i;
    if (slot >= p->full) memcpy(to, p->rest + (slot - p->full) * size, size);
    else if (c->bits == 16) memcpy(to, c->codes + slot * size, size);
    else if (c->bits == 8) {
      const float scale = half1(c->scale, slot);
      for (long d = 0; d < D; d += 16) put(is_wide, to, d, __builtin_convertvector(load(S8, c->codes + slot * D + d), F) * scale);
    } else {
      const long group = slot / c->group * D;
      for (long d = 0; d < D; d += 16)
        put(is_wide, to, d, halves(c->zero, group + d) + codes_at(c->codes + slot * D * c->bits / 8, c->bits, d) * halves(c->scale, group + d));
    }
  }
}
// Values of 8 bits lie by channels; of each channel the next block's line is asked for
INLINE void turn_values(const Codes *c, int is_wide, long D, int64_t at, long n, char *to) {
  const long size = is_wide ? 4 : 2;
  for (long d = 0; d < D; d += 16) {
    const char *codes = c->codes + d * c->room + at;
    for (int r = 0; r < 16; r++) __builtin_prefetch(codes + r * c->room + 64, 0, 2);
    for (long i = 0; i < n; i += 16) {
      const F scale = halves(c->scale, at + i);
      U a[16];
      for (int r = 0; r < 16; r++) a[r] = (U)(__builtin_convertvector(load(S8, codes + r * c->room + i), F) * scale);
      turn16(a);
      for (int r = 0; r < 16; r++) put(is_wide, to + (i + r) * D * size, d, (F)a[r]);
    }
  }
}
// Values of slots [at, at + n)
INLINE void unpack_values(const Packed *p, int is_wide, long D, int64_t at, long n, char *to) {
  const Codes *c = &p->v;
  const long size = D * (is_wide ? 4 : 2), groups = c->group ? D / c->group : 0;
  if (c->bits == 16) memcpy(to, c->codes + at * size, n * size);
  else if (c->bits == 8) turn_values(c, is_wide, D, at, n, to);
  else
    for (long i = 0; i < n; i++)
      for (long d = 0; d < D; d += 16) {
        const long first = (at + i) * groups;
        F scale = splat(half1(c->scale, first + d / c->group)), zero = splat(half1(c->zero, first + d / c->group));
        for (int r = 1; c->group % 16 && r < 16; r++) {
          const long g = first + (d + r) / c->group;
          scale[r] = half1(c->scale, g), zero[r] = half1(c->zero, g);
        }
        put(is_wide, to + i * size, d, zero + codes_at(c->codes + (at + i) * D * c->bits / 8, c->bits, d) * scale);
      }
}
// Slots [at, at + n) -> keys of D and values of E numbers; up to 15 values more are written
static void unpack_slots(const Packed *p, int is_wide, long D, long E, int64_t at, long n, char *k, char *v) {
  if (is_wide) unpack_keys(p, 1, D, at, n, k), unpack_values(p, 1, E, at, n, v);
  else unpack_keys(p, 0, D, at, n, k), unpack_values(p, 0, E, at, n, v);
}
