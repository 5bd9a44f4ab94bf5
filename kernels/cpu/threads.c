/* The pool. One atomic word holds how many seats the present work still offers and how many workers sit; a worker
   takes a seat by compare-and-swap, so the caller can close the seats that nobody took and never waits for a
   thread that is still waking up. One caller at a time owns the pool: another Python thread that calls meanwhile,
   or a body that calls again, runs its items on its own thread alone, at once. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum {
    MAX_WORKERS = 255,
    SPINS = 1000,               /* tries before a thread sleeps: about 50 us */
    POLL_NS = 30 * 1000 * 1000, /* how often Ctrl-C is looked for */
    KEPT_SCRATCH = 4 << 20,     /* a thread's scratch up to this size stays allocated */
    ALIGNMENT = 64,
    STACK = 4 << 20,
};

typedef struct Work {
    const Call *call;
    int64_t items;
    size_t scratch_bytes;
    WorkBody body;
    void *context;
    int threads;
    int64_t polled; /* ns; worker 0 alone */
    atomic_int_least64_t next;
    atomic_int stop;
    Status status; /* of the first failure; written by whoever set stop */
    Error error;
} Work;

typedef struct {
    _Alignas(64) atomic_uint seats; /* offered << 16 | taken and not yet left */
    _Alignas(64) atomic_flag owned;
    Work *work;
    int workers;
    int sleepers, waiting; /* under mutex */
    pthread_mutex_t mutex;
    pthread_cond_t start, done;
} Pool;

static Pool pool;
static pthread_once_t pool_made = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key;

typedef struct {
    void *data;
    size_t bytes;
} Scratch;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void scratch_free(void *held)
{
    Scratch *scratch = held;
    if (scratch)
        free(scratch->data);
    free(scratch);
}

/* This thread's scratch of at least that many bytes; NULL when memory is not to be had. */
static void *scratch_get(size_t bytes)
{
    Scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch) {
        scratch = calloc(1, sizeof *scratch);
        if (!scratch || pthread_setspecific(scratch_key, scratch)) {
            free(scratch);
            return NULL;
        }
    }
    if (scratch->bytes < bytes) {
        free(scratch->data);
        scratch->bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        scratch->data = aligned_alloc(ALIGNMENT, scratch->bytes);
        if (!scratch->data)
            scratch->bytes = 0;
    }
    return scratch->data;
}

/* Takes this thread's scratch away, so that a nested call cannot use the same; gives back what is left of it. */
static void *scratch_take(size_t bytes, Scratch *held)
{
    *held = (Scratch){NULL, 0};
    if (!bytes)
        return NULL;
    void *data = scratch_get(bytes);
    Scratch *kept = pthread_getspecific(scratch_key);
    if (data) {
        *held = *kept;
        *kept = (Scratch){NULL, 0};
    }
    return data;
}

static void scratch_give(Scratch *held)
{
    Scratch *kept = pthread_getspecific(scratch_key);
    if (held->data && kept && !kept->data && held->bytes <= KEPT_SCRATCH)
        *kept = *held;
    else
        free(held->data);
}

/* The first failure counts. */
static void work_fail(Work *work, Status status, const Error *err)
{
    int running = 0;
    if (!atomic_compare_exchange_strong(&work->stop, &running, 1))
        return;
    work->status = status;
    work->error = *err;
}

static void work_poll(Work *work)
{
    if (!work->call->interrupted)
        return;
    int64_t now = now_ns();
    if (now - work->polled < POLL_NS)
        return;
    work->polled = now;
    Error err;
    if (work->call->interrupted()) {
        fail(&err, INTERRUPTED, "interrupted");
        work_fail(work, INTERRUPTED, &err);
    }
}

int worker_stop(Worker *worker)
{
    if (worker->index == 0)
        work_poll(worker->work);
    return atomic_load_explicit(&worker->work->stop, memory_order_relaxed);
}

/* What each thread does: claims items until none is left. */
static void work_run(Work *work, int index)
{
    Error err;
    Scratch held;
    Worker worker = {index, scratch_take(work->scratch_bytes, &held), work};
    if (work->scratch_bytes && !worker.scratch) {
        fail(&err, NO_MEMORY, "no memory for %zu bytes of scratch", work->scratch_bytes);
        work_fail(work, NO_MEMORY, &err);
        return;
    }
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (item >= work->items)
            break;
        Status status = work->body(work->context, item, &worker, &err);
        if (status != OK)
            work_fail(work, status, &err);
        if (worker_stop(&worker))
            break;
    }
    scratch_give(&held);
}

