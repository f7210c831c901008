/* A pool for tests whose workers need nothing but to be given work. Includes no source of the pool. */
#ifndef PLAIN_POOL_H
#define PLAIN_POOL_H

#include "_pool.h"
#include "check.h"

static inline void *plain_enter(void *context, dlrs_worker *worker)
{
    (void)context;
    return worker;
}

static inline void plain_leave(void *context, dlrs_worker *worker)
{
    CHECK(context == worker);
}

/* Workers call `work`, with themselves as the context. */
static inline dlrs_pool *plain_pool_new(unsigned num_threads, void (*work)(void *, dlrs_worker *, const dlrs_run *))
{
    dlrs_pool_options options = {.hooks = {.enter = plain_enter, .work = work, .leave = plain_leave},
                                 .num_threads = num_threads,
                                 .stack_size = 256 << 10};
    dlrs_pool *pool = NULL;
    int os_error;
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_OK);
    return pool;
}

#endif
