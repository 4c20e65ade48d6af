// Sixteen lanes, and the few operations on them that are written differently for each kind of CPU.
//
// Vectors are clang's: 512 bits wide in the source, cut into what the CPU has by the compiler. Nothing here adds up across
// lanes in an order that a compiler may choose, and files are compiled without contraction: where a product and a sum are
// rounded once it says `fma`. So the bits of a lane depend on what was written and on nothing else.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define JOIN_(a, b) a##__##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) void JOIN(name, LEVEL)  // linear__avx512bf16

typedef uint16_t bf16;
typedef float F __attribute__((vector_size(64), aligned(4)));     // 16 x fp32
typedef int32_t I __attribute__((vector_size(64), aligned(4)));   // 16 x int32
typedef uint32_t U __attribute__((vector_size(64), aligned(4)));  // 16 x uint32: also 16 pairs of bf16
typedef uint16_t H __attribute__((vector_size(32), aligned(2)));  // 16 x bf16

#define load(T, p) (*(const T *)(p))
#define store(p, v) (*(__typeof__(v) *)(p) = (v))
INLINE F splat(float x) { return (F){} + x; }
INLINE F fma_(F a, F b, F c) { return __builtin_elementwise_fma(a, b, c); }
INLINE float wide1(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
INLINE F wide(H x) { return (F)(__builtin_convertvector(x, U) << 16); }

// To bf16, to nearest even; NaN stays NaN.
INLINE H narrow(F x) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)x);
#else
  U u = (U)x, even = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
  return __builtin_convertvector(((U)(x == x) & even) | ((U)(x != x) & nan), H);
#endif
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
