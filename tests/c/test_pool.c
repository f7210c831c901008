/* The pool alone, with hooks that count and wait instead of fetching. Workers are held at gates and let go, so that
 * each situation is brought about rather than waited for; nothing here sleeps. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_getname_np */
#endif

#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

#include "_pool.h"
#include "tally.h"

enum { STACK_SIZE = 1 << 18, MOST_WORKERS = 4, WATCHED_ITEMS = 64, MOST_TOKENS = 1 << 18, MOST_CLAIMS = 64 };

#define WHOLE 1 /* items_in_parallel that makes a run a whole batch */
#define MANY ((uint64_t)1 << 40)

/* ---- tokens: the results of items and the outcomes of batches; each is released exactly once ---- */

typedef struct token {
    uint64_t batch, position, num_items, failed_at;
    atomic_uint released;
} token;

static token tokens[MOST_TOKENS];
static atomic_uint tokens_made;

static token *token_new(uint64_t batch, uint64_t position, uint64_t num_items, uint64_t failed_at)
{
    unsigned number = atomic_fetch_add(&tokens_made, 1);
    CHECK(number < MOST_TOKENS);
    token *made = &tokens[number];
    made->batch = batch;
    made->position = position;
    made->num_items = num_items;
    made->failed_at = failed_at;
    atomic_store(&made->released, 0);
    return made;
}

static void token_release(token *t)
{
    CHECK_EQUAL(atomic_fetch_add(&t->released, 1), 0);
}

static void check_all_tokens_released(void)
{
    for (unsigned i = 0; i < atomic_load(&tokens_made); i++)
        CHECK_EQUAL(atomic_load(&tokens[i].released), 1);
    atomic_store(&tokens_made, 0);
}

/* ---- jobs: what an epoch is made for, and what was seen of it ---- */

typedef struct job job;
struct job {
    dlrs_epoch_options options;
    dlrs_epoch *epoch;
    dlrs_pool *pool;
    unsigned name;
    uint64_t gated;    /* bit i: item i waits for gates[i] */
    uint64_t failing;  /* bit i: item i fails */
    bool checks_wanted; /* drop what nobody wants, as a worker of the real thing does */
    void (*at_item)(job *, dlrs_worker *, const dlrs_run *);

    tally gates[8];
    tally started;       /* items */
    tally batches;       /* batches started */
    tally freed;         /* the epoch, by whoever was told to */
    atomic_uint seen[WATCHED_ITEMS];      /* how often each of the first items was started */
    atomic_uint under_way[WATCHED_ITEMS]; /* items of a batch under way, by number of the batch */
    atomic_uint_fast64_t in_progress;     /* batches */
    atomic_uint_fast64_t taken;           /* batches; runs ahead of the pool's own count by at most one */
};

static atomic_uint names_of_claims[MOST_CLAIMS];
static atomic_uint num_claims;

static void job_init(job *j, uint64_t batch_size, uint64_t capacity, uint64_t batches, uint64_t items)
{
    memset(j, 0, sizeof *j);
    j->options = (dlrs_epoch_options){
        .batch_size = batch_size, .capacity = capacity, .batches_in_parallel = batches, .items_in_parallel = items};
    for (unsigned i = 0; i < 8; i++)
        tally_init(&j->gates[i]);
    tally_init(&j->started);
    tally_init(&j->batches);
    tally_init(&j->freed);
}

static void job_free(job *j)
{
    for (unsigned i = 0; i < 8; i++)
        tally_free(&j->gates[i]);
    tally_free(&j->started);
    tally_free(&j->batches);
    tally_free(&j->freed);
}

static void open_gate(job *j, unsigned item)
{
    tally_add(&j->gates[item]);
}

/* ---- being attached ----
 *
 * The tests run twice: with workers that have nothing to do with each other, and with workers of which one at a time is
 * attached, as with a GIL, and which the pool keeps parked as it sees fit. Who waits inside an item detaches for it. */

static bool exclusive, adaptive, enters_at_once;
static pthread_mutex_t gil = PTHREAD_MUTEX_INITIALIZER;

static void attach(void *context)
{
    (void)context;
    if (exclusive)
        pthread_mutex_lock(&gil);
}

static void detach(void *context)
{
    (void)context;
    if (exclusive)
        pthread_mutex_unlock(&gil);
}

static void await_detached(tally *t, uint64_t at_least)
{
    detach(NULL);
    tally_await(t, at_least);
    attach(NULL);
}

/* Wait for the next batch as a consumer does, which is attached before and after. */
static dlrs_status wait_for_batch(dlrs_epoch *epoch, uint64_t timeout_ns)
{
    dlrs_status status = dlrs_epoch_wait(epoch, timeout_ns);
    attach(NULL);
    dlrs_epoch_attached(epoch);
    detach(NULL);
    return status;
}

static void do_item(job *j, dlrs_worker *worker, const dlrs_run *run, uint64_t position)
{
    uint64_t item = run->batch * j->options.batch_size + position;
    if (item < WATCHED_ITEMS)
        CHECK_EQUAL(atomic_fetch_add(&j->seen[item], 1), 0);
    if (position == 0) {
        /* Of batches that are ending see test_no_more_than_batches_in_parallel_are_in_progress, and the interleavings. */
        CHECK(atomic_fetch_add(&j->in_progress, 1)
              < (run->singly ? j->options.capacity : j->options.batches_in_parallel));
        CHECK(run->batch < atomic_load(&j->taken) + j->options.capacity);
        tally_add(&j->batches);
    }
    tally_add(&j->started);
    if (j->at_item != NULL)
        j->at_item(j, worker, run);
    if (item < 8 && (j->gated >> item & 1))
        await_detached(&j->gates[item], 1);
}

static bool fails(const job *j, uint64_t batch, uint64_t position)
{
    uint64_t item = batch * j->options.batch_size + position;
    return item < 64 && (j->failing >> item & 1);
}

static void *outcome_of_whole_batch(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    CHECK_EQUAL(run->position, 0);
    CHECK_EQUAL(run->num_items, run->batch_items);
    uint64_t failed_at = DLRS_NO_ITEM, done = 0;
    for (uint64_t p = 0; p < run->num_items && failed_at == DLRS_NO_ITEM; p++) {
        do_item(j, worker, run, p);
        done++;
        if (fails(j, run->batch, p))
            failed_at = p;
    }
    atomic_fetch_sub(&j->in_progress, 1);
    if (j->checks_wanted && !dlrs_run_is_wanted(run))
        return NULL;
    return token_new(run->batch, 0, done, failed_at);
}

/* Do one item; as the last one of its batch, make the outcome of all of them. */
static void *outcome_of_last_item(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    CHECK_EQUAL(run->num_items, 1);
    atomic_uint *under_way = &j->under_way[run->batch % WATCHED_ITEMS];
    CHECK(atomic_fetch_add(under_way, 1) < j->options.items_in_parallel);
    do_item(j, worker, run, run->position);
    atomic_fetch_sub(under_way, 1);
    token *result = token_new(run->batch, run->position, 1, DLRS_NO_ITEM);
    if (!dlrs_worker_finish_item(run, result, fails(j, run->batch, run->position)))
        return NULL;
    const dlrs_slot *slot = run->slot;
    for (uint64_t p = 0; p < slot->started; p++) {
        token *item = slot->results[p];
        CHECK_EQUAL(item->batch, run->batch);
        CHECK_EQUAL(item->position, p);
        token_release(item);
    }
    atomic_fetch_sub(&j->in_progress, 1);
    if (j->checks_wanted && !dlrs_run_is_wanted(run))
        return NULL;
    return token_new(run->batch, 0, slot->started, slot->failed_at);
}

