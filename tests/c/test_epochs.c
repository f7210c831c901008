/* Epochs whose batches are not simply cut from a number of items: with sizes of their own, with lanes that are read to
 * an end that nobody knows before, and unordered. And who is at a batch. */
#include "_pool.h"
#include "check.h"
#include "plain_pool.h"
#include "tally.h"

#include <stdatomic.h>

enum { MOST_BATCHES = 2048, MOST_LANES = 4, GATES = 8 };

typedef struct stage {
    dlrs_epoch_options options;
    dlrs_epoch *epoch;
    uint64_t sizes[MOST_BATCHES];       /* of batches, where each has its own */
    uint64_t lane_length[MOST_LANES];   /* batches that the lane has; then one more is begun, and finds the end */
    uint64_t failing;                   /* this batch fails to be read, and all lanes end; UINT64_MAX: none */
    uint64_t gated;                     /* bit i: batch i waits for gates[i] */
    tally gates[GATES];
    tally begun;                        /* batches that came to their gates */
    atomic_bool is_read[MOST_LANES];    /* somebody reads in the lane */
    atomic_uint_fast64_t read[MOST_LANES]; /* batches that were begun in the lane */
    atomic_uint items[MOST_BATCHES];    /* done */
} stage;

/* What a batch comes to: a pointer into this by its number, or NOTHING for one that a lane did not have. */
static char outcomes[MOST_BATCHES];
static char nothing;
#define NOTHING ((void *)&nothing)

static void stage_init(stage *s, uint64_t batch_size, uint64_t capacity, uint64_t batches, uint64_t items)
{
    memset(s, 0, sizeof *s);
    s->options = (dlrs_epoch_options){
        .batch_size = batch_size, .capacity = capacity, .batches_in_parallel = batches, .items_in_parallel = items};
    s->failing = UINT64_MAX;
    tally_init(&s->begun);
    for (unsigned i = 0; i < GATES; i++)
        tally_init(&s->gates[i]);
}

static void stage_free(stage *s)
{
    tally_free(&s->begun);
    for (unsigned i = 0; i < GATES; i++)
        tally_free(&s->gates[i]);
}

static void pass_gate(stage *s, uint64_t batch)
{
    tally_add(&s->begun);
    if (batch < GATES && (s->gated >> batch & 1))
        tally_await(&s->gates[batch], 1);
}

/* Read the batch in its lane. Is there one? */
static bool read_lane(stage *s, dlrs_worker *worker, const dlrs_run *run)
{
    uint64_t lane = run->batch % s->options.num_lanes;
    CHECK(!atomic_exchange(&s->is_read[lane], true));
    uint64_t number = atomic_fetch_add(&s->read[lane], 1);
    CHECK_EQUAL(number, run->batch / s->options.num_lanes);
    bool there = number < s->lane_length[lane];
    bool fails = run->batch == s->failing;
    atomic_store(&s->is_read[lane], false);
    dlrs_worker_leave_lane(worker, run, number == s->lane_length[lane], fails);
    return there;
}

static void *outcome_of(stage *s, dlrs_worker *worker, const dlrs_run *run)
{
    if (run->singly) {
        CHECK_EQUAL(run->num_items, 1);
        pass_gate(s, run->batch);
        atomic_fetch_add(&s->items[run->batch], 1);
        return dlrs_worker_finish_item(run, NOTHING, false) ? &outcomes[run->batch] : NULL;
    }
    CHECK_EQUAL(run->num_items, run->batch_items);
    bool there = s->options.num_lanes == 0 || read_lane(s, worker, run);
    pass_gate(s, run->batch);
    if (s->options.num_lanes == 0)
        atomic_fetch_add(&s->items[run->batch], (unsigned)run->num_items);
    return there ? &outcomes[run->batch] : NOTHING;
}

