// Implementation of pool.h.
#include "pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#define MOST 256
#define SPIN_NS 200000  // a decoding pass starts a job every 10 to 100 us: sleeping threads would be late for each

// ticket = number of the job (high half) and its next chunk (low half). Taking a chunk and checking that the job is
// still the same is one atomic step. A job is done when its chunks are done, so no job waits for a worker that is
// descheduled.
static struct job { job_fn fn; void *arg; uint32_t chunks; int threads; char *room; size_t bytes; } jobs[2];
static _Atomic uint64_t ticket;
static atomic_uint done, sleepers;
static int n_threads = 1, n_started = 1, minds_forks;
static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;  // one job at a time, for all callers
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static unsigned turn_now(void) { return atomic_load_explicit(&ticket, memory_order_acquire) >> 32; }
static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}
static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static void work(unsigned turn, int mine) {
  for (uint64_t t = atomic_load_explicit(&ticket, memory_order_acquire); t >> 32 == turn;) {
    struct job j = jobs[turn & 1];  // read before the ticket is taken: if the exchange succeeds, the job was this one
    if ((uint32_t)t >= j.chunks || mine >= j.threads) return;
    if (!atomic_compare_exchange_weak(&ticket, &t, t + 1)) continue;
    j.fn(j.arg, (int)(uint32_t)t, j.room + mine * j.bytes);
    atomic_fetch_add_explicit(&done, 1, memory_order_release);
    t = atomic_load_explicit(&ticket, memory_order_acquire);
  }
}
static void sleep_past(unsigned seen) {
  pthread_mutex_lock(&bed);
  atomic_fetch_add(&sleepers, 1);
  while (turn_now() == seen) pthread_cond_wait(&wake, &bed);
  atomic_fetch_sub(&sleepers, 1);
  pthread_mutex_unlock(&bed);
}
static void *worker(void *mine) {
  unsigned seen = 0;
  for (;;) {
    int64_t until = 0;
    for (int i = 0; turn_now() == seen; i++) {
      relax();
      if (i % 256 != 255) continue;
      int64_t t = now();
      if (!until) until = t + SPIN_NS;
      else if (t > until) sleep_past(seen);
    }
    seen = turn_now();
    work(seen, (int)(intptr_t)mine);
  }
  return 0;
}
__attribute__((unused))  // on Windows, which does not fork
static void after_fork(void) {  // a child has no workers: it starts them when it sets its number of threads
  pthread_mutex_init(&owner, 0);
  pthread_mutex_init(&bed, 0);
  pthread_cond_init(&wake, 0);
  atomic_store(&sleepers, 0);
  jobs[0] = jobs[1] = (struct job){0};  // a running job is the parent's: no worker of the child may continue it
  n_threads = n_started = 1;
}
// Set the number of threads per job, with the caller's thread. Workers are started once and never end.
__attribute__((visibility("default"))) void pool_threads(int n) {
  pthread_mutex_lock(&owner);
  if (!minds_forks) pthread_atfork(0, 0, after_fork), minds_forks = 1;  // once: handlers cannot be removed
  n_threads = n < 1 ? 1 : n > MOST ? MOST : n;
  for (; n_started < n_threads; n_started++) {
    pthread_t t;
    if (pthread_create(&t, 0, worker, (void *)(intptr_t)n_started)) break;  // fewer workers then: the caller computes too
    pthread_detach(t);
  }
  pthread_mutex_unlock(&owner);
}
// Allocate n times `bytes` at an address that is a multiple of 64; `all`: the pointer to free
static char *room_for(int n, size_t bytes, void **all) {
  *all = bytes ? malloc(n * bytes + 64) : 0;
  return (char *)(((uintptr_t)*all + 63) / 64 * 64);
}
static int run_alone(job_fn fn, void *arg, int chunks, size_t bytes) {
  void *all;
  char *room = room_for(1, bytes, &all);
  if (bytes && !all) return 0;
  for (int c = 0; c < chunks; c++) fn(arg, c, room);
  free(all);
  return 1;
}
int pool_run(job_fn fn, void *arg, int chunks, size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (n_threads == 1 || chunks == 1) return run_alone(fn, arg, chunks, bytes);
  pthread_mutex_lock(&owner);
  void *all;
  char *room = room_for(n_threads, bytes, &all);
  if (bytes && !all) {
    pthread_mutex_unlock(&owner);
    return 0;
  }
  unsigned turn = turn_now() + 1;
  jobs[turn & 1] = (struct job){fn, arg, (uint32_t)chunks, n_threads, room, bytes};
  atomic_store_explicit(&done, 0, memory_order_relaxed);
  atomic_store(&ticket, (uint64_t)turn << 32);
  if (atomic_load(&sleepers)) {
    pthread_mutex_lock(&bed);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&bed);
  }
  work(turn, 0);
  while (atomic_load_explicit(&done, memory_order_acquire) < (unsigned)chunks) relax();
  pthread_mutex_unlock(&owner);
  free(all);
  return 1;
}
// The size of a block is stored before it.
static _Atomic(size_t *) kept[USES];
void *take_room(int use, size_t bytes) {
  size_t *room = atomic_exchange(&kept[use], 0);
  if (room && *room < bytes) free(room), room = 0;
  if (!room && (room = malloc(bytes + 64))) *room = bytes;
  return room ? (char *)room + 64 : 0;
}
void give_room(int use, void *room) {
  if (room) free(atomic_exchange(&kept[use], (size_t *)((char *)room - 64)));
}
// Free the kept blocks; running calls keep theirs.
__attribute__((visibility("default"))) void pool_release(void) {
  for (int use = 0; use < USES; use++) free(atomic_exchange(&kept[use], 0));
}
