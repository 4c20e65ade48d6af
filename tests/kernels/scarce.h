// Stands before every file of a library that test_pool.py builds: the `refused`-th request for memory finds none.
#include <stdlib.h>
__attribute__((weak, visibility("default"))) int requests, refused;
static inline void *scarce(size_t n) { return ++requests == refused ? 0 : malloc(n); }
#define malloc scarce