static void work(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    dlrs_run run = *first;
    void *unwanted;
    dlrs_epoch *orphan;
    (void)context;
    do {
        void *outcome = outcome_of(run.user, worker, &run);
        bool more = dlrs_worker_next(worker, &run, outcome, &unwanted, &orphan);
        if (orphan != NULL)
            dlrs_epoch_free(orphan);
        if (!more)
            return;
    } while (true);
}

static dlrs_pool *new_pool(unsigned num_threads)
{
    return plain_pool_new(num_threads, work);
}

static void begin(stage *s, dlrs_pool *pool)
{
    CHECK_EQUAL(dlrs_epoch_new(pool, &s->options, s, &s->epoch), DLRS_OK);
}

static void end(stage *s)
{
    dlrs_epoch_cancel(s->epoch);
    while (dlrs_epoch_reclaim(s->epoch) != NULL)
        ;
    if (dlrs_epoch_leave(s->epoch))
        dlrs_epoch_free(s->epoch);
}

static void end_all(stage *s, dlrs_pool *pool)
{
    end(s);
    dlrs_pool_release(pool);
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    stage_free(s);
}

/* The number of the next batch; NOTHING counts too, with its own. UINT64_MAX at the end. */
static uint64_t take(stage *s, bool *is_there)
{
    void *outcome;
    uint64_t batch;
    while (true) {
        dlrs_status status = dlrs_epoch_take(s->epoch, &outcome, &batch);
        if (status == DLRS_OK) {
            *is_there = outcome != NOTHING;
            CHECK(!*is_there || outcome == &outcomes[batch]);
            return batch;
        }
        CHECK_EQUAL(status, DLRS_NOT_READY);
        status = dlrs_epoch_wait(s->epoch, CHECK_PLENTY_NS);
        dlrs_epoch_attached(s->epoch);
        if (status == DLRS_END)
            return UINT64_MAX;
        CHECK_EQUAL(status, DLRS_OK);
    }
}

static uint64_t take_batch(stage *s)
{
    bool is_there;
    uint64_t batch = take(s, &is_there);
    CHECK(is_there);
    return batch;
}

/* ---- sizes ---- */

static void test_each_batch_has_the_size_that_it_was_offered_with(void)
{
    uint64_t random = 1;
    for (unsigned setting = 0; setting < 27; setting++) {
        unsigned workers = setting % 3 + 1, capacity = setting / 3 % 3 + 1, items = setting / 9 + 1;
        stage s;
        stage_init(&s, 0, capacity, workers, items);
        dlrs_pool *pool = new_pool(workers * items);
        begin(&s, pool);
        uint64_t offered = 0, taken = 0;
        while (taken < 200) {
            for (uint64_t more = check_random(&random, 4); more > 0 && offered < 200; more--) {
                s.sizes[offered] = check_random(&random, 6);
                CHECK_EQUAL(dlrs_epoch_offer_batch(s.epoch, s.sizes[offered++]), DLRS_OK);
            }
            if (taken < offered) {
                CHECK_EQUAL(take_batch(&s), taken);
                CHECK_EQUAL(atomic_load(&s.items[taken]), s.sizes[taken]);
                taken++;
            }
        }
        CHECK_EQUAL(dlrs_epoch_wait(s.epoch, 0), DLRS_NOT_READY); /* whether more come is the caller's to know */
        end_all(&s, pool);
    }
}

static void test_batches_may_be_offered_far_ahead(void)
{
    stage s;
    stage_init(&s, 0, 2, 1, 1);
    dlrs_pool *pool = new_pool(1);
    begin(&s, pool);
    for (uint64_t n = 0; n < 1000; n++)
        CHECK_EQUAL(dlrs_epoch_offer_batch(s.epoch, n), DLRS_OK);
    for (uint64_t n = 0; n < 1000; n++) {
        CHECK_EQUAL(take_batch(&s), n);
        CHECK_EQUAL(atomic_load(&s.items[n]), n);
    }
    end_all(&s, pool);
}

