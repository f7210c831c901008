/* Which workers of a pool are awake, and which of them enter, as its own fields say. What the pace decides from then on
 * is in test_pace.c, and what the watch does in test_watch.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "_platform.h"
#include "check.h"
#include "plain_pool.h"

#include "_pool_parts.h"

#include <sched.h>

enum { BATCHES = 8 };

static dlrs_pool *pool;
static atomic_bool cannot_enter;
static atomic_uint arrived, noted; /* workers, at their first runs; and those that are in `began_ns` */
static uint64_t began_ns[2];
static char outcomes[BATCHES];

static void *enter(void *context, dlrs_worker *worker)
{
    return atomic_load(&cannot_enter) ? NULL : plain_enter(context, worker);
}

/* Two workers wait for each other in their first runs. */
static void meet(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    dlrs_run run = *first;
    void *unwanted;
    dlrs_epoch *orphan;
    bool more = true;
    (void)context;
    uint64_t now_ns = dlrs_now_ns();
    unsigned place = atomic_fetch_add(&arrived, 1);
    if (place < 2) {
        began_ns[place] = now_ns;
        atomic_fetch_add(&noted, 1);
    }
    while (atomic_load(&noted) < 2)
        sched_yield();
    while (more)
        more = dlrs_worker_next(worker, &run, &outcomes[run.batch], &unwanted, &orphan);
}

static void new_pool(unsigned num_threads, bool exclusive, bool adaptive)
{
    dlrs_pool_options options = {.hooks = {.enter = enter, .work = meet, .leave = plain_leave},
                                 .num_threads = num_threads,
                                 .stack_size = 1 << 18,
                                 .exclusive = exclusive,
                                 .adaptive = adaptive};
    int os_error;
    atomic_store(&arrived, 0);
    atomic_store(&noted, 0);
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_OK);
}

static dlrs_epoch *new_epoch(uint64_t items_in_parallel)
{
    dlrs_epoch_options options = {
        .batch_size = 1, .capacity = BATCHES, .batches_in_parallel = BATCHES, .items_in_parallel = items_in_parallel};
    dlrs_epoch *epoch;
    CHECK_EQUAL(dlrs_epoch_new(pool, &options, NULL, &epoch), DLRS_OK);
    return epoch;
}

static void end(dlrs_epoch *epoch)
{
    dlrs_pool_stop(pool);
    CHECK(dlrs_pool_wait(pool, UINT64_MAX));
    dlrs_epoch_cancel(epoch);
    while (dlrs_epoch_reclaim(epoch) != NULL)
        continue;
    CHECK(dlrs_epoch_leave(epoch));
    dlrs_epoch_free(epoch);
    dlrs_pool_release(pool);
}

static unsigned limit(void)
{
    pthread_mutex_lock(&pool->lock);
    unsigned found = pool->pace.limit;
    pthread_mutex_unlock(&pool->lock);
    return found;
}

static void test_limit_is_that_of_the_processors_before_anything_is_known(void)
{
    unsigned processors = dlrs_usable_processors();
    for (unsigned num_threads = 1; num_threads <= processors + 3; num_threads++) {
        for (unsigned adaptive = 0; adaptive < 2; adaptive++) {
            new_pool(num_threads, false, adaptive);
            dlrs_epoch *epoch = new_epoch(1);
            CHECK_EQUAL(limit(), adaptive && num_threads > processors ? processors : num_threads);
            end(epoch);
        }
    }
}

static void test_all_may_come_where_items_are_fetched_side_by_side(void)
{
    unsigned num_threads = dlrs_usable_processors() + 3;
    new_pool(num_threads, false, true);
    dlrs_epoch *epoch = new_epoch(2);
    CHECK_EQUAL(limit(), num_threads);
    end(epoch);
}

static void test_first_worker_has_a_head_start(void)
{
    for (unsigned round = 0; round < check_rounds(100); round++) {
        new_pool(3, true, true);
        dlrs_epoch *epoch = new_epoch(1);
        dlrs_epoch_offer(epoch, BATCHES, true);
        while (dlrs_epoch_wait(epoch, 50000000) == DLRS_NOT_READY)
            dlrs_epoch_attached(epoch);
        dlrs_epoch_attached(epoch);
        CHECK(began_ns[1] >= pool->head_start_until_ns);
        end(epoch);
    }
}

static void test_worker_that_cannot_enter_is_not_awake(void)
{
    atomic_store(&cannot_enter, true);
    for (unsigned num_threads = 1; num_threads <= 4; num_threads++) {
        for (unsigned exclusive = 0; exclusive < 2; exclusive++) {
            new_pool(num_threads, exclusive, true);
            dlrs_epoch *epoch = new_epoch(1);
            dlrs_epoch_offer(epoch, BATCHES, true);
            CHECK_EQUAL(dlrs_epoch_wait(epoch, CHECK_PLENTY_NS), DLRS_NO_WORKER);
            CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
            CHECK_EQUAL(pool->awake, 0u);
            CHECK_EQUAL(pool->coming, 0u);
            for (unsigned i = 0; i < num_threads; i++)
                CHECK(!pool->workers[i].is_awake);
            end(epoch);
        }
    }
    atomic_store(&cannot_enter, false);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_limit_is_that_of_the_processors_before_anything_is_known);
    RUN(test_all_may_come_where_items_are_fetched_side_by_side);
    RUN(test_first_worker_has_a_head_start);
    RUN(test_worker_that_cannot_enter_is_not_awake);
    return check_end();
}