/* ---- hooks ---- */

typedef struct crew {
    uint64_t failing;          /* bit i: worker i cannot enter */
    atomic_uint entered, left; /* of those that could */
    atomic_uint skipped;
    atomic_uint working;
    bool log_claims;
    sigset_t work_signals; /* what work has to find blocked */
    bool check_signals;
} crew;

static __thread crew *crew_of_thread;

static void *enter(void *context, dlrs_worker *worker)
{
    crew *c = context;
    if (c->failing >> dlrs_worker_index(worker) & 1)
        return NULL;
    atomic_fetch_add(&c->entered, 1);
    crew_of_thread = c;
    return c;
}

static bool same_signals(const sigset_t *a, const sigset_t *b)
{
    for (int s = 1; s <= SIGUSR2; s++) {
        if (sigismember(a, s) != sigismember(b, s))
            return false;
    }
    return true;
}

static void work(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    crew *c = context;
    CHECK(c == crew_of_thread);
    if (c->check_signals) {
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, NULL, &blocked);
        CHECK(same_signals(&blocked, &c->work_signals));
    }
    dlrs_run run = *first;
    bool more;
    atomic_fetch_add(&c->working, 1);
    do {
        dlrs_worker_let_consumers_pass(worker);
        job *j = run.user;
        CHECK(run.epoch == j->epoch);
        CHECK_EQUAL(run.singly, j->options.items_in_parallel > 1);
        if (c->log_claims)
            atomic_store(&names_of_claims[atomic_fetch_add(&num_claims, 1) % MOST_CLAIMS], j->name);
        void *unwanted;
        dlrs_epoch *orphan;
        void *outcome = run.singly ? outcome_of_last_item(j, worker, &run) : outcome_of_whole_batch(j, worker, &run);
        more = dlrs_worker_next(worker, &run, outcome, &unwanted, &orphan);
        if (unwanted != NULL) {
            CHECK(unwanted == outcome);
            token_release(unwanted);
        }
        if (orphan != NULL) {
            CHECK(orphan == j->epoch);
            dlrs_epoch_free(orphan);
            tally_add(&j->freed);
        }
    } while (more);
    atomic_fetch_sub(&c->working, 1);
}

static void leave(void *context, dlrs_worker *worker)
{
    crew *c = context;
    CHECK(c == crew_of_thread);
    crew_of_thread = NULL;
    CHECK(dlrs_worker_index(worker) < MOST_WORKERS);
    atomic_fetch_add(&c->left, 1);
}

static void skip(void *context, dlrs_worker *worker)
{
    crew *c = context;
    CHECK(dlrs_worker_index(worker) < MOST_WORKERS);
    CHECK(crew_of_thread == NULL);
    atomic_fetch_add(&c->skipped, 1);
}

static crew everybody;

static dlrs_pool *pool_of_crew(unsigned num_threads, crew *c)
{
    dlrs_pool_options options = {.hooks = {.enter = enter,
                                           .attach = attach,
                                           .detach = detach,
                                           .work = work,
                                           .leave = leave,
                                           .skip = skip,
                                           .context = c},
                                 .enters_at_once = enters_at_once,
                                 .exclusive = exclusive,
                                 .adaptive = adaptive,
                                 .num_threads = num_threads,
                                 .stack_size = STACK_SIZE};
    dlrs_pool *pool = NULL;
    int os_error = 0;
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_OK);
    CHECK(pool != NULL);
    return pool;
}

static dlrs_pool *new_pool(unsigned num_threads)
{
    memset(&everybody, 0, sizeof everybody);
    return pool_of_crew(num_threads, &everybody);
}

/* No worker is left, and no result. */
static void check_all_gone(void)
{
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    check_all_tokens_released();
    CHECK_EQUAL(atomic_load(&everybody.entered), atomic_load(&everybody.left));
}

static void end_pool(dlrs_pool *pool)
{
    dlrs_pool_release(pool);
    check_all_gone();
}

/* ---- the consumer ---- */

static void begin(job *j, dlrs_pool *pool)
{
    j->pool = pool;
    CHECK_EQUAL(dlrs_epoch_new(pool, &j->options, j, &j->epoch), DLRS_OK);
}

static void begin_with(job *j, dlrs_pool *pool, uint64_t num_items)
{
    begin(j, pool);
    dlrs_epoch_offer(j->epoch, num_items, true);
}

static token *take(job *j)
{
    void *outcome = NULL;
    uint64_t batch;
    CHECK_EQUAL(wait_for_batch(j->epoch, CHECK_PLENTY_NS), DLRS_OK);
    uint64_t number = atomic_fetch_add(&j->taken, 1);
    CHECK_EQUAL(dlrs_epoch_take(j->epoch, &outcome, &batch), DLRS_OK);
    token *got = outcome;
    CHECK_EQUAL(got->batch, number);
    return got;
}

/* Take the next batch, which has `num_items` items. */
static void take_batch(job *j, uint64_t num_items)
{
    token *got = take(j);
    CHECK_EQUAL(got->num_items, num_items);
    CHECK_EQUAL(got->failed_at, DLRS_NO_ITEM);
    token_release(got);
}

/* Take the batches of `num_items` more items, and find that no more come. */
static void take_items(job *j, uint64_t num_items)
{
    uint64_t size = j->options.batch_size;
    for (; num_items > 0; num_items -= num_items < size ? num_items : size)
        take_batch(j, num_items < size ? num_items : size);
    void *outcome;
    uint64_t batch;
    CHECK_EQUAL(dlrs_epoch_take(j->epoch, &outcome, &batch), DLRS_NOT_READY);
}

static void check_not_ready(job *j)
{
    void *outcome;
    uint64_t batch;
    CHECK_EQUAL(wait_for_batch(j->epoch, 0), DLRS_NOT_READY);
    CHECK_EQUAL(dlrs_epoch_take(j->epoch, &outcome, &batch), DLRS_NOT_READY);
}

/* Cancel, reclaim and leave, without waiting for anybody. How many things were reclaimed. */
static unsigned end(job *j)
{
    unsigned reclaimed = 0;
    void *found;
    dlrs_epoch_cancel(j->epoch);
    dlrs_epoch_cancel(j->epoch);
    for (; (found = dlrs_epoch_reclaim(j->epoch)) != NULL; reclaimed++)
        token_release(found);
    if (dlrs_epoch_leave(j->epoch)) {
        dlrs_epoch_free(j->epoch);
        tally_add(&j->freed);
    }
    return reclaimed;
}

static void check_freed_once(job *j)
{
    CHECK_EQUAL(tally_count(&j->freed), 1);
    job_free(j);
}

static void end_all(job *j, dlrs_pool *pool)
{
    end(j);
    end_pool(pool);
    check_freed_once(j);
}

/* Let one epoch of three batches pass through the pool. The epochs of a pool take turns, so whatever could be claimed
 * of the others has been claimed by a worker that was free. */
static void pass_an_epoch_through(dlrs_pool *pool)
{
    job probe;
    job_init(&probe, 1, 3, 1, WHOLE);
    begin_with(&probe, pool, 3);
    take_items(&probe, 3);
    end(&probe);
    tally_await(&probe.freed, 1);
    check_freed_once(&probe);
}

/* ---- order ---- */

