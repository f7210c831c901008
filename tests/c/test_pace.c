/* Tests of the pace, with workers that are simulated: time is a number here, and what an item costs is a function of
 * how many workers are awake. */
#include "_pace.h"
#include "check.h"

#define MS 1000000ull
#define SECOND (1000 * MS)

enum { MOST_WORKERS = 64 };

/* ns that an item takes while `awake` workers are awake. */
typedef uint64_t cost_fn(unsigned awake);

static uint64_t parallel(unsigned awake)
{
    (void)awake;
    return 100000;
}

/* Two or more that fight for something get two thirds of what one gets done. */
static uint64_t fighting(unsigned awake)
{
    return awake == 1 ? 100000 : 150000 * awake;
}

/* One at a time, however many there are. */
static uint64_t serial(unsigned awake)
{
    return 100000 * awake;
}

static uint64_t on_two_cores(unsigned awake)
{
    return awake <= 2 ? 100000 : 52000 * awake;
}

static uint64_t sleeping(unsigned awake)
{
    (void)awake;
    return 5 * MS;
}

typedef struct workers {
    dlrs_pace pace;
    unsigned num;
    uint64_t now;
    bool awake[MOST_WORKERS];
    uint64_t began[MOST_WORKERS], ends[MOST_WORKERS]; /* of the item each is at */
    unsigned num_awake;
    dlrs_pace_worker pace_of[MOST_WORKERS];
    uint64_t items;
    double busy; /* share of its time that a worker is run, if it has a processor */
    unsigned processors; /* that they share; 0: as many as there are workers */
    double mean_limit; /* over the last call of work() */
    uint64_t random;
} workers;

static void begin_item(workers *w, unsigned i, cost_fn *cost)
{
    uint64_t mean = cost(w->num_awake);
    w->began[i] = w->now;
    w->ends[i] = w->now + mean * 9 / 10 + check_random(&w->random, mean / 5);
}

static void wake_up_to_limit(workers *w, cost_fn *cost)
{
    for (unsigned i = 0; i < w->num && w->num_awake < w->pace.limit; i++) {
        if (!w->awake[i]) {
            w->awake[i] = true;
            w->num_awake++;
            begin_item(w, i, cost);
        }
    }
}

static void begin_with_all(workers *w, unsigned num_processors, bool exclusive)
{
    dlrs_pace_init(&w->pace, w->num, num_processors, exclusive);
    dlrs_pace_begin_with_all(&w->pace);
}

static void workers_init(workers *w, unsigned num)
{
    memset(w, 0, sizeof *w);
    w->num = num;
    w->random = 1;
    w->now = 1;
    w->busy = 1;
    begin_with_all(w, 2, false);
}

/* Let `duration` ns pass. Items finished per ns. */
static double work(workers *w, cost_fn *cost, uint64_t duration)
{
    uint64_t start = w->now, items = w->items;
    double limit_ns = 0;
    wake_up_to_limit(w, cost);
    while (w->now - start < duration) {
        unsigned first = MOST_WORKERS;
        for (unsigned i = 0; i < w->num; i++) {
            if (w->awake[i] && (first == MOST_WORKERS || w->ends[i] < w->ends[first]))
                first = i;
        }
        CHECK(first < MOST_WORKERS);
        limit_ns += (double)w->pace.limit * (double)(w->ends[first] - w->now);
        w->now = w->ends[first];
        w->items++;
        uint64_t elapsed = w->now - w->began[first];
        double busy = w->busy, share = w->processors == 0 ? 1 : (double)w->processors / w->num_awake;
        busy = busy < share ? busy : share;
        if (elapsed >= 20000)
            dlrs_pace_tell_busy(&w->pace, elapsed, (uint64_t)((double)elapsed * busy), w->now, w->num_awake);
        dlrs_pace_report(&w->pace, &w->pace_of[first], 1, w->now - w->began[first], w->now, w->num_awake);
        CHECK(w->pace.limit >= 1 && w->pace.limit <= w->num);
        if (w->num_awake > w->pace.limit) {
            w->awake[first] = false;
            w->num_awake--;
        } else {
            begin_item(w, first, cost);
        }
        wake_up_to_limit(w, cost);
    }
    w->mean_limit = limit_ns / (double)(w->now - start);
    return (double)(w->items - items) / (double)(w->now - start);
}

static double ideal(cost_fn *cost, unsigned awake)
{
    return (double)awake / (double)cost(awake);
}

static void test_begins_with_as_many_as_there_are_processors(void)
{
    for (unsigned num = 1; num <= 5; num++) {
        dlrs_pace pace;
        dlrs_pace_init(&pace, num, 2, false);
        CHECK_EQUAL(pace.limit, num < 2 ? num : 2);
    }
}