/* ---- lanes ---- */

/* Every lane is read by one worker at a time, in order, and not again after its end; then the epoch ends. */
static void test_lanes_are_read_to_their_ends(void)
{
    for (unsigned setting = 0; setting < 48; setting++) {
        unsigned workers = setting % 3 + 1, capacity = setting / 3 % 2 + workers, lanes = setting / 6 % 4 + 1;
        stage s;
        stage_init(&s, 1, capacity, workers, 1);
        s.options.num_lanes = lanes;
        uint64_t length = 0;
        for (unsigned lane = 0; lane < lanes; lane++)
            length += s.lane_length[lane] = setting / 24 == 0 ? 5 : 7 * lane;
        dlrs_pool *pool = new_pool(workers);
        begin(&s, pool);
        dlrs_epoch_offer(s.epoch, UINT64_MAX, true);
        uint64_t found = 0, batch, expected = 0;
        bool is_there;
        while ((batch = take(&s, &is_there)) != UINT64_MAX) {
            CHECK_EQUAL(batch, expected++);
            found += is_there;
        }
        CHECK_EQUAL(found, length);
        CHECK_EQUAL(take(&s, &is_there), UINT64_MAX);
        for (unsigned lane = 0; lane < lanes; lane++)
            CHECK(atomic_load(&s.read[lane]) > s.lane_length[lane]);
        end_all(&s, pool);
    }
}

static void test_lane_is_read_on_while_its_last_batch_is_finished(void)
{
    stage s;
    stage_init(&s, 1, 4, 2, 1);
    s.options.num_lanes = 1;
    s.lane_length[0] = 3;
    s.gated = 1;
    dlrs_pool *pool = new_pool(2);
    begin(&s, pool);
    dlrs_epoch_offer(s.epoch, UINT64_MAX, true);
    tally_await(&s.begun, 4); /* three batches and the end */
    bool is_there;
    CHECK_EQUAL(dlrs_epoch_wait(s.epoch, 0), DLRS_NOT_READY);
    tally_add(&s.gates[0]);
    for (uint64_t n = 0; n < 4; n++) {
        CHECK_EQUAL(take(&s, &is_there), n);
        CHECK_EQUAL(is_there, n < 3);
    }
    CHECK_EQUAL(take(&s, &is_there), UINT64_MAX);
    end_all(&s, pool);
}

static void test_failure_ends_all_lanes(void)
{
    for (unsigned lanes = 1; lanes <= 3; lanes++) {
        stage s;
        stage_init(&s, 1, 5, 3, 1);
        s.options.num_lanes = lanes;
        for (unsigned lane = 0; lane < lanes; lane++)
            s.lane_length[lane] = 1000;
        s.failing = 4;
        dlrs_pool *pool = new_pool(3);
        begin(&s, pool);
        dlrs_epoch_offer(s.epoch, UINT64_MAX, true);
        for (uint64_t n = 0; n < 5; n++)
            CHECK_EQUAL(take_batch(&s), n);
        bool is_there;
        uint64_t more = 0;
        while (take(&s, &is_there) != UINT64_MAX)
            more++;
        CHECK(more < 5); /* what others had begun by then */
        end_all(&s, pool);
    }
}

/* ---- any order ---- */

static void test_unordered_batches_come_as_they_get_ready(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        stage s;
        stage_init(&s, 1, 3, 2, items);
        s.options.unordered = true;
        s.gated = 1;
        dlrs_pool *pool = new_pool(2 * items);
        begin(&s, pool);
        dlrs_epoch_offer(s.epoch, 50, true);
        bool seen[50] = {false};
        for (uint64_t n = 1; n < 50; n++) {
            uint64_t batch = take_batch(&s);
            CHECK(batch > 0 && batch < 50 && !seen[batch]);
            seen[batch] = true;
        }
        CHECK_EQUAL(dlrs_epoch_wait(s.epoch, 0), DLRS_NOT_READY);
        tally_add(&s.gates[0]);
        CHECK_EQUAL(take_batch(&s), 0);
        end_all(&s, pool);
    }
}