static void test_every_batch_comes_out_once_and_in_order(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        for (unsigned c = 0; c < 3 * 3 * 3 * 8; c++) {
            unsigned depth = 1 + c % 3, items = 1 + c / 3 % 3, batch_size = 1 + c / 9 % 3, length = c / 27;
            job j;
            job_init(&j, batch_size, workers + depth, workers, items);
            begin_with(&j, pool, length);
            take_items(&j, length);
            CHECK_EQUAL(tally_count(&j.started), length);
            CHECK_EQUAL(end(&j), 0);
            tally_await(&j.freed, 1);
            check_freed_once(&j);
        }
        end_pool(pool);
    }
}

static void test_long_epoch_comes_out_once_and_in_order(void)
{
    /* Long enough that rings wrap around, workers park, and the consumer parks. */
    uint64_t length = check_rounds(3000);
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        for (unsigned items = 1; items <= 3; items++) {
            job j;
            job_init(&j, 2, workers + 1, workers, items);
            begin_with(&j, pool, length);
            take_items(&j, length);
            CHECK_EQUAL(tally_count(&j.started), length);
            end(&j);
            tally_await(&j.freed, 1);
            check_freed_once(&j);
        }
        end_pool(pool);
    }
}

static void test_slow_first_batch_is_not_overtaken(void)
{
    for (uint64_t items = 1; items <= 2; items++) {
        dlrs_pool *pool = new_pool(2);
        job j;
        job_init(&j, 1, 6, 2, items);
        j.gated = 1;
        begin_with(&j, pool, 6);
        tally_await(&j.started, 6);
        pass_an_epoch_through(pool); /* by the other worker, after batches 1 to 5 */
        check_not_ready(&j);
        open_gate(&j, 0);
        take_items(&j, 6);
        end_all(&j, pool);
    }
}

static void test_slow_first_item_keeps_its_place_in_the_batch(void)
{
    dlrs_pool *pool = new_pool(2);
    job j;
    job_init(&j, 4, 2, 1, 2);
    j.gated = 1;
    begin_with(&j, pool, 4);
    tally_await(&j.started, 4); /* 1, 2 and 3 by the other worker */
    check_not_ready(&j);
    open_gate(&j, 0);
    take_items(&j, 4); /* the worker of the last item looks at the places */
    end_all(&j, pool);
}

/* ---- bounds ---- */

static void test_no_more_than_capacity_is_claimed_ahead(void)
{
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        dlrs_pool *pool = new_pool(1);
        job j;
        job_init(&j, 1, capacity, 100, 1 + capacity % 2);
        begin_with(&j, pool, 20);
        for (uint64_t n = 0; n < 20 - capacity; n++) {
            tally_await(&j.batches, n + capacity);
            pass_an_epoch_through(pool);
            CHECK_EQUAL(tally_count(&j.batches), n + capacity);
            take_batch(&j, 1);
        }
        tally_await(&j.batches, 20);
        pass_an_epoch_through(pool);
        CHECK_EQUAL(end(&j), capacity);
        end_pool(pool);
        check_freed_once(&j);
    }
}

static void test_no_more_than_batches_in_parallel_are_in_progress(void)
{
    for (unsigned batches = 1; batches <= 3; batches++) {
        for (unsigned items = 1; items <= 2; items++) {
            dlrs_pool *pool = new_pool(batches + 1);
            job j;
            job_init(&j, 1, 8, batches, items);
            j.gated = 0xff;
            begin_with(&j, pool, 8);
            for (unsigned n = 0; n < 8 - batches; n++) {
                tally_await(&j.batches, n + batches);
                pass_an_epoch_through(pool); /* by the worker that is left over */
                CHECK_EQUAL(tally_count(&j.batches), n + batches);
                open_gate(&j, n);
            }
            for (unsigned n = 8 - batches; n < 8; n++)
                open_gate(&j, n);
            take_items(&j, 8);
            end_all(&j, pool);
        }
    }
}

static void test_batch_whose_last_items_are_under_way_holds_nobody_up(void)
{
    dlrs_pool *pool = new_pool(4);
    job j;
    job_init(&j, 3, 8, 1, 3);
    j.gated = 0x3f;
    begin_with(&j, pool, 6);
    tally_await(&j.started, 3);
    open_gate(&j, 0);
    pass_an_epoch_through(pool);
    CHECK_EQUAL(tally_count(&j.started), 3); /* more than half of the first batch is still to be done */
    open_gate(&j, 1);
    tally_await(&j.started, 6); /* by all but the one whose gate is closed */
    for (unsigned n = 2; n < 6; n++)
        open_gate(&j, n);
    take_items(&j, 6);
    end_all(&j, pool);
}

static void test_batches_that_are_ending_are_bounded_by_the_ring(void)
{
    dlrs_pool *pool = new_pool(4);
    job j;
    job_init(&j, 2, 3, 1, 2);
    j.gated = 0x55; /* the first item of each batch */
    begin_with(&j, pool, 8);
    tally_await(&j.started, 6);
    pass_an_epoch_through(pool);
    CHECK_EQUAL(tally_count(&j.started), 6);
    for (unsigned n = 0; n < 8; n += 2)
        open_gate(&j, n);
    take_items(&j, 8);
    end_all(&j, pool);
}

static void test_no_more_than_items_in_parallel_of_a_batch_are_under_way(void)
{
    for (unsigned items = 2; items <= 3; items++) {
        dlrs_pool *pool = new_pool(items + 1);
        job j;
        job_init(&j, 6, 8, 1, items);
        j.gated = 0xff;
        begin_with(&j, pool, 6);
        for (unsigned n = 0; n < 6 - items; n++) {
            tally_await(&j.started, n + items);
            pass_an_epoch_through(pool);
            CHECK_EQUAL(tally_count(&j.started), n + items);
            open_gate(&j, n);
        }
        for (unsigned n = 6 - items; n < 6; n++)
            open_gate(&j, n);
        take_items(&j, 6);
        end_all(&j, pool);
    }
}

static void test_all_workers_are_used(void)
{
    /* Nothing goes on until every worker has an item: of batches of its own, or of the same batch. */
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned together = 0; together < 2; together++) {
            dlrs_pool *pool = new_pool(workers);
            job j;
            if (together)
                job_init(&j, workers, 1, 1, workers);
            else
                job_init(&j, 1, workers, workers, WHOLE);
            j.gated = 0xff;
            begin_with(&j, pool, workers);
            tally_await(&j.started, workers);
            for (unsigned i = 0; i < workers; i++)
                open_gate(&j, i);
            take_items(&j, workers);
            end_all(&j, pool);
        }
    }
}

static void test_huge_capacity_and_parallelism_cost_nothing(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        dlrs_pool *pool = new_pool(2);
        job j;
        job_init(&j, 1, UINT64_MAX, UINT64_MAX, items);
        j.options.items_in_parallel = items == 1 ? 1 : UINT64_MAX;
        begin_with(&j, pool, 100);
        tally_await(&j.batches, 100);
        take_items(&j, 100);
        end_all(&j, pool);
    }
}

/* ---- failed items ---- */

static void test_failure_starts_nothing_more_of_its_batch_and_leaves_the_others_alone(void)
{
    dlrs_pool *pool = new_pool(2);
    job j;
    job_init(&j, 4, 3, 1, 2);
    j.gated = 1 << 0;
    j.failing = 1 << 1;
    begin_with(&j, pool, 8);
    tally_await(&j.started, 2);
    pass_an_epoch_through(pool); /* by the worker of item 1, after it failed */
    CHECK_EQUAL(tally_count(&j.started), 2);
    check_not_ready(&j); /* item 0 is under way */
    open_gate(&j, 0);
    token *failed = take(&j);
    CHECK_EQUAL(failed->failed_at, 1);
    CHECK_EQUAL(failed->num_items, 2);
    token_release(failed);
    take_items(&j, 4);
    for (unsigned item = 0; item < 8; item++)
        CHECK_EQUAL(atomic_load(&j.seen[item]), item != 2 && item != 3);
    end_all(&j, pool);
}

