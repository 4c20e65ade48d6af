// Vectors of sixteen lanes, and the few operations that need different code on each kind of CPU.
//
// Vectors are clang's: 512 bits wide in the source, split by the compiler to the CPU's width. No sum across lanes is in
// an order that the compiler may choose, and files are compiled without contraction: `fma` is written where a product
// and a sum are rounded once. The bits of a lane therefore depend on the source code alone.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UP(n, to) (((n) + (to)-1) / (to) * (to))
#define JOIN_(a, b) a##__##b
#define JOIN(a, b) JOIN_(a, b)
// linear__avx512bf16; returns 1, or 0 if no work memory could be allocated: the output is undefined then
#define EXPORT(name) __attribute__((visibility("default"))) int JOIN(name, LEVEL)

typedef uint16_t bf16;
typedef float F __attribute__((vector_size(64), aligned(4)));     // 16 x fp32
typedef int32_t I __attribute__((vector_size(64), aligned(4)));   // 16 x int32
typedef uint32_t U __attribute__((vector_size(64), aligned(4)));  // 16 x uint32: also 16 pairs of bf16
typedef uint16_t H __attribute__((vector_size(32), aligned(2)));  // 16 x bf16
typedef _Float16 H16 __attribute__((vector_size(32), aligned(2)));  // 16 x fp16
typedef int8_t B __attribute__((vector_size(16), aligned(1)));    // 16 x int8

#define load(T, p) (*(const T *)(p))
#define store(p, v) (*(__typeof__(v) *)(p) = (v))
INLINE F splat(float x) { return (F){} + x; }
INLINE F fma_(F a, F b, F c) { return __builtin_elementwise_fma(a, b, c); }
INLINE float wide1(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
INLINE F wide(H x) { return (F)(__builtin_convertvector(x, U) << 16); }

// Round to bf16, to nearest even; NaN remains NaN.
INLINE H narrow(F x) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)x);
#else
  U u = (U)x, even = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
  return __builtin_convertvector(((U)(x == x) & even) | ((U)(x != x) & nan), H);
#endif
}

// table[i] for 64 bytes i below 16
INLINE U table_bytes(const uint8_t *table, U at) {
#if defined(__AVX512BW__)
  return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), (__m512i)at);
#elif defined(__AVX2__)
  const __m256i of = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
  __m256i half[2];
  memcpy(half, &at, 64);
  half[0] = _mm256_shuffle_epi8(of, half[0]), half[1] = _mm256_shuffle_epi8(of, half[1]);
  memcpy(&at, half, 64);
  return at;
#else
  uint8x16_t part[4];
  memcpy(part, &at, 64);
  for (int i = 0; i < 4; i++) part[i] = vqtbl1q_u8(vld1q_u8(table), part[i]);
  memcpy(&at, part, 64);
  return at;
#endif
}

// where ? a : b by lane; `where` is the result of a comparison
INLINE F pick(I where, F a, F b) { return (F)(((U)where & (U)a) | (~(U)where & (U)b)); }
INLINE F larger(F a, F b) { return pick(a > b, a, b); }  // b if either is NaN

// Prefetch memory that is read next into the second-level cache; `next` may be null. Called where computation takes
// longest
INLINE void ask_for(const char *next, int64_t bytes) {
  for (int64_t i = 0; next && i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
}

// Load 16 words at p, of which `n` > 0 exist; the others are zeros
INLINE U load_some(const void *p, int64_t n) {
  U v = {0};
  if (n >= 16) v = load(U, p);
  else if (n == 8) memcpy(&v, p, 32);
  else memcpy(&v, p, n * 4);
  return v;
}

// Sum and maximum of all lanes: by halves, in this order everywhere.
INLINE float sum_across(F v) {
  float a[16], b[8], c[4];
  store(a, v);
  for (int i = 0; i < 8; i++) b[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
}
INLINE float top_across(F v) {
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = larger(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

// 2^x for x < 127, +0 below -126; exact at 0, relative error 2e-7. Adding 3 * 2^22 puts the integer part of x in the
// lowest bits, which are shifted to the exponent.
INLINE F exp2_(F x) {
  F whole = x + 12582912.f, part = x - (whole - 12582912.f), y = splat(1.535336188319500e-4f);
  y = fma_(y, part, splat(1.339887440266574e-3f));
  y = fma_(y, part, splat(9.618437357674640e-3f));
  y = fma_(y, part, splat(5.550332471162809e-2f));
  y = fma_(y, part, splat(2.402264791363012e-1f));
  y = fma_(y, part, splat(6.931472028550421e-1f));
  y = fma_(y, part, splat(1.f));
  return pick(x < -126.f, splat(0.f), (F)((U)y + ((U)whole << 23)));
}
INLINE float exp2_1(float x) { return exp2_(splat(x))[0]; }

// tanh: a polynomial below 0.625 (Cephes), 1 - 2 / (1 + e^2x) above; relative error 2e-7
INLINE F tanh_(F x) {
  F a = (F)((U)x & 0x7fffffffu), z = x * x, y = splat(-5.70498872745e-3f);
  y = fma_(y, z, splat(2.06390887954e-2f));
  y = fma_(y, z, splat(-5.37397155531e-2f));
  y = fma_(y, z, splat(1.33314422036e-1f));
  y = fma_(y, z, splat(-3.33332819422e-1f));
  F big = 1.f - 2.f / (1.f + exp2_(pick(a > 20.f, splat(20.f), a) * 2.88539008177792681f));
  return pick(a < 0.625f, fma_(y, z * x, x), (F)((U)big | ((U)x & 0x80000000u)));
}

// log2 of a positive normal number, with an error of 1e-7 of the larger of the result and 1: by the series of atanh at
// 1
INLINE float log2_(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const int32_t n = (int32_t)(u - 0x3f3504f3u) >> 23;  // x / 2^n is between sqrt(1/2) and sqrt(2)
  u -= (uint32_t)n << 23;
  memcpy(&x, &u, 4);
  const float t = (x - 1.f) / (x + 1.f), z = t * t;
  return (float)n + t * (2.885390082f + z * (0.961796694f + z * (0.577078016f + z * (0.412198583f + z * 0.320598898f))));
}

// Transpose 16 rows of 16 words to 16 columns
INLINE void turn16(U *a) {
  U b[16];
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
  for (int i = 0; i < 8; i++) b[2 * i] = LOW(a[2 * i], a[2 * i + 1]), b[2 * i + 1] = HIGH(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 4; i++) {
    a[4 * i] = LOW2(b[4 * i], b[4 * i + 2]), a[4 * i + 1] = HIGH2(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = LOW2(b[4 * i + 1], b[4 * i + 3]), a[4 * i + 3] = HIGH2(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = EVEN(a[i], a[i + 4]), b[i + 4] = ODD(a[i], a[i + 4]);
    b[i + 8] = EVEN(a[i + 8], a[i + 12]), b[i + 12] = ODD(a[i + 8], a[i + 12]);
  }
  for (int i = 0; i < 8; i++) a[i] = EVEN(b[i], b[i + 8]), a[i + 8] = ODD(b[i], b[i + 8]);
}

// acc + a0 * b0 + a1 * b1 by lane; a: 16 pairs of bf16 (the lower half first), b: one pair for all lanes.
INLINE F dot2(F acc, U a, uint32_t b) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#else
  uint32_t low = b << 16, high = b & 0xffff0000u;
  float x0, x1;
  memcpy(&x0, &low, 4);
  memcpy(&x1, &high, 4);
  return fma_((F)(a & 0xffff0000u), splat(x1), fma_((F)(a << 16), splat(x0), acc));
#endif
}