static void test_unordered_batches_come_once_each(void)
{
    for (unsigned setting = 0; setting < 18; setting++) {
        unsigned workers = setting % 3 + 1, capacity = setting / 3 % 3 + 1, items = setting / 9 + 1;
        stage s;
        stage_init(&s, 2, capacity, workers, items);
        s.options.unordered = true;
        dlrs_pool *pool = new_pool(workers * items);
        begin(&s, pool);
        dlrs_epoch_offer(s.epoch, 601, true);
        unsigned seen[301] = {0};
        for (uint64_t n = 0; n < 301; n++)
            CHECK_EQUAL(seen[take_batch(&s)]++, 0);
        CHECK_EQUAL(dlrs_epoch_wait(s.epoch, 0), DLRS_NOT_READY);
        end_all(&s, pool);
    }
}

static void test_unordered_epoch_holds_no_more_than_its_capacity(void)
{
    stage s;
    stage_init(&s, 1, 3, 2, 1);
    s.options.unordered = true;
    s.gated = 1;
    dlrs_pool *pool = new_pool(2);
    begin(&s, pool);
    dlrs_epoch_offer(s.epoch, 50, true);
    tally_await(&s.begun, 3);
    CHECK_EQUAL(dlrs_epoch_wait(s.epoch, CHECK_PLENTY_NS), DLRS_OK);
    CHECK_EQUAL(tally_count(&s.begun), 3); /* one that is stuck and two that wait to be taken */
    take_batch(&s);
    tally_await(&s.begun, 4);
    tally_add(&s.gates[0]);
    end_all(&s, pool);
}

/* ---- who is at it ---- */

static void test_worker_of_the_batch_that_is_waited_for_is_found(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        stage s;
        unsigned worker = 99;
        dlrs_run run;
        stage_init(&s, 2, 4, 2, items);
        s.gated = 1 << 1;
        dlrs_pool *pool = new_pool(2 * items);
        begin(&s, pool);
        CHECK(!dlrs_epoch_find_worker(s.epoch, &worker, &run));
        dlrs_epoch_offer(s.epoch, 10, true);
        CHECK_EQUAL(take_batch(&s), 0);
        CHECK_EQUAL(dlrs_epoch_wait(s.epoch, 0), DLRS_NOT_READY);
        tally_await(&s.begun, 2 * items);
        CHECK(dlrs_epoch_find_worker(s.epoch, &worker, &run));
        CHECK(worker < 2 * items);
        CHECK_EQUAL(run.batch, 1);
        CHECK_EQUAL(run.singly, items > 1);
        CHECK(run.position < 2);
        tally_add(&s.gates[1]);
        for (uint64_t n = 1; n < 5; n++)
            CHECK_EQUAL(take_batch(&s), n);
        CHECK(!dlrs_epoch_find_worker(s.epoch, &worker, &run));
        end_all(&s, pool);
    }
}

/* ---- one after the other ---- */

/* Two epochs of a new pool with the same limits, of which the later comes after the earlier. */
static dlrs_pool *begin_both(stage *earlier, stage *later, uint64_t capacity, uint64_t batches, uint64_t items)
{
    dlrs_pool *pool = new_pool((unsigned)(batches * items));
    stage_init(earlier, 1, capacity, batches, items);
    stage_init(later, 1, capacity, batches, items);
    begin(earlier, pool);
    later->options.after = earlier->epoch;
    begin(later, pool);
    return pool;
}