static void test_lowest_failure_counts(void)
{
    for (unsigned first = 0; first < 3; first++) {
        dlrs_pool *pool = new_pool(3);
        job j;
        job_init(&j, 3, 1, 1, 3);
        j.gated = 7;
        j.failing = 6;
        begin_with(&j, pool, 3);
        tally_await(&j.started, 3);
        for (unsigned i = 0; i < 3; i++)
            open_gate(&j, (first + i) % 3);
        token *failed = take(&j);
        CHECK_EQUAL(failed->failed_at, 1);
        CHECK_EQUAL(failed->num_items, 3);
        token_release(failed);
        end_all(&j, pool);
    }
}

static void test_batch_without_memory_for_its_results_is_lost_in_its_place(void)
{
    dlrs_pool *pool = new_pool(2);
    uint64_t too_many = (uint64_t)1 << 61;
    job j;
    job_init(&j, too_many, 3, 2, 2);
    begin_with(&j, pool, 4 * too_many + 3);
    void *outcome = &j;
    uint64_t batch;
    for (unsigned n = 0; n < 4; n++) {
        CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_OK);
        atomic_fetch_add(&j.taken, 1);
        CHECK_EQUAL(dlrs_epoch_take(j.epoch, &outcome, &batch), DLRS_LOST);
        CHECK_EQUAL(batch, n);
        CHECK(outcome == &j);
    }
    take_items(&j, 3);
    CHECK_EQUAL(tally_count(&j.started), 3);
    end_all(&j, pool);
}

/* ---- the end of an epoch ---- */

static void test_cancel_returns_at_once_while_workers_are_busy(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned items = 1; items <= 3; items++) {
            for (unsigned wanted = 0; wanted < 2; wanted++) {
                dlrs_pool *pool = new_pool(workers);
                job j;
                job_init(&j, 2, workers + 2, workers, items);
                j.gated = 0xf0; /* items 0 to 3 pass, whoever comes to a later one is stuck */
                j.checks_wanted = wanted;
                begin_with(&j, pool, 100);
                take_batch(&j, 2);
                tally_await(&j.started, 4 + 1);
                end(&j);
                CHECK_EQUAL(tally_count(&j.freed), 0);
                for (unsigned item = 4; item < 8; item++)
                    open_gate(&j, item);
                tally_await(&j.freed, 1);
                end_pool(pool);
                check_freed_once(&j);
            }
        }
    }
}

static void test_cancelled_epoch_starts_nothing_more(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        dlrs_pool *pool = new_pool(2);
        job j;
        job_init(&j, 4, 5, 5, items);
        j.gated = 1;
        if (items == 1)
            j.gated |= 1 << 4;
        else
            j.gated |= 1 << 1;
        begin_with(&j, pool, 20);
        tally_await(&j.started, 2); /* both workers are stuck */
        dlrs_epoch_cancel(j.epoch);
        for (unsigned i = 0; i < 8; i++)
            open_gate(&j, i);
        pass_an_epoch_through(pool);
        end(&j);
        end_pool(pool);
        CHECK_EQUAL(tally_count(&j.batches), items == 1 ? 2 : 1);
        CHECK_EQUAL(tally_count(&j.started), items == 1 ? 8 : 2);
        check_freed_once(&j);
    }
}

static void test_finished_batches_are_reclaimed(void)
{
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 2, 5, 1, WHOLE);
    begin_with(&j, pool, 20);
    tally_await(&j.batches, 5);
    pass_an_epoch_through(pool);
    take_batch(&j, 2);
    pass_an_epoch_through(pool);
    CHECK_EQUAL(end(&j), 5);
    CHECK_EQUAL(tally_count(&j.freed), 1);
    end_pool(pool);
    check_freed_once(&j);
}

static void test_items_of_a_batch_that_nobody_will_finish_are_reclaimed(void)
{
    /* One worker, and the epochs take turns: it does items 0 and 1 of A, whose turn it still is, and is stuck in B. */
    dlrs_pool *pool = new_pool(1);
    job a, b;
    job_init(&a, 3, 1, 1, 2);
    job_init(&b, 1, 1, 1, WHOLE);
    a.gated = 1;
    b.gated = 1;
    begin_with(&a, pool, 3);
    tally_await(&a.started, 1);
    begin_with(&b, pool, 1);
    open_gate(&a, 0);
    tally_await(&b.started, 1);
    CHECK_EQUAL(tally_count(&a.started), 2);
    CHECK_EQUAL(end(&a), 2);
    CHECK_EQUAL(tally_count(&a.freed), 1);
    open_gate(&b, 0);
    take_items(&b, 1);
    end(&b);
    end_pool(pool);
    check_freed_once(&a);
    check_freed_once(&b);
}

static void test_last_worker_gets_the_results_of_a_cancelled_batch(void)
{
    /* Items 1 and 2 are done and item 0 is under way when the epoch is cancelled; 3 is never started. */
    dlrs_pool *pool = new_pool(2);
    job j, plug;
    job_init(&j, 4, 1, 1, 2);
    job_init(&plug, 1, 1, 1, WHOLE);
    j.gated = 3;
    plug.gated = 1;
    begin_with(&j, pool, 4);
    tally_await(&j.started, 2);
    begin_with(&plug, pool, 1);
    open_gate(&j, 1);
    tally_await(&plug.started, 1); /* by the worker of items 1 and 2 */
    CHECK_EQUAL(end(&j), 0);
    CHECK_EQUAL(tally_count(&j.freed), 0);
    open_gate(&j, 0);
    tally_await(&j.freed, 1);
    CHECK_EQUAL(tally_count(&j.started), 3);
    open_gate(&plug, 0);
    take_items(&plug, 1);
    end(&plug);
    end_pool(pool);
    check_freed_once(&j);
    check_freed_once(&plug);
}

static void test_epoch_ends_at_any_moment_and_loses_nothing(void)
{
    uint64_t random = 1;
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        for (unsigned round = 0; round < check_rounds(300); round++) {
            job j;
            job_init(&j, 1 + check_random(&random, 3), 1 + check_random(&random, 6), 1 + check_random(&random, workers),
                     1 + check_random(&random, 3));
            j.checks_wanted = check_random(&random, 2) == 0;
            j.failing = check_random(&random, 4) == 0 ? (uint64_t)1 << check_random(&random, 20) : 0;
            begin_with(&j, pool, 1000);
            for (uint64_t n = check_random(&random, 6); n > 0; n--)
                token_release(take(&j));
            end(&j);
            tally_await(&j.freed, 1);
            check_freed_once(&j);
        }
        end_pool(pool);
    }
}

static void test_epoch_without_items_ends(void)
{
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 2, 3, 1, WHOLE);
    begin(&j, pool);
    check_not_ready(&j);
    dlrs_epoch_offer(j.epoch, 0, true);
    check_not_ready(&j);
    CHECK_EQUAL(end(&j), 0);
    CHECK_EQUAL(tally_count(&j.freed), 1);
    end_pool(pool);
    check_freed_once(&j);
}

/* ---- several epochs ---- */

