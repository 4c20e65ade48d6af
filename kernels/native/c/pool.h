// Pool of threads that share one job at a time. A counter hands out chunks, so a slow core gets fewer of them. The
// thread that computes a chunk never changes its bits. Workers spin for a while after a job, then sleep.
#pragma once
#include <stddef.h>
// `room`: work memory of the thread that computes the chunk, aligned to 64, not initialized
typedef void (*job_fn)(void *arg, int chunk, char *room);
// Run fn(arg, 0 .. chunks - 1), in any order, on the caller's thread and the workers, each with `bytes` of work memory.
// Return 1 when all chunks are done, or 0 at once if that memory cannot be allocated.
int pool_run(job_fn fn, void *arg, int chunks, size_t bytes);
// Work memory that calls use one after the other, not initialized. It is kept because large blocks that malloc returns
// to the system cost more to allocate again than most computations in them. One block is kept for each use; while it is
// taken, another is allocated. `take_room` returns 0 if there is no memory. `give_room` accepts blocks of `take_room`,
// or 0.
enum { OF_ROWS, OF_MLP, OF_LAYER, USES };
void *take_room(int use, size_t bytes);
void give_room(int use, void *room);