static void test_begins_with_all_where_items_are_likely_to_wait(void)
{
    workers w;
    workers_init(&w, 5);
    CHECK_EQUAL(w.pace.limit, 5);
    work(&w, fighting, SECOND);
    unsigned learned = w.pace.best;
    dlrs_pace_begin_with_all(&w.pace); /* that is known better by now */
    CHECK_EQUAL(w.pace.best, learned);
}

static void test_more_workers_are_tried_less_often_where_that_is_in_vain(void)
{
    workers w;
    workers_init(&w, 2);
    work(&w, fighting, 5 * SECOND);
    CHECK_EQUAL(w.pace.best, 1);
    unsigned trials = 0;
    for (unsigned i = 0, before = 1; i < 10000; i++) {
        work(&w, fighting, MS);
        trials += before == 1 && w.pace.limit == 2; /* each is given up after the first of its two segments with 2 */
        before = w.pace.limit;
    }
    CHECK(trials >= 10 && trials <= 14);
}

static void test_one_worker_is_never_paced(void)
{
    workers w;
    workers_init(&w, 1);
    work(&w, serial, SECOND);
    CHECK(w.mean_limit == 1);
}

static void test_fighting_workers_are_parked(void)
{
    static const unsigned nums[] = {2, 3, 4, 8};
    for (unsigned i = 0; i < sizeof nums / sizeof nums[0]; i++) {
        workers w;
        workers_init(&w, nums[i]);
        work(&w, fighting, SECOND);
        double rate = work(&w, fighting, 5 * SECOND);
        CHECK(rate > 0.97 * ideal(fighting, 1));
    }
    workers w;
    workers_init(&w, 2);
    work(&w, fighting, 150 * MS);
    CHECK_EQUAL(w.pace.limit, 1);
}

static void test_parallel_workers_lose_about_a_percent(void)
{
    static const unsigned nums[] = {2, 3, 5, 64};
    for (unsigned i = 0; i < sizeof nums / sizeof nums[0]; i++) {
        workers w;
        workers_init(&w, nums[i]);
        w.pace.num_processors = nums[i];
        CHECK(work(&w, parallel, 10 * SECOND) > 0.985 * ideal(parallel, nums[i]));
    }
}

/* Where they can be told from those that wait for each other, see run_side_by_side. */
static void test_workers_that_run_side_by_side_are_left_alone(void)
{
    workers w;
    for (unsigned num = 2; num <= 8; num *= 2) {
        workers_init(&w, num);
        begin_with_all(&w, num, true);
        w.busy = 0.85;
        work(&w, parallel, 5 * SECOND);
        CHECK(w.mean_limit == num);
    }
    workers_init(&w, 2);
    begin_with_all(&w, 2, true);
    w.busy = 0.65; /* each waits for the other */
    work(&w, fighting, SECOND);
    CHECK(work(&w, fighting, 5 * SECOND) > 0.97 * ideal(fighting, 1));
}

static void test_more_workers_than_processors_are_tried_with_fewer_of_them(void)
{
    for (unsigned exclusive = 0; exclusive < 2; exclusive++) {
        workers w;
        workers_init(&w, 8);
        begin_with_all(&w, 2, exclusive);
        work(&w, on_two_cores, SECOND);
        CHECK(w.pace.best == 2);
    }
}

/* 20 ms of computing, each. */
static uint64_t long_on_two_cores(unsigned awake)
{
    return 20 * MS * (awake <= 2 ? 2 : awake) / 2;
}

static void test_a_crowd_is_thinned_within_a_few_runs(void)
{
    for (unsigned exclusive = 0; exclusive < 2; exclusive++) {
        workers w;
        workers_init(&w, 8);
        begin_with_all(&w, 2, exclusive);
        w.processors = 2;
        work(&w, long_on_two_cores, 350 * MS);
        CHECK(w.pace.best == 2 && w.pace.crowd == 0);
        work(&w, long_on_two_cores, 10 * SECOND);
        CHECK(w.mean_limit <= 2 && w.mean_limit > 1.95);
    }
}

/* 2 ms of computing and 6 ms of waiting, each. */
static uint64_t waiting_between(unsigned awake)
{
    return awake <= 8 ? 8 * MS : awake * MS;
}

/* 35 ms of computing and 65 ms of waiting, each. */
static uint64_t long_waiting_between(unsigned awake)
{
    return awake <= 5 ? 100 * MS : 100 * MS * awake / 5;
}