static void test_epochs_take_turns(void)
{
    enum { EPOCHS = 3 };
    static const uint64_t lengths[EPOCHS] = {4, 2, 4};
    static const char expected[] = "ABCABCACAC";
    for (unsigned items = 1; items <= 2; items++) {
        dlrs_pool *pool = new_pool(1);
        job plug, jobs[EPOCHS];
        job_init(&plug, 1, 1, 1, WHOLE);
        plug.gated = 1;
        begin_with(&plug, pool, 1);
        tally_await(&plug.started, 1);
        everybody.log_claims = true; /* the worker is stuck, and meets the gate's lock before it looks */
        atomic_store(&num_claims, 0);
        for (unsigned i = 0; i < EPOCHS; i++) {
            job_init(&jobs[i], items, 8, 8, items); /* a run is one item, either way */
            jobs[i].name = 'A' + i;
            begin_with(&jobs[i], pool, lengths[i]);
        }
        open_gate(&plug, 0);
        for (unsigned i = 0; i < EPOCHS; i++) {
            take_items(&jobs[i], lengths[i]);
            end(&jobs[i]);
        }
        end(&plug);
        end_pool(pool);
        CHECK_EQUAL(atomic_load(&num_claims), strlen(expected));
        for (unsigned i = 0; i < strlen(expected); i++)
            CHECK_EQUAL(atomic_load(&names_of_claims[i]), (unsigned char)expected[i]);
        for (unsigned i = 0; i < EPOCHS; i++)
            check_freed_once(&jobs[i]);
        check_freed_once(&plug);
    }
}

typedef struct consumer {
    pthread_t thread;
    dlrs_pool *pool;
    unsigned seed;
} consumer;

static void *consume(void *argument)
{
    const consumer *c = argument;
    uint64_t random = c->seed;
    for (unsigned round = 0; round < check_rounds(40); round++) {
        uint64_t length = check_random(&random, 40);
        job j;
        job_init(&j, 1 + check_random(&random, 3), 1 + check_random(&random, 5), 1 + check_random(&random, 3),
                 1 + check_random(&random, 3));
        begin_with(&j, c->pool, length);
        if (check_random(&random, 3) != 0)
            take_items(&j, length);
        end(&j);
        tally_await(&j.freed, 1);
        check_freed_once(&j);
    }
    return NULL;
}

static void test_consumers_on_many_threads_share_a_pool(void)
{
    enum { CONSUMERS = 3 };
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        consumer consumers[CONSUMERS];
        for (unsigned i = 0; i < CONSUMERS; i++) {
            consumers[i] = (consumer){.pool = pool, .seed = 10 * workers + i};
            CHECK(pthread_create(&consumers[i].thread, NULL, consume, &consumers[i]) == 0);
        }
        for (unsigned i = 0; i < CONSUMERS; i++)
            CHECK(pthread_join(consumers[i].thread, NULL) == 0);
        end_pool(pool);
    }
}

/* ---- offers ---- */

static void test_items_offered_in_pieces_make_the_same_batches(void)
{
    uint64_t random = 7;
    for (unsigned workers = 1; workers <= 3; workers++) {
        dlrs_pool *pool = new_pool(workers);
        for (unsigned round = 0; round < check_rounds(100); round++) {
            uint64_t length = check_random(&random, 30), offered = 0;
            bool last_with_items = check_random(&random, 2) == 0;
            job j;
            job_init(&j, 1 + check_random(&random, 4), 30, workers, 1 + check_random(&random, 3));
            begin(&j, pool);
            while (offered < length) {
                uint64_t piece = check_random(&random, length - offered + 1);
                offered += piece;
                dlrs_epoch_offer(j.epoch, piece, last_with_items && offered == length);
                while (check_random(&random, 2) == 0 && offered >= (atomic_load(&j.taken) + 1) * j.options.batch_size)
                    take_batch(&j, j.options.batch_size);
            }
            if (!last_with_items || length == 0)
                dlrs_epoch_offer(j.epoch, 0, true);
            uint64_t taken = atomic_load(&j.taken) * j.options.batch_size;
            if (taken < length)
                take_items(&j, length - taken);
            CHECK_EQUAL(tally_count(&j.started), length);
            end(&j);
            tally_await(&j.freed, 1);
            check_freed_once(&j);
        }
        end_pool(pool);
    }
}

static void test_batch_that_could_grow_is_held_back_until_the_last_offer(void)
{
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 3, 5, 5, WHOLE);
    begin(&j, pool);
    dlrs_epoch_offer(j.epoch, 2, false);
    pass_an_epoch_through(pool);
    CHECK_EQUAL(tally_count(&j.started), 0);
    dlrs_epoch_offer(j.epoch, 1, false);
    take_batch(&j, 3);
    dlrs_epoch_offer(j.epoch, 5, false);
    take_batch(&j, 3);
    pass_an_epoch_through(pool);
    check_not_ready(&j);
    CHECK_EQUAL(tally_count(&j.started), 6);
    dlrs_epoch_offer(j.epoch, 0, true);
    take_items(&j, 2);
    end_all(&j, pool);
}

static void test_last_offer_without_a_remainder_adds_no_batch(void)
{
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 3, 5, 5, WHOLE);
    begin(&j, pool);
    dlrs_epoch_offer(j.epoch, 6, false);
    dlrs_epoch_offer(j.epoch, 0, true);
    take_items(&j, 6);
    pass_an_epoch_through(pool);
    check_not_ready(&j);
    CHECK_EQUAL(tally_count(&j.batches), 2);
    end_all(&j, pool);
}

static void test_each_offer_wakes_a_worker(void)
{
    /* One item at a time, and none before the last was taken, so that all workers park again and again. */
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        job j;
        job_init(&j, 1, 2, workers, WHOLE);
        begin(&j, pool);
        for (unsigned n = 0; n < check_rounds(2000); n++) {
            dlrs_epoch_offer(j.epoch, 1, false);
            take_batch(&j, 1);
        }
        end_all(&j, pool);
    }
}

/* ---- waiting ---- */

static void test_wait_ends_by_time(void)
{
    const uint64_t timeout_ns = 2000000;
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 1, 1, 1, WHOLE);
    begin(&j, pool);
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    CHECK_EQUAL(wait_for_batch(j.epoch, timeout_ns), DLRS_NOT_READY);
    clock_gettime(CLOCK_MONOTONIC, &after);
    CHECK((after.tv_sec - before.tv_sec) * 1000000000ll + after.tv_nsec - before.tv_nsec >= (long long)timeout_ns);
    CHECK_EQUAL(wait_for_batch(j.epoch, 0), DLRS_NOT_READY);
    CHECK(!dlrs_pool_wait(pool, 0));
    CHECK(!dlrs_pool_wait(pool, timeout_ns));
    CHECK(!dlrs_process_wait(timeout_ns));
    dlrs_epoch_offer(j.epoch, 1, true);
    CHECK_EQUAL(wait_for_batch(j.epoch, UINT64_MAX), DLRS_OK);
    take_items(&j, 1);
    end_all(&j, pool);
}

/* ---- stopping ---- */

typedef struct waiter {
    job *job;
    tally about_to_wait;
    dlrs_status status;
} waiter;

static void *wait_for_a_batch(void *argument)
{
    waiter *w = argument;
    tally_add(&w->about_to_wait);
    w->status = wait_for_batch(w->job->epoch, CHECK_PLENTY_NS);
    return NULL;
}

