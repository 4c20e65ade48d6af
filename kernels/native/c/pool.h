// A pool of threads that share one job at a time. Chunks are handed out by a counter, so a slow core takes fewer of them;
// which thread makes a chunk never changes its bits. Workers spin for a while after a job, then sleep.
#pragma once
#include <stddef.h>
// `room`: memory of the thread that makes the chunk, aligned to 64, with whatever it held before
typedef void (*job_fn)(void *arg, int chunk, char *room);
// Run fn(arg, 0 .. chunks - 1), in any order, on the caller's thread and the workers, each with so many bytes of room;
// returns 1 when all chunks are done, or 0 at once where there is no memory for that.
int pool_run(job_fn fn, void *arg, int chunks, size_t bytes);
// Memory that calls use one after the other, with whatever it held before: large blocks that malloc hands back to the
// system cost more to get again than most of what is computed in them. One block is kept for each use; who finds it
// taken gets another. 0 where there is none. What `take_room` gave, `give_room` takes, or 0.
enum { OF_ROWS, OF_MLP, OF_LAYER, USES };
void *take_room(int use, size_t bytes);
void give_room(int use, void *room);