/* Sits down if a seat is offered; the seat's number is the worker's index. */
static int seat_take(void)
{
    unsigned seats = atomic_load_explicit(&pool.seats, memory_order_relaxed);
    while (seats >> 16) {
        if (atomic_compare_exchange_weak(&pool.seats, &seats, seats - (1u << 16) + 1))
            return (int)(seats >> 16);
    }
    return 0;
}

static void seat_leave(void)
{
    if (atomic_fetch_sub(&pool.seats, 1) != 1)
        return;
    pthread_mutex_lock(&pool.mutex);
    if (pool.waiting)
        pthread_cond_signal(&pool.done);
    pthread_mutex_unlock(&pool.mutex);
}

static int seat_wait(void)
{
    int seat = 0;
    for (int i = 0; i < SPINS && !(seat = seat_take()); i++)
        relax();
    if (seat)
        return seat;
    pthread_mutex_lock(&pool.mutex);
    pool.sleepers++;
    while (!(seat = seat_take()))
        pthread_cond_wait(&pool.start, &pool.mutex);
    pool.sleepers--;
    pthread_mutex_unlock(&pool.mutex);
    return seat;
}

static void *worker_main(void *unused)
{
    (void)unused;
    for (;;) {
        int seat = seat_wait();
        work_run(pool.work, seat);
        seat_leave();
    }
    return NULL;
}

static void pool_clear(void)
{
    atomic_init(&pool.seats, 0);
    atomic_flag_clear(&pool.owned);
    pool.work = NULL;
    pool.workers = pool.sleepers = pool.waiting = 0;
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.start, NULL);
    pthread_cond_init(&pool.done, NULL);
}

/* The threads of the parent do not exist in a forked child, so the child begins with an empty pool. */
static void pool_make(void)
{
    pthread_key_create(&scratch_key, scratch_free);
    pool_clear();
    pthread_atfork(NULL, NULL, pool_clear);
}

/* Starts threads until there are that many; fewer when the system refuses. Signals stay with the caller's threads. */
static int pool_grow(int workers)
{
    if (pool.workers >= workers)
        return workers;
    sigset_t all, before;
    pthread_attr_t attr;
    sigfillset(&all);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_t thread;
    while (pool.workers < workers && pthread_create(&thread, &attr, worker_main, NULL) == 0)
        pool.workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return pool.workers;
}

static void pool_start(Work *work, int seats)
{
    pool.work = work;
    atomic_store(&pool.seats, (unsigned)seats << 16);
    pthread_mutex_lock(&pool.mutex);
    if (pool.sleepers)
        pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.mutex);
}

/* Closes the seats that nobody took and waits for those who sit. */
static void pool_finish(Work *work)
{
    unsigned taken = atomic_fetch_and(&pool.seats, 0xffff) & 0xffff;
    for (int i = 0; taken && i < SPINS; i++) {
        relax();
        taken = atomic_load(&pool.seats);
    }
    if (!taken)
        return;
    pthread_mutex_lock(&pool.mutex);
    pool.waiting = 1;
    while (atomic_load(&pool.seats)) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += POLL_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&pool.done, &pool.mutex, &until);
        pthread_mutex_unlock(&pool.mutex);
        work_poll(work);
        pthread_mutex_lock(&pool.mutex);
    }
    pool.waiting = 0;
    pthread_mutex_unlock(&pool.mutex);
}

Status parallel_for(const Call *call, int64_t items, size_t scratch_bytes, WorkBody body,
                    void *context, Error *err)
{
    if (items <= 0)
        return OK;
    pthread_once(&pool_made, pool_make);
    Work work = {.call = call, .items = items, .scratch_bytes = scratch_bytes};
    work.body = body;
    work.context = context;
    if (call->interrupted)
        work.polled = now_ns();
    int64_t seats = call->num_threads < items ? call->num_threads - 1 : items - 1;
    if (seats > MAX_WORKERS)
        seats = MAX_WORKERS;
    if (seats > 0 && !atomic_flag_test_and_set(&pool.owned)) {
        seats = pool_grow((int)seats);
        if (seats > 0)
            pool_start(&work, (int)seats);
        work_run(&work, 0);
        pool_finish(&work);
        atomic_flag_clear(&pool.owned);
    } else {
        work_run(&work, 0);
    }
    if (work.status != OK)
        *err = work.error;
    return work.status;
}
