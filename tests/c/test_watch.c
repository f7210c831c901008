/* Tests of the watch: items that wait for each other are let go, whatever the pace does at that moment. What processors
 * do is made up here, and the limit of the pace is set by hand. */
#define _GNU_SOURCE
#include "_platform.h"
#include "check.h"
#include "plain_pool.h"

#include <stdatomic.h>

static bool threads_compute;

#define dlrs_process_busy_ns() (threads_compute ? dlrs_now_ns() : 0)
#include "_worker.c"

enum { WORKERS = 4, ROUNDS = 3, BATCHES = WORKERS * ROUNDS };

static dlrs_pool *the_pool;
static atomic_uint arrived;
static unsigned new_limit;
static int outcomes[BATCHES];

static void await_arrivals(unsigned number)
{
    while (atomic_load(&arrived) < number)
        sched_yield();
}

/* As a trial does, or a thinning, when a worker reports; and none follows. */
static void set_limit(unsigned limit)
{
    pthread_mutex_lock(&the_pool->lock);
    the_pool->pace.limit = the_pool->pace.best = limit;
    the_pool->pace.trial_due_ns = the_pool->pace.fewer_due_ns = UINT64_MAX;
    pthread_mutex_unlock(&the_pool->lock);
}

/* Each batch is an item that waits for the others of its round. Who has the last of the first round sees all others at
 * the next one before the limit falls: it will be one too many, and they wait for it. */
static void meet(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    dlrs_run run = *first;
    void *unwanted;
    dlrs_epoch *orphan;
    bool more = true;
    (void)context;
    while (more) {
        atomic_fetch_add(&arrived, 1);
        await_arrivals(((unsigned)run.batch / WORKERS + 1) * WORKERS);
        if (run.batch == WORKERS - 1) {
            await_arrivals(2 * WORKERS - 1);
            set_limit(new_limit);
        }
        more = dlrs_worker_next(worker, &run, &outcomes[run.batch], &unwanted, &orphan);
        CHECK(unwanted == NULL && orphan == NULL);
    }
}

static void take_all(void)
{
    dlrs_pool_options options = {.hooks = {.enter = plain_enter, .work = meet, .leave = plain_leave},
                                 .num_threads = WORKERS,
                                 .stack_size = 1 << 18,
                                 .exclusive = true,
                                 .adaptive = true};
    dlrs_epoch_options of_epoch = {
        .batch_size = 1, .capacity = BATCHES, .batches_in_parallel = BATCHES, .items_in_parallel = 1};
    dlrs_epoch *epoch;
    int os_error;
    atomic_store(&arrived, 0);
    CHECK_EQUAL(dlrs_pool_new(&options, &the_pool, &os_error), DLRS_OK);
    CHECK_EQUAL(dlrs_epoch_new(the_pool, &of_epoch, NULL, &epoch), DLRS_OK);
    dlrs_epoch_offer(epoch, BATCHES, true);
    for (uint64_t n = 0; n < BATCHES; n++) {
        void *outcome;
        uint64_t batch;
        while (dlrs_epoch_wait(epoch, 50000000) == DLRS_NOT_READY)
            dlrs_epoch_attached(epoch);
        dlrs_epoch_attached(epoch);
        CHECK_EQUAL(dlrs_epoch_take(epoch, &outcome, &batch), DLRS_OK);
        CHECK(outcome == &outcomes[n] && batch == n);
    }
    dlrs_epoch_cancel(epoch);
    CHECK(dlrs_epoch_reclaim(epoch) == NULL);
    if (dlrs_epoch_leave(epoch))
        dlrs_epoch_free(epoch);
    dlrs_pool_stop(the_pool);
    CHECK(dlrs_pool_wait(the_pool, UINT64_MAX));
}

static void test_items_that_wait_by_computing_are_let_go(void)
{
    threads_compute = true;
    for (new_limit = 1; new_limit < WORKERS; new_limit++) {
        take_all();
        CHECK_EQUAL(the_pool->pace.limit, new_limit); /* as long as they compute they are not known to wait */
        dlrs_pool_release(the_pool);
    }
}

static void test_items_that_wait_idly_are_let_go_for_a_while(void)
{
    threads_compute = false;
    for (new_limit = 1; new_limit < WORKERS; new_limit++) {
        take_all();
        CHECK_EQUAL(the_pool->pace.limit, WORKERS);
        CHECK_EQUAL(the_pool->extra, 0u);
        dlrs_pool_release(the_pool);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    dlrs_process_prepare();
    RUN(test_items_that_wait_by_computing_are_let_go);
    RUN(test_items_that_wait_idly_are_let_go_for_a_while);
    return check_end();
}