/* The later epoch is begun when the earlier has no more to be claimed, within the limits of one. */
static void test_later_epoch_goes_on_where_the_earlier_ends(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        stage earlier, later;
        dlrs_pool *pool = begin_both(&earlier, &later, 5, 2, items);
        earlier.gated = 1 << 2;
        dlrs_epoch_offer(later.epoch, 20, true);
        CHECK_EQUAL(dlrs_epoch_wait(earlier.epoch, 20000000), DLRS_NOT_READY);
        CHECK_EQUAL(tally_count(&later.begun), 0); /* the earlier may still be offered more */
        dlrs_epoch_offer(earlier.epoch, 3, true);
        tally_await(&later.begun, 2); /* 3 of the earlier and 2 of the later are 5 */
        for (unsigned n = 0; n < 2; n++) {
            CHECK_EQUAL(take_batch(&earlier), n);
            tally_await(&later.begun, 3 + n);
        }
        CHECK_EQUAL(dlrs_epoch_wait(earlier.epoch, 20000000), DLRS_NOT_READY);
        CHECK_EQUAL(tally_count(&later.begun), 4);
        tally_add(&earlier.gates[2]);
        CHECK_EQUAL(take_batch(&earlier), 2);
        end(&earlier);
        for (uint64_t n = 0; n < 20; n++)
            CHECK_EQUAL(take_batch(&later), n);
        stage_free(&earlier);
        end_all(&later, pool);
    }
}

static void test_later_epoch_begins_when_it_is_waited_for(void)
{
    stage earlier, later;
    dlrs_pool *pool = begin_both(&earlier, &later, 2, 1, 1);
    dlrs_epoch_offer(earlier.epoch, 100, true);
    dlrs_epoch_offer(later.epoch, 3, true);
    for (uint64_t n = 0; n < 3; n++)
        CHECK_EQUAL(take_batch(&later), n);
    for (uint64_t n = 0; n < 100; n++)
        CHECK_EQUAL(take_batch(&earlier), n);
    end(&earlier);
    stage_free(&earlier);
    end_all(&later, pool);
}

static void test_later_epoch_begins_when_the_earlier_is_cancelled(void)
{
    stage earlier, later;
    dlrs_pool *pool = begin_both(&earlier, &later, 2, 1, 1);
    dlrs_epoch_offer(earlier.epoch, 100, true);
    dlrs_epoch_offer(later.epoch, 3, true);
    CHECK_EQUAL(take_batch(&earlier), 0);
    CHECK_EQUAL(tally_count(&later.begun), 0);
    end(&earlier);
    for (uint64_t n = 0; n < 3; n++)
        CHECK_EQUAL(take_batch(&later), n);
    stage_free(&earlier);
    end_all(&later, pool);
}

static void test_earlier_epoch_outlives_the_later(void)
{
    stage earlier, later;
    dlrs_pool *pool = begin_both(&earlier, &later, 4, 2, 1);
    dlrs_epoch_offer(earlier.epoch, 10, true);
    dlrs_epoch_offer(later.epoch, 10, true);
    CHECK_EQUAL(take_batch(&earlier), 0);
    end(&later);
    for (uint64_t n = 1; n < 10; n++)
        CHECK_EQUAL(take_batch(&earlier), n);
    stage_free(&later);
    end_all(&earlier, pool);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_each_batch_has_the_size_that_it_was_offered_with);
    RUN(test_batches_may_be_offered_far_ahead);
    RUN(test_lanes_are_read_to_their_ends);
    RUN(test_lane_is_read_on_while_its_last_batch_is_finished);
    RUN(test_failure_ends_all_lanes);
    RUN(test_unordered_batches_come_as_they_get_ready);
    RUN(test_unordered_batches_come_once_each);
    RUN(test_unordered_epoch_holds_no_more_than_its_capacity);
    RUN(test_worker_of_the_batch_that_is_waited_for_is_found);
    RUN(test_later_epoch_goes_on_where_the_earlier_ends);
    RUN(test_later_epoch_begins_when_it_is_waited_for);
    RUN(test_later_epoch_begins_when_the_earlier_is_cancelled);
    RUN(test_earlier_epoch_outlives_the_later);
    return check_end();
}
