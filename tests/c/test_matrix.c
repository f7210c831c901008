/* Whole epochs, of every small shape, that end at every point: each batch once, in order, within the bound, and nothing
 * is left over. The pool has real threads; which of them comes first is for the system to say (test_interleavings.c
 * says it itself). A pool has a worker at least: loaders without workers do not come here. */
#include "_numbers.h"
#include "_pool.h"
#include "check.h"
#include "plain_pool.h"
#include "tally.h"

#include <sched.h>
#include <stdatomic.h>

enum {
    MOST_WORKERS = 4,
    MOST_DEPTH = 3,
    MOST_IN_PARALLEL = 3,
    MOST_LENGTH = 7,
    MOST_SIZE = 3,
    MOST_LANES = 2,
    MOST_BATCHES = MOST_LENGTH + 2 * MOST_LANES + MOST_WORKERS, /* lanes have some that find the end */
};

typedef enum kind { CUT, OWN_SIZES, LANES, NUM_KINDS } kind;

typedef struct shape {
    unsigned workers;
    uint64_t depth, items_in_parallel;
    uint64_t length; /* items, or batches with sizes of their own, or batches of all lanes */
    uint64_t batch_size;
    kind kind;
    uint64_t num_lanes;
    bool unordered;
    bool fails; /* the middle item, or batch of a lane */
} shape;

typedef struct job {
    const shape *shape;
    dlrs_epoch_options options;
    dlrs_epoch *epoch;
    uint64_t num_batches;
    uint64_t held_from; /* batches from this one on stay with their workers until `gate` opens */
    tally gate, at_gate, freed;
    atomic_uint_fast64_t begun, takes; /* batches */
    atomic_uint started[MOST_BATCHES][MOST_SIZE + 1];
    atomic_uint items[MOST_BATCHES][MOST_SIZE + 1], outcomes[MOST_BATCHES]; /* 1 when made, 2 when come back */
    atomic_uint_fast64_t read[MOST_LANES];
    atomic_bool is_read[MOST_LANES];
    unsigned taken[MOST_BATCHES];
} job;

static uint64_t lane_length(const shape *s, uint64_t lane)
{
    return (s->length + s->num_lanes - 1 - lane) / s->num_lanes;
}

static uint64_t size_of(const job *j, uint64_t batch)
{
    uint64_t size = j->shape->batch_size;
    if (j->shape->kind != CUT)
        return j->shape->kind == OWN_SIZES ? (batch + size) % (MOST_SIZE + 1) : 1;
    return dlrs_min_u64(size, j->shape->length - batch * size);
}

/* ---- hooks ---- */

static void *make(atomic_uint *thing)
{
    CHECK_EQUAL(atomic_fetch_add(thing, 1), 0);
    return thing;
}

static void come_back(void *thing)
{
    CHECK_EQUAL(atomic_fetch_add((atomic_uint *)thing, 1), 1);
}

/* A worker gives back what nobody wants once it has left the epoch, perhaps after another has freed that. What never comes
 * back is a hang, which the watchdog ends. */
static void await_return(atomic_uint *thing)
{
    while (atomic_load(thing) == 1)
        sched_yield();
}

static void begin_item(job *j, const dlrs_run *run, uint64_t position)
{
    CHECK(run->batch < j->num_batches && position < size_of(j, run->batch));
    CHECK_EQUAL(atomic_fetch_add(&j->started[run->batch][position], 1), 0);
}

static void read_lane(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    uint64_t lane = run->batch % j->shape->num_lanes;
    CHECK(!atomic_exchange(&j->is_read[lane], true));
    uint64_t number = atomic_fetch_add(&j->read[lane], 1);
    CHECK_EQUAL(number, run->batch / j->shape->num_lanes);
    atomic_store(&j->is_read[lane], false);
    bool fails = j->shape->fails && run->batch == j->shape->length / 2;
    dlrs_worker_leave_lane(worker, run, number == lane_length(j->shape, lane), fails);
}

static void *outcome_of(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    CHECK(run->batch < MOST_BATCHES);
    CHECK_EQUAL(run->batch_items, size_of(j, run->batch));
    CHECK_EQUAL(run->singly, j->options.items_in_parallel > 1 && run->batch_items > 0);
    if (run->position == 0)
        CHECK(atomic_fetch_add(&j->begun, 1) < atomic_load(&j->takes) + j->options.capacity);
    if (j->shape->kind == LANES)
        read_lane(j, worker, run);
    if (run->batch >= j->held_from) {
        tally_add(&j->at_gate);
        tally_await(&j->gate, 1);
    }
    if (run->singly) {
        begin_item(j, run, run->position);
        bool fails = j->shape->fails && run->position == run->batch_items / 2;
        if (!dlrs_worker_finish_item(run, make(&j->items[run->batch][run->position]), fails))
            return NULL;
        for (uint64_t p = 0; p < run->slot->started; p++)
            come_back(run->slot->results[p]);
    } else if (j->shape->kind != LANES) {
        for (uint64_t p = 0; p < run->num_items; p++)
            begin_item(j, run, p);
    }
    return make(&j->outcomes[run->batch]);
}

