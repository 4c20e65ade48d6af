// Run by test_platforms.py on another kind of CPU, emulated: LIBRARY LEVEL... -> a line for each level that is right.
//
// A row alone, the same row among many and with several threads must have the same bits, and be near a plain sum.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { M = 11, N = 131, K = 70, PANELS = (N + 63) / 64 };
typedef void (*linear_fn)(const void *, const void *, const void *, void *, int64_t, int64_t, int64_t, int);

static float of_bf16(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
static float at(const void *a, int64_t i, int is_wide) { return is_wide ? ((const float *)a)[i] : of_bf16(((const uint16_t *)a)[i]); }
static void fill(void *a, int64_t n, int is_wide) {
  for (int64_t i = 0; i < n; i++) {
    float f = (float)rand() / (float)RAND_MAX - 0.5f;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (is_wide) ((float *)a)[i] = f;
    else ((uint16_t *)a)[i] = (uint16_t)(u >> 16);
  }
}
static const char *check(linear_fn linear, void (*threads)(int), int is_wide) {
  static uint32_t x[M * K], w[N * K], packed[PANELS * K * 64], bias[N], all[M * N], one[M * N];
  const int64_t size = is_wide ? 4 : 2, S = K * size / 4;
  fill(x, M * K, is_wide), fill(w, N * K, is_wide), fill(bias, N, is_wide);
  memset(packed, 0, sizeof packed);
  for (int64_t n = 0; n < N; n++)
    for (int64_t s = 0; s < S; s++) packed[(n / 64 * S + s) * 64 + n % 64] = w[n * S + s];
  threads(1);
  for (int64_t m = 0; m < M; m++) linear((char *)x + m * K * size, packed, bias, (char *)one + m * N * size, 1, N, S, is_wide);
  for (int n = 1; n <= 3; n++) {
    threads(n);
    memset(all, 255, sizeof all);
    linear(x, packed, bias, all, M, N, S, is_wide);
    if (memcmp(all, one, M * N * size)) return "a row's bits depend on its neighbours";
  }
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      double sum = at(bias, n, is_wide);
      for (int64_t k = 0; k < K; k++) sum += (double)at(x, m * K + k, is_wide) * at(w, n * K + k, is_wide);
      if (!(fabs(at(one, m * N + n, is_wide) - sum) <= fabs(sum) * (is_wide ? 1e-6 : 0.004) + 1e-6)) return "a wrong sum";
    }
  return 0;
}
int main(int n_args, char **args) {
  void *library = n_args > 2 ? dlopen(args[1], RTLD_NOW) : 0;
  if (!library) return puts("no library"), 2;
  const int level = ((int (*)(void))dlsym(library, "cpu_level"))();
  void (*threads)(int) = (void (*)(int))dlsym(library, "pool_threads");
  for (int i = 0; i < level && i + 2 < n_args; i++) {
    char name[64];
    snprintf(name, sizeof name, "linear__%s", args[i + 2]);
    linear_fn linear = (linear_fn)dlsym(library, name);
    for (int is_wide = 0; is_wide <= 1; is_wide++) {
      const char *wrong = linear ? check(linear, threads, is_wide) : "missing";
      if (wrong) return printf("%s, %s: %s\n", name, is_wide ? "fp32" : "bf16", wrong), 1;
    }
    puts(args[i + 2]);
  }
  return 0;
}