static void test_a_crowd_that_also_waits_is_let_go_again(void)
{
    workers w;
    workers_init(&w, 8);
    w.processors = 2;
    w.busy = 0.35;
    work(&w, long_waiting_between, SECOND);
    CHECK(work(&w, long_waiting_between, 20 * SECOND) > 0.9 * ideal(long_waiting_between, 8));
    workers_init(&w, 8);
    w.processors = 2;
    w.busy = 0.25;
    CHECK(work(&w, waiting_between, 20 * SECOND) > 0.97 * ideal(waiting_between, 8));
    CHECK(w.pace.best == 8);
    workers_init(&w, 8);
    w.processors = 2;
    work(&w, long_on_two_cores, SECOND);
    CHECK_EQUAL(w.pace.best, 2);
    w.busy = 0.25; /* the work changes */
    work(&w, waiting_between, 2 * SECOND);
    CHECK(work(&w, waiting_between, 5 * SECOND) > 0.95 * ideal(waiting_between, 8));
}

/* As fighting, but too short for a worker to tell how busy it is. */
static uint64_t cheap_and_fighting(unsigned awake)
{
    return awake == 1 ? 1000 : 1500 * awake;
}

static void test_work_that_becomes_cheap_is_tried_anew(void)
{
    workers w;
    workers_init(&w, 8);
    w.busy = 0.02;
    work(&w, sleeping, 2 * SECOND);
    work(&w, cheap_and_fighting, SECOND); /* they are not thought to be waiting for ever */
    CHECK(work(&w, cheap_and_fighting, 5 * SECOND) > 0.95 * ideal(cheap_and_fighting, 1));
    workers_init(&w, 8);
    w.processors = 2;
    for (unsigned i = 0; i < 1000 && w.pace.crowd == 0; i++)
        work(&w, long_on_two_cores, MS);
    CHECK(w.pace.crowd == 8);
    work(&w, cheap_and_fighting, SECOND); /* nor does the thinning go on */
    CHECK(w.pace.crowd == 0);
    CHECK(work(&w, cheap_and_fighting, 5 * SECOND) > 0.95 * ideal(cheap_and_fighting, 1));
}

static uint64_t parallel_and_long(unsigned awake)
{
    return awake <= 4 ? 5 * MS : 5 * MS * awake / 4;
}

static uint64_t fighting_and_long(unsigned awake)
{
    return awake == 1 ? 5 * MS : 15 * MS * awake / 2;
}

static void test_work_that_changes_is_tried_anew_however_long_that_was_put_off(void)
{
    workers w;
    workers_init(&w, 4);
    w.pace.num_processors = 4;
    work(&w, parallel_and_long, 20 * SECOND);
    CHECK(w.pace.best == 4 && w.pace.fewer_due_ns > w.now);
    work(&w, fighting_and_long, 2 * SECOND);
    CHECK_EQUAL(w.pace.best, 1);
}

static void test_workers_that_never_tell_are_tried_all_the_same(void)
{
    dlrs_pace pace;
    dlrs_pace_worker pace_of = {0};
    unsigned least = 8;
    dlrs_pace_init(&pace, 8, 2, false);
    for (uint64_t now = MS; now < SECOND; now += 100000) {
        dlrs_pace_report(&pace, &pace_of, 1, 100000, now, pace.limit);
        least = pace.limit < least ? pace.limit : least;
    }
    CHECK(least < 8);
}

static void test_a_stall_ends_the_thinning(void)
{
    workers w;
    workers_init(&w, 8);
    w.processors = 2;
    for (unsigned i = 0; i < 1000 && w.pace.crowd == 0; i++)
        work(&w, long_on_two_cores, MS);
    CHECK(w.pace.crowd == 8);
    dlrs_pace_stall(&w.pace, w.now);
    work(&w, long_on_two_cores, SECOND - 100 * MS);
    CHECK_EQUAL(w.pace.limit, 8);
}

static void test_workers_with_a_processor_each_are_not_tried_before_they_tell_how_busy_they_are(void)
{
    dlrs_pace pace;
    dlrs_pace_worker pace_of = {0};
    dlrs_pace_init(&pace, 2, 2, true);
    for (uint64_t now = MS; now < SECOND; now += MS) {
        dlrs_pace_report(&pace, &pace_of, 1, MS, now, 2);
        CHECK(pace.limit == 2 && pace.step < 0);
    }
}

static void test_items_that_wait_are_left_alone(void)
{
    workers w;
    workers_init(&w, 64);
    w.busy = 0.005;
    work(&w, sleeping, 10 * SECOND);
    CHECK(w.mean_limit == 64);
    w.busy = 0.02; /* they also compute */
    CHECK(work(&w, sleeping, 10 * SECOND) > 0.97 * ideal(sleeping, 64));
}

static void test_too_many_for_the_processors_cost_nothing(void)
{
    workers w;
    workers_init(&w, 8);
    work(&w, on_two_cores, SECOND);
    CHECK(work(&w, on_two_cores, 5 * SECOND) > 0.95 * ideal(on_two_cores, 2));
}

