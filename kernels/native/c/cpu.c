// Features of this CPU.
#include "pool.h"
#include <stdint.h>
#define API __attribute__((visibility("default")))
// A symbol whose name build.py makes from the sources. The loader checks it, because a library of other sources may
// take other arguments.
API int SOURCES(void) { return 1; }
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <unistd.h>
// Tiles are 8 KiB of additional registers, which a program must request (arch_prctl, ARCH_REQ_XCOMP_PERM)
static int may_use_tiles(void) { return !syscall(158, 0x1023, 18); }
#else
static int may_use_tiles(void) { return 0; }
#endif
static int bit(unsigned word, int at) { return word >> at & 1; }
// 0 = not supported, 1 = avx2, 2 = avx512, 3 = avx512bf16, 4 = amx; the system must save the registers too
API int cpu_level(void) {
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) || !bit(c, 12) || !bit(c, 29)) return 0;  // xsave, fma, f16c
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 5) || !bit(b, 3) || !bit(b, 8)) return 0;
  // f, dq, cd, bw, vl: what compilers call x86-64-v4
  if ((low & 0xe0) != 0xe0 || !bit(b, 16) || !bit(b, 17) || !bit(b, 28) || !bit(b, 30) || !bit(b, 31)) return 1;
  const int vnni = bit(c, 11), tiles = bit(d, 22) && bit(d, 24) && bit(d, 25) && (low >> 17 & 3) == 3;  // bf16, tile, int8
  if (!vnni || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !bit(a, 5)) return 2;
  return tiles && may_use_tiles() ? 4 : 3;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
// 1 = neon, 2 = neonbf16: with products of bf16 and of bytes
API int cpu_level(void) { return getauxval(16) >> 20 & 1 && getauxval(26) >> 14 & 1 ? 2 : 1; }
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
API int cpu_level(void) {
  int has = 0;
  size_t size = sizeof has;
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, 0, 0) && has ? 2 : 1;
}
#elif defined(__aarch64__)
API int cpu_level(void) { return 1; }
#endif