static void test_stop_wakes_the_consumer(void)
{
    for (unsigned round = 0; round < check_rounds(200); round++) {
        dlrs_pool *pool = new_pool(1 + round % MOST_WORKERS);
        pthread_t thread;
        job j;
        job_init(&j, 1, 2, 1, WHOLE);
        begin(&j, pool);
        waiter w = {.job = &j};
        tally_init(&w.about_to_wait);
        CHECK(pthread_create(&thread, NULL, wait_for_a_batch, &w) == 0);
        tally_await(&w.about_to_wait, 1);
        dlrs_pool_stop(pool);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK_EQUAL(w.status, DLRS_STOPPED);
        void *outcome;
        uint64_t batch;
        CHECK_EQUAL(dlrs_epoch_take(j.epoch, &outcome, &batch), DLRS_STOPPED);
        CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_STOPPED);
        tally_free(&w.about_to_wait);
        end_all(&j, pool);
    }
}

static void test_stop_lets_each_worker_end_after_its_run(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned items = 1; items <= 2; items++) {
            dlrs_pool *pool = new_pool(workers);
            job j;
            job_init(&j, 2, 9, workers, items);
            j.gated = 0xff;
            begin_with(&j, pool, 100);
            tally_await(&j.started, workers);
            CHECK(dlrs_pool_is_usable(pool));
            dlrs_pool_stop(pool);
            dlrs_pool_stop(pool);
            CHECK(!dlrs_pool_is_usable(pool));
            CHECK(!dlrs_pool_wait(pool, 0));
            for (unsigned i = 0; i < 8; i++)
                open_gate(&j, i);
            CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
            CHECK_EQUAL(atomic_load(&everybody.left), workers);
            CHECK_EQUAL(tally_count(&j.started), items == 1 ? 2 * workers : workers);
            void *outcome;
            uint64_t batch;
            CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_STOPPED);
            CHECK_EQUAL(dlrs_epoch_take(j.epoch, &outcome, &batch), DLRS_STOPPED);
            /* What they left there is not lost: each batch, or each result of half a batch. */
            unsigned reclaimed = end(&j);
            CHECK_EQUAL(reclaimed, items == 1 ? workers : workers / 2 + workers % 2);
            CHECK_EQUAL(tally_count(&j.freed), 1);
            end_pool(pool);
            check_freed_once(&j);
        }
    }
}

static void test_idle_pool_stops(void)
{
    for (unsigned round = 0; round < check_rounds(100); round++) {
        unsigned workers = 1 + round % MOST_WORKERS;
        dlrs_pool *pool = new_pool(workers);
        if (round % 3 == 0)
            pass_an_epoch_through(pool);
        dlrs_pool_stop(pool);
        CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
        unsigned entered = atomic_load(&everybody.entered);
        CHECK(enters_at_once ? entered == workers : (entered > 0) == (round % 3 == 0));
        CHECK_EQUAL(atomic_load(&everybody.left), entered);
        CHECK_EQUAL(atomic_load(&everybody.skipped), workers - entered);
        end_pool(pool);
    }
}

static void release_pool(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    (void)worker;
    if (run->batch == 1) {
        await_detached(&j->gates[7], 1); /* the consumer left */
        dlrs_pool_release(j->pool);
    }
}

static void test_pool_is_released_on_its_own_worker(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        job j;
        job_init(&j, 1, 3, workers, WHOLE);
        j.at_item = release_pool;
        begin_with(&j, pool, 10);
        tally_await(&j.started, 2);
        end(&j);
        open_gate(&j, 7);
        check_all_gone();
        CHECK_EQUAL(atomic_load(&everybody.left) + atomic_load(&everybody.skipped), workers);
        check_freed_once(&j);
    }
}

static void test_pool_is_released_while_workers_are_busy(void)
{
    /* Release does not wait; the last worker frees what is left. */
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        job j;
        job_init(&j, 1, workers, workers, WHOLE);
        j.gated = 0xff;
        begin_with(&j, pool, workers);
        tally_await(&j.started, workers);
        CHECK_EQUAL(end(&j), 0);
        dlrs_pool_release(pool);
        CHECK_EQUAL(tally_count(&j.freed), 0);
        for (unsigned i = 0; i < workers; i++)
            open_gate(&j, i);
        check_all_gone();
        check_freed_once(&j);
    }
}

/* ---- workers ---- */

static void test_worker_that_cannot_enter_fails_the_pool(void)
{
    bool usually = enters_at_once;
    enters_at_once = true;
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (uint64_t failing = 1; failing < (uint64_t)1 << workers; failing++) {
            memset(&everybody, 0, sizeof everybody);
            everybody.failing = failing;
            dlrs_pool *pool = pool_of_crew(workers, &everybody);
            job j;
            job_init(&j, 1, 2, 1, WHOLE);
            begin(&j, pool);
            void *outcome;
            uint64_t batch;
            CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_NO_WORKER);
            CHECK_EQUAL(dlrs_epoch_take(j.epoch, &outcome, &batch), DLRS_NO_WORKER);
            CHECK(!dlrs_pool_is_usable(pool));
            CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
            unsigned unable = 0;
            for (unsigned i = 0; i < workers; i++)
                unable += (failing >> i & 1) != 0;
            CHECK_EQUAL(atomic_load(&everybody.entered), workers - unable);
            CHECK_EQUAL(atomic_load(&everybody.left), workers - unable);
            end_all(&j, pool);
        }
    }
    enters_at_once = usually;
}

static void test_worker_that_cannot_enter_fails_the_pool_once_it_has_work(void)
{
    bool usually = enters_at_once;
    enters_at_once = false;
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        memset(&everybody, 0, sizeof everybody);
        everybody.failing = UINT64_MAX;
        dlrs_pool *pool = pool_of_crew(workers, &everybody);
        job j;
        job_init(&j, 1, 2, 1, WHOLE);
        begin(&j, pool);
        CHECK_EQUAL(wait_for_batch(j.epoch, 1000000), DLRS_NOT_READY);
        CHECK(dlrs_pool_is_usable(pool));
        dlrs_epoch_offer(j.epoch, 2, true);
        CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_NO_WORKER);
        CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
        CHECK(atomic_load(&everybody.skipped) < workers);
        end_all(&j, pool);
    }
    enters_at_once = usually;
}

static void check_identity(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    (void)run;
    char expected[40], actual[64];
    snprintf(expected, sizeof expected, "dlrs-%" PRIu64 "-%u", dlrs_pool_id(j->pool), dlrs_worker_index(worker));
    CHECK(strcmp(dlrs_worker_name(worker), expected) == 0);
    CHECK(pthread_getname_np(pthread_self(), actual, sizeof actual) == 0);
    CHECK(strncmp(actual, expected, 15) == 0);
    CHECK(dlrs_worker_index(worker) < MOST_WORKERS);
    CHECK_EQUAL(atomic_fetch_add(&j->under_way[dlrs_worker_index(worker)], 1), 0);
}

static void test_workers_have_numbers_and_names(void)
{
    dlrs_pool *pool = new_pool(MOST_WORKERS), *other = pool_of_crew(1, &everybody);
    CHECK(dlrs_pool_id(pool) != 0 && dlrs_pool_id(other) > dlrs_pool_id(pool));
    job j;
    job_init(&j, 1, MOST_WORKERS, MOST_WORKERS, WHOLE);
    j.at_item = check_identity;
    j.gated = 0xff;
    begin_with(&j, pool, MOST_WORKERS);
    tally_await(&j.started, MOST_WORKERS);
    for (unsigned i = 0; i < MOST_WORKERS; i++)
        open_gate(&j, i);
    take_items(&j, MOST_WORKERS);
    for (unsigned i = 0; i < MOST_WORKERS; i++)
        CHECK_EQUAL(atomic_load(&j.under_way[i]), 1);
    dlrs_pool_release(other);
    end_all(&j, pool);
}

static atomic_uint signals_seen;

