/* Threads over independent items. A pool of this library's own (never OpenMP, which clashes with torch's), started at
   first use, made anew in a forked child. Which thread runs which item never changes a result. */
#ifndef THREADS_H
#define THREADS_H

#include <stddef.h>

#include "args.h"

typedef struct Worker {
    int index; /* 0 is the calling thread */
    void *
        scratch; /* scratch_bytes, 64-byte aligned, not initialised, this worker's alone, kept between its items */
    struct Work *work;
} Worker;

typedef Status (*WorkBody)(void *context, int64_t item, Worker *worker, Error *err);

/* Runs body for each item 0 .. items-1 on up to call->num_threads threads, and waits. The first failure stops the
   rest and is returned. NO_MEMORY when scratch is not to be had, INTERRUPTED after Ctrl-C. */
Status parallel_for(const Call *call, int64_t items, size_t scratch_bytes, WorkBody body,
                    void *context, Error *err);

/* For long items, asked between chunks: nonzero means return INTERRUPTED now (parallel_for writes the text). */
int worker_stop(Worker *worker);

#endif
