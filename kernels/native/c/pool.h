// A pool of threads that share one job at a time. Chunks are handed out by a counter, so a slow core takes fewer of them;
// which thread makes a chunk never changes its bits. Workers spin for a while after a job, then sleep.
#pragma once
typedef void (*job_fn)(void *arg, int chunk);
// Run fn(arg, 0 .. chunks - 1), in any order, on the caller's thread and the workers; returns when all chunks are done.
void pool_run(job_fn fn, void *arg, int chunks);