static void count_signal(int signal_number)
{
    (void)signal_number;
    atomic_fetch_add(&signals_seen, 1);
}

/* A number, as the format reads it, out of a file of /proc with a line for each; 0 if it is not there. */
static unsigned long long number_in(const char *path, const char *format)
{
    char line[256];
    unsigned long long number = 0;
    FILE *status = fopen(path, "r");
    if (status == NULL)
        return 0;
    while (fgets(line, sizeof line, status) != NULL)
        sscanf(line, format, &number);
    fclose(status);
    return number;
}

/* Does the thread of this process with that number in /proc have SIGUSR2 blocked? */
static bool blocks_sigusr2(const char *thread)
{
    char path[300];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    return number_in(path, "SigBlk: %llx") >> (SIGUSR2 - 1) & 1;
}

/* Wait until all other threads have SIGUSR2 blocked, which a worker has while it is parked, and that some has entered.
 * Only Linux tells; elsewhere the worker is trusted to be quick. */
static void await_idle_worker(void)
{
    bool idle = false;
    while (!idle) {
        DIR *threads = opendir("/proc/self/task");
        if (threads == NULL)
            return;
        char own[32];
        snprintf(own, sizeof own, "%ld", (long)getpid()); /* the test runs on the main thread */
        idle = atomic_load(&everybody.entered) > 0;
        unsigned long long seen = 0;
        for (struct dirent *entry = readdir(threads); entry != NULL; entry = readdir(threads)) {
            seen += entry->d_name[0] != '.';
            if (entry->d_name[0] != '.' && strcmp(entry->d_name, own) != 0)
                idle = idle && blocks_sigusr2(entry->d_name);
        }
        closedir(threads);
        /* While others end the list may leave some out. */
        idle = idle && seen == number_in("/proc/self/status", "Threads: %llu");
        sched_yield();
    }
}

static void test_signals_are_let_in_only_while_a_worker_works(void)
{
    struct sigaction action = {.sa_handler = count_signal}, kept_action;
    sigset_t mask, kept_mask, pending;
    sigemptyset(&action.sa_mask);
    sigaction(SIGUSR2, &action, &kept_action);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &mask, &kept_mask);

    dlrs_pool *pool = new_pool(1);
    everybody.check_signals = true; /* before there is work, which is what publishes it */
    pthread_sigmask(SIG_SETMASK, NULL, &everybody.work_signals);
    CHECK(sigismember(&everybody.work_signals, SIGUSR1) && !sigismember(&everybody.work_signals, SIGUSR2));

    /* Neither this thread nor an idle worker lets it in, so it stays with the process. A worker that is new is not idle
     * before it has looked for work. */
    await_idle_worker();
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &mask, NULL);
    kill(getpid(), SIGUSR2);
    sigpending(&pending);
    CHECK(sigismember(&pending, SIGUSR2));
    CHECK_EQUAL(atomic_load(&signals_seen), 0);

    /* A worker that works is a thread like any other of its maker. */
    job j;
    job_init(&j, 1, 2, 1, WHOLE);
    begin_with(&j, pool, 2);
    take_items(&j, 2);
    end_all(&j, pool);
    CHECK_EQUAL(atomic_load(&signals_seen), 1);
    pthread_sigmask(SIG_SETMASK, &kept_mask, NULL);
    sigaction(SIGUSR2, &kept_action, NULL);
}

/* ---- fork ---- */

/* What the child of a fork finds. The pool and the epoch are the parent's, perhaps in the middle of something. */
static void check_forked(dlrs_pool *pool, job *j, uint64_t generation)
{
    void *outcome;
    uint64_t batch;
    dlrs_epoch *epoch;
    CHECK_EQUAL(dlrs_process_generation(), generation + 1);
    CHECK(!dlrs_pool_is_usable(pool));
    CHECK_EQUAL(dlrs_epoch_new(pool, &j->options, j, &epoch), DLRS_FORKED);
    dlrs_epoch_offer(j->epoch, 1, false);
    CHECK_EQUAL(dlrs_epoch_take(j->epoch, &outcome, &batch), DLRS_FORKED);
    CHECK_EQUAL(wait_for_batch(j->epoch, UINT64_MAX), DLRS_FORKED);
    dlrs_epoch_cancel(j->epoch);
    CHECK(dlrs_epoch_reclaim(j->epoch) == NULL);
    CHECK(!dlrs_epoch_leave(j->epoch));
    dlrs_pool_stop(pool);
    CHECK(dlrs_pool_wait(pool, UINT64_MAX));
    dlrs_pool_release(pool);
    CHECK(dlrs_process_wait(UINT64_MAX));
}

/* The child can make a pool of its own, as if there had been none. */
static void use_own_pool(void)
{
    if (!CHECK_CAN_ALLOCATE_AFTER_FORK)
        return;
    static crew own;
    memset(&own, 0, sizeof own);
    atomic_store(&tokens_made, 0); /* those of the parent stay with it */
    dlrs_pool *pool = pool_of_crew(2, &own);
    CHECK(dlrs_pool_is_usable(pool));
    job j;
    job_init(&j, 2, 3, 2, 2);
    begin_with(&j, pool, 7);
    take_items(&j, 7);
    end(&j);
    dlrs_pool_release(pool);
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    check_freed_once(&j);
    check_all_tokens_released();
    CHECK_EQUAL(atomic_load(&own.left) + atomic_load(&own.skipped), 2);
}

static pid_t fork_with_watchdog(void)
{
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
        gil = unlocked; /* whoever had it is not there */
        alarm(CHECK_WATCHDOG_S / 2);
    }
    return child;
}

static void check_child_succeeds(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

static void run_in_child(void (*body)(void))
{
    pid_t child = fork_with_watchdog();
    if (child == 0) {
        body();
        _exit(0);
    }
    check_child_succeeds(child);
}

static void test_child_finds_out_and_makes_its_own(void)
{
    dlrs_pool *pool = new_pool(2);
    job j;
    job_init(&j, 1, 4, 2, 2);
    j.gated = 3;
    begin_with(&j, pool, 10);
    tally_await(&j.started, 2);
    uint64_t generation = dlrs_process_generation();
    pid_t child = fork_with_watchdog();
    if (child == 0) {
        check_forked(pool, &j, generation);
        use_own_pool();
        _exit(0);
    }
    check_child_succeeds(child);
    CHECK_EQUAL(dlrs_process_generation(), generation);
    open_gate(&j, 0);
    open_gate(&j, 1);
    take_items(&j, 10); /* the parent goes on */
    end_all(&j, pool);
}

static void test_grandchild_makes_its_own(void)
{
    dlrs_pool *pool = new_pool(1);
    job j;
    job_init(&j, 1, 4, 2, 2);
    begin(&j, pool);
    uint64_t generation = dlrs_process_generation();
    pid_t child = fork_with_watchdog();
    if (child == 0) {
        use_own_pool();
        pid_t grandchild = fork_with_watchdog();
        if (grandchild == 0) {
            CHECK_EQUAL(dlrs_process_generation(), generation + 2);
            CHECK_EQUAL(wait_for_batch(j.epoch, UINT64_MAX), DLRS_FORKED);
            use_own_pool();
            exit(0);
        }
        check_child_succeeds(grandchild);
        exit(0); /* which is not to wait for anybody, either */
    }
    check_child_succeeds(child);
    end_all(&j, pool);
}

static void test_fork_while_workers_are_busy(void)
{
    /* Each fork meets the workers, and the locks they hold, wherever they happen to be. */
    for (unsigned round = 0; round < check_rounds(20); round++) {
        dlrs_pool *pool = new_pool(1 + round % MOST_WORKERS);
        job j;
        job_init(&j, 1, MANY, 4, 1 + round % 3);
        begin_with(&j, pool, 2000);
        take_batch(&j, 1);
        uint64_t generation = dlrs_process_generation();
        pid_t child = fork_with_watchdog();
        if (child == 0) {
            check_forked(pool, &j, generation);
            use_own_pool();
            _exit(0);
        }
        take_batch(&j, 1);
        check_child_succeeds(child);
        take_batch(&j, 1);
        end_all(&j, pool);
    }
}

static atomic_bool enough;

static void *make_pools(void *argument)
{
    (void)argument;
    while (!atomic_load(&enough)) {
        static crew passing;
        dlrs_pool *pool = pool_of_crew(2, &passing);
        dlrs_pool_stop(pool);
        CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS)); /* lest they pile up */
        dlrs_pool_release(pool);
    }
    return NULL;
}