static void work(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    (void)context;
    dlrs_run run = *first;
    bool more;
    do {
        job *j = run.user;
        void *unwanted;
        dlrs_epoch *orphan;
        more = dlrs_worker_next(worker, &run, outcome_of(j, worker, &run), &unwanted, &orphan);
        if (unwanted != NULL)
            come_back(unwanted);
        if (orphan != NULL) {
            CHECK(orphan == j->epoch);
            dlrs_epoch_free(orphan);
            tally_add(&j->freed);
        }
    } while (more);
}

static dlrs_pool *new_pool(unsigned num_threads)
{
    return plain_pool_new(num_threads, work);
}

/* ---- an epoch ---- */

/* `after` may be NULL. */
static void begin(job *j, const shape *s, dlrs_pool *pool, dlrs_epoch *after)
{
    memset(j, 0, sizeof *j);
    j->shape = s;
    j->options = (dlrs_epoch_options){.batch_size = s->kind == OWN_SIZES ? 0
                                                    : s->kind == LANES   ? 1
                                                                         : s->batch_size,
                                      .capacity = s->workers + s->depth,
                                      .batches_in_parallel = s->workers,
                                      .items_in_parallel = s->items_in_parallel,
                                      .num_lanes = s->kind == LANES ? s->num_lanes : 0,
                                      .unordered = s->unordered,
                                      .after = after};
    j->num_batches = s->kind == CUT ? (s->length + s->batch_size - 1) / s->batch_size : s->length;
    j->held_from = UINT64_MAX;
    tally_init(&j->gate);
    tally_init(&j->at_gate);
    tally_init(&j->freed);
    CHECK_EQUAL(dlrs_epoch_new(pool, &j->options, j, &j->epoch), DLRS_OK);
}

static void offer(job *j)
{
    if (j->shape->kind != OWN_SIZES) {
        dlrs_epoch_offer(j->epoch, j->shape->kind == LANES ? UINT64_MAX : j->shape->length, true);
        return;
    }
    for (uint64_t n = 0; n < j->num_batches; n++)
        CHECK_EQUAL(dlrs_epoch_offer_batch(j->epoch, size_of(j, n)), DLRS_OK);
    dlrs_epoch_offer(j->epoch, 0, true);
}

/* Take the next batch; without one, only lanes say so themselves. */
static bool take(job *j)
{
    void *outcome;
    uint64_t batch, number = atomic_fetch_add(&j->takes, 1);
    dlrs_status status;
    while ((status = dlrs_epoch_take(j->epoch, &outcome, &batch)) == DLRS_NOT_READY) {
        status = dlrs_epoch_wait(j->epoch, CHECK_PLENTY_NS);
        dlrs_epoch_attached(j->epoch);
        if (status == DLRS_END) {
            CHECK(j->shape->kind == LANES);
            return false;
        }
        CHECK_EQUAL(status, DLRS_OK);
    }
    CHECK_EQUAL(status, DLRS_OK);
    CHECK(batch < MOST_BATCHES && outcome == &j->outcomes[batch]);
    CHECK(j->shape->unordered || batch == number);
    CHECK_EQUAL(j->taken[batch]++, 0);
    come_back(outcome);
    return true;
}

static void take_all(job *j)
{
    if (j->shape->kind == LANES) {
        while (take(j))
            ;
        return;
    }
    while (atomic_load(&j->takes) < j->num_batches)
        CHECK(take(j));
}

/* Cancel the epoch. True if it is freed; else a worker that holds it is going to. */
static bool end(job *j)
{
    dlrs_epoch_cancel(j->epoch);
    for (void *found; (found = dlrs_epoch_reclaim(j->epoch)) != NULL;)
        come_back(found);
    bool mine = dlrs_epoch_leave(j->epoch);
    if (mine)
        dlrs_epoch_free(j->epoch);
    return mine;
}

/* Nothing that was made is anywhere. With `whole`, everything was made. */
static void check_end_of(job *j, bool whole)
{
    bool lanes_fail = j->shape->kind == LANES && j->shape->fails;
    for (uint64_t n = 0; n < MOST_BATCHES; n++) {
        await_return(&j->outcomes[n]);
        for (uint64_t p = 0; p <= MOST_SIZE; p++)
            await_return(&j->items[n][p]);
        if (whole && n < j->num_batches && !lanes_fail)
            CHECK_EQUAL(j->taken[n], 1);
        for (uint64_t p = 0;
             whole && !j->shape->fails && j->shape->kind != LANES && n < j->num_batches && p < size_of(j, n); p++)
            CHECK_EQUAL(atomic_load(&j->started[n][p]), 1);
    }
    tally_free(&j->gate);
    tally_free(&j->at_gate);
    tally_free(&j->freed);
}

/* ---- the matrix ---- */