static void test_where_it_makes_no_difference_nothing_is_lost(void)
{
    workers w;
    workers_init(&w, 4);
    CHECK(work(&w, serial, 10 * SECOND) > 0.97 * ideal(serial, 1));
}

static void test_adapts_within_a_second_when_the_items_change(void)
{
    workers w;
    workers_init(&w, 2);
    for (unsigned round = 0; round < 20; round++) {
        work(&w, fighting, SECOND + round * 37 * MS);
        CHECK(work(&w, fighting, 300 * MS) > 0.9 * ideal(fighting, 1));
        work(&w, parallel, SECOND);
        CHECK(work(&w, parallel, 300 * MS) > 0.9 * ideal(parallel, 2));
    }
}

static void test_a_stall_lets_all_go_and_holds(void)
{
    workers w;
    workers_init(&w, 4);
    work(&w, fighting, SECOND);
    for (uint64_t hold = SECOND; hold <= 64 * SECOND; hold *= 2) {
        dlrs_pace_stall(&w.pace, w.now);
        CHECK_EQUAL(w.pace.limit, 4);
        CHECK(dlrs_pace_is_stalled(&w.pace, w.now));
        work(&w, fighting, hold - 10 * MS);
        CHECK_EQUAL(w.pace.limit, 4);
        work(&w, fighting, SECOND);
        CHECK(!dlrs_pace_is_stalled(&w.pace, w.now));
        CHECK(w.pace.limit < 4);
    }
}

static void test_epochs_too_short_for_a_segment_decide_nothing(void)
{
    workers w;
    workers_init(&w, 2);
    for (unsigned i = 0; i < 1000; i++) {
        dlrs_pace_disturb(&w.pace, w.now);
        work(&w, fighting, 5 * MS);
        CHECK_EQUAL(w.pace.limit, 2);
    }
}

static void test_trials_go_on_in_the_next_epoch(void)
{
    workers w;
    workers_init(&w, 2);
    for (unsigned i = 0; i < 20; i++) {
        dlrs_pace_disturb(&w.pace, w.now);
        work(&w, fighting, 25 * MS);
        w.now += 500 * MS; /* nothing to do */
        for (unsigned k = 0; k < w.num; k++)
            w.ends[k] = w.now;
    }
    CHECK_EQUAL(w.pace.best, 1);
}

static void test_times_that_go_back_do_no_harm(void)
{
    dlrs_pace pace;
    dlrs_pace_worker pace_of[2] = {0};
    uint64_t random = 3;
    dlrs_pace_init(&pace, 2, 2, true);
    uint64_t now = SECOND;
    for (unsigned i = 0; i < 200000; i++) {
        now += check_random(&random, 20000);
        uint64_t late = now - check_random(&random, 50000);
        dlrs_pace_report(&pace, &pace_of[check_random(&random, 2)], check_random(&random, 3),
                         check_random(&random, 20000), late, 1 + (unsigned)check_random(&random, 2));
        CHECK(pace.limit >= 1 && pace.limit <= 2);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_begins_with_as_many_as_there_are_processors);
    RUN(test_begins_with_all_where_items_are_likely_to_wait);
    RUN(test_more_workers_are_tried_less_often_where_that_is_in_vain);
    RUN(test_one_worker_is_never_paced);
    RUN(test_fighting_workers_are_parked);
    RUN(test_parallel_workers_lose_about_a_percent);
    RUN(test_workers_that_run_side_by_side_are_left_alone);
    RUN(test_more_workers_than_processors_are_tried_with_fewer_of_them);
    RUN(test_a_crowd_is_thinned_within_a_few_runs);
    RUN(test_a_crowd_that_also_waits_is_let_go_again);
    RUN(test_work_that_becomes_cheap_is_tried_anew);
    RUN(test_work_that_changes_is_tried_anew_however_long_that_was_put_off);
    RUN(test_workers_that_never_tell_are_tried_all_the_same);
    RUN(test_a_stall_ends_the_thinning);
    RUN(test_workers_with_a_processor_each_are_not_tried_before_they_tell_how_busy_they_are);
    RUN(test_items_that_wait_are_left_alone);
    RUN(test_too_many_for_the_processors_cost_nothing);
    RUN(test_where_it_makes_no_difference_nothing_is_lost);
    RUN(test_adapts_within_a_second_when_the_items_change);
    RUN(test_a_stall_lets_all_go_and_holds);
    RUN(test_epochs_too_short_for_a_segment_decide_nothing);
    RUN(test_trials_go_on_in_the_next_epoch);
    RUN(test_times_that_go_back_do_no_harm);
    return check_end();
}