static void test_fork_while_pools_come_and_go(void)
{
    pthread_t thread;
    atomic_store(&enough, false);
    CHECK(pthread_create(&thread, NULL, make_pools, NULL) == 0);
    for (unsigned round = 0; round < check_rounds(20); round++)
        run_in_child(use_own_pool);
    atomic_store(&enough, true);
    CHECK(pthread_join(thread, NULL) == 0);
    check_all_gone();
}

static void fork_in_worker(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    (void)worker;
    if (run->batch != 1)
        return;
    uint64_t generation = dlrs_process_generation();
    pid_t child = fork_with_watchdog();
    if (child == 0) {
        check_forked(j->pool, j, generation);
        use_own_pool();
        CHECK(!dlrs_run_is_wanted(run));
        attach(NULL); /* as its parent is */
        return; /* goes on with the run, finds out, and ends */
    }
    check_child_succeeds(child);
}

static void test_worker_forks(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned items = 1; items <= 2; items++) {
            dlrs_pool *pool = new_pool(workers);
            job j;
            job_init(&j, 1, 3, workers, items);
            j.at_item = fork_in_worker;
            begin_with(&j, pool, 5);
            take_items(&j, 5);
            end_all(&j, pool);
        }
    }
}

/* ---- the process ---- */

/* Cannot be undone, so it has a process of its own, or comes last. */
static void stop_the_process(void)
{
    memset(&everybody, 0, sizeof everybody);
    dlrs_pool *busy = pool_of_crew(2, &everybody), *idle = pool_of_crew(2, &everybody);
    job j, parked;
    job_init(&j, 1, 3, 2, WHOLE);
    job_init(&parked, 1, 1, 1, WHOLE);
    j.gated = 3;
    begin_with(&j, busy, 9);
    begin(&parked, idle);
    tally_await(&j.started, 2);
    waiter w = {.job = &parked};
    pthread_t thread;
    tally_init(&w.about_to_wait);
    CHECK(pthread_create(&thread, NULL, wait_for_a_batch, &w) == 0);
    tally_await(&w.about_to_wait, 1);

    dlrs_process_stop();
    dlrs_process_stop();
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(w.status, DLRS_STOPPED);
    CHECK_EQUAL(wait_for_batch(j.epoch, CHECK_PLENTY_NS), DLRS_STOPPED);
    CHECK(!dlrs_pool_is_usable(busy) && !dlrs_pool_is_usable(idle));
    CHECK(dlrs_pool_wait(idle, CHECK_PLENTY_NS));
    CHECK(!dlrs_process_wait(0)); /* two are stuck */

    dlrs_pool_options options = {.hooks = {.enter = enter, .work = work, .leave = leave, .context = &everybody},
                                 .num_threads = 1,
                                 .stack_size = STACK_SIZE};
    dlrs_pool *pool = busy;
    int os_error = 0;
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_STOPPED);
    CHECK(pool == busy);

    open_gate(&j, 0);
    open_gate(&j, 1);
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    CHECK_EQUAL(tally_count(&j.started), 2);
    CHECK_EQUAL(end(&j), 2);
    end(&parked);
    dlrs_pool_release(busy);
    dlrs_pool_release(idle);
    check_all_gone();
    tally_free(&w.about_to_wait);
    check_freed_once(&j);
    check_freed_once(&parked);
}

static void test_process_stops_all_pools(void)
{
    if (CHECK_CAN_ALLOCATE_AFTER_FORK)
        run_in_child(stop_the_process);
    else
        stop_the_process();
}

static void run_all(void)
{
    RUN(test_every_batch_comes_out_once_and_in_order);
    RUN(test_long_epoch_comes_out_once_and_in_order);
    RUN(test_slow_first_batch_is_not_overtaken);
    RUN(test_slow_first_item_keeps_its_place_in_the_batch);
    RUN(test_no_more_than_capacity_is_claimed_ahead);
    RUN(test_no_more_than_batches_in_parallel_are_in_progress);
    RUN(test_batch_whose_last_items_are_under_way_holds_nobody_up);
    RUN(test_batches_that_are_ending_are_bounded_by_the_ring);
    RUN(test_no_more_than_items_in_parallel_of_a_batch_are_under_way);
    RUN(test_all_workers_are_used);
    RUN(test_huge_capacity_and_parallelism_cost_nothing);
    RUN(test_failure_starts_nothing_more_of_its_batch_and_leaves_the_others_alone);
    RUN(test_lowest_failure_counts);
    RUN(test_batch_without_memory_for_its_results_is_lost_in_its_place);
    RUN(test_cancel_returns_at_once_while_workers_are_busy);
    RUN(test_cancelled_epoch_starts_nothing_more);
    RUN(test_finished_batches_are_reclaimed);
    RUN(test_items_of_a_batch_that_nobody_will_finish_are_reclaimed);
    RUN(test_last_worker_gets_the_results_of_a_cancelled_batch);
    RUN(test_epoch_ends_at_any_moment_and_loses_nothing);
    RUN(test_epoch_without_items_ends);
    RUN(test_epochs_take_turns);
    RUN(test_consumers_on_many_threads_share_a_pool);
    RUN(test_items_offered_in_pieces_make_the_same_batches);
    RUN(test_batch_that_could_grow_is_held_back_until_the_last_offer);
    RUN(test_last_offer_without_a_remainder_adds_no_batch);
    RUN(test_each_offer_wakes_a_worker);
    RUN(test_wait_ends_by_time);
    RUN(test_stop_wakes_the_consumer);
    RUN(test_stop_lets_each_worker_end_after_its_run);
    RUN(test_idle_pool_stops);
    RUN(test_pool_is_released_on_its_own_worker);
    RUN(test_pool_is_released_while_workers_are_busy);
    RUN(test_worker_that_cannot_enter_fails_the_pool);
    RUN(test_worker_that_cannot_enter_fails_the_pool_once_it_has_work);
    RUN(test_workers_have_numbers_and_names);
    if (CHECK_CAN_FORK) {
        RUN(test_child_finds_out_and_makes_its_own);
        RUN(test_fork_while_workers_are_busy);
    }
    if (CHECK_CAN_ALLOCATE_AFTER_FORK) {
        RUN(test_grandchild_makes_its_own);
        RUN(test_fork_while_pools_come_and_go);
        RUN(test_worker_forks);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    enters_at_once = true;
    RUN(test_signals_are_let_in_only_while_a_worker_works); /* first: a worker on its way out may take a signal */
    run_all();
    enters_at_once = false;
    adaptive = true;
    run_all();
    exclusive = true;
    run_all();
    RUN(test_process_stops_all_pools); /* last: perhaps in this very process */
    return check_end();
}