static uint64_t dice;
static unsigned epochs;

/* Call `test` with every shape, or with check_percent percent of them; and with a pool, if it shares one. */
static void for_each_shape(void (*test)(const shape *, dlrs_pool *), bool shares)
{
    dice = 1;
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = shares ? new_pool(workers) : NULL;
        for (uint64_t depth = 1; depth <= MOST_DEPTH; depth++)
            for (uint64_t items = 1; items <= MOST_IN_PARALLEL; items++)
                for (uint64_t length = 0; length <= MOST_LENGTH; length++)
                    for (uint64_t size = 1; size <= MOST_SIZE; size++)
                        for (kind k = 0; k < NUM_KINDS; k++)
                            for (unsigned bits = 0; bits < 4; bits++) {
                                shape s = {.workers = workers,
                                           .depth = depth,
                                           .items_in_parallel = items,
                                           .length = length,
                                           .batch_size = size,
                                           .kind = k,
                                           .num_lanes = size,
                                           .unordered = bits & 1,
                                           .fails = bits >> 1};
                                if (k == LANES && (size > MOST_LANES || items > 1))
                                    continue; /* a batch of a lane is one run */
                                if (check_random(&dice, 100) < check_percent)
                                    test(&s, pool);
                            }
        if (shares)
            dlrs_pool_release(pool);
        CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    }
}

static void whole_epoch(const shape *s, dlrs_pool *pool)
{
    job j;
    begin(&j, s, pool, NULL);
    offer(&j);
    take_all(&j);
    if (!end(&j))
        tally_await(&j.freed, 1);
    check_end_of(&j, true);
    epochs++;
}

static void test_each_batch_comes_once_in_order_within_the_bound(void)
{
    for_each_shape(whole_epoch, true);
}

/* The consumer stops after each number of batches, the pool goes on. */
static void cancelled_epoch(const shape *s, dlrs_pool *pool)
{
    uint64_t most = s->kind == CUT ? (s->length + s->batch_size - 1) / s->batch_size : s->length;
    if (s->kind == LANES && s->fails)
        most = dlrs_min_u64(most, s->length / 2); /* up to there all batches come */
    for (uint64_t stop_at = 0; stop_at <= most; stop_at++) {
        job j;
        begin(&j, s, pool, NULL);
        offer(&j);
        for (uint64_t n = 0; n < stop_at; n++)
            CHECK(take(&j));
        if (!end(&j))
            tally_await(&j.freed, 1);
        check_end_of(&j, false);
        epochs++;
    }
}

static void test_cancel_after_any_batch_leaves_nothing(void)
{
    for_each_shape(cancelled_epoch, true);
}

/* The consumer and the owner leave after some batches, while a worker is inside each that it can be in: the last one
 * out frees everything. A pool of its own for each epoch. */
static void abandoned_epoch(const shape *s, dlrs_pool *pool)
{
    uint64_t num_batches = s->kind == CUT ? (s->length + s->batch_size - 1) / s->batch_size : s->length;
    if (num_batches == 0 || (s->kind == LANES && s->fails))
        return;
    uint64_t stop_at = check_random(&dice, num_batches);
    pool = new_pool(s->workers);
    job j;
    begin(&j, s, pool, NULL);
    j.held_from = stop_at;
    offer(&j);
    for (uint64_t n = 0; n < stop_at; n++)
        CHECK(take(&j));
    tally_await(&j.at_gate, 1);
    CHECK(!end(&j));
    dlrs_pool_release(pool);
    tally_add(&j.gate);
    tally_await(&j.freed, 1);
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    check_end_of(&j, false);
    epochs++;
}

static void test_last_worker_frees_what_all_others_left(void)
{
    for_each_shape(abandoned_epoch, false);
}

/* A second epoch comes after one that is cancelled after some batches, and is whole. */
static void epoch_after_another(const shape *s, dlrs_pool *pool)
{
    if (s->kind == LANES)
        return;
    job earlier, later;
    begin(&earlier, s, pool, NULL);
    begin(&later, s, pool, earlier.epoch);
    offer(&earlier);
    offer(&later);
    uint64_t stop_at = check_random(&dice, earlier.num_batches + 1);
    for (uint64_t n = 0; n < stop_at; n++)
        CHECK(take(&earlier));
    if (!end(&earlier))
        tally_await(&earlier.freed, 1);
    take_all(&later);
    if (!end(&later))
        tally_await(&later.freed, 1);
    check_end_of(&earlier, false);
    check_end_of(&later, true);
    epochs += 2;
}

static void test_epoch_that_comes_after_another_is_whole(void)
{
    for_each_shape(epoch_after_another, true);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_each_batch_comes_once_in_order_within_the_bound);
    RUN(test_cancel_after_any_batch_leaves_nothing);
    RUN(test_last_worker_frees_what_all_others_left);
    RUN(test_epoch_that_comes_after_another_is_whole);
    printf("%u epochs\n", epochs);
    return check_end();
}
