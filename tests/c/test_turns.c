/* Tests of the turns, with workers that are simulated: time is a number here, and what a run costs is a function of its
 * number and of how many workers are at work. */
#include "_turns.h"
#include "check.h"

#define US 1000ull
#define MS 1000000ull

enum { MOST_WORKERS = 4 };

/* ns that run number `run` takes while `at_work` workers are. */
typedef uint64_t cost_fn(uint64_t run, unsigned at_work);

static uint64_t short_ones(uint64_t run, unsigned at_work)
{
    (void)run;
    (void)at_work;
    return 2 * US;
}

static uint64_t rather_short_ones(uint64_t run, unsigned at_work)
{
    (void)run;
    (void)at_work;
    return 16 * US;
}

static uint64_t long_ones(uint64_t run, unsigned at_work)
{
    (void)run;
    (void)at_work;
    return 2 * MS;
}

/* One in four waits. */
static uint64_t some_wait(uint64_t run, unsigned at_work)
{
    (void)at_work;
    return run % 4 == 3 ? 2 * MS : 2 * US;
}

/* One in four waits for what the others have. */
static uint64_t some_are_in_the_way(uint64_t run, unsigned at_work)
{
    return run % 4 == 3 ? 2 * MS * at_work : 2 * US * at_work;
}

static uint64_t some_are_more_in_the_way(uint64_t run, unsigned at_work)
{
    return run % 4 == 3 ? 2 * MS * at_work * at_work : 2 * US * at_work * at_work;
}

/* The same for many short ones, and somebody else is attached for 5 ms now and then, more often side by side. */
static uint64_t held_up_side_by_side(uint64_t run, unsigned at_work)
{
    return 8 * US * at_work + (run % (at_work > 1 ? 100 : 3000) == 99 ? 5 * MS : 0);
}

/* The system takes the processor away now and then. */
static uint64_t held_up(uint64_t run, unsigned at_work)
{
    (void)at_work;
    return run % 1500 == 1499 ? 10 * MS : 8 * US;
}

typedef struct workers {
    dlrs_turns turns;
    uint64_t now, runs;
    uint64_t began[MOST_WORKERS], ends[MOST_WORKERS]; /* of the run that each is at; 0 if it is not at work */
    uint64_t side_by_side_ns; /* in the last call of work() */
    uint64_t run_ns;          /* the last short one */
} workers;

static void workers_init(workers *w)
{
    memset(w, 0, sizeof *w);
    w->now = 1;
    dlrs_turns_init(&w->turns);
}

static unsigned at_work(const workers *w)
{
    unsigned found = 0;
    for (unsigned i = 0; i < MOST_WORKERS; i++)
        found += w->ends[i] != 0;
    return found;
}

static void start_workers(workers *w, cost_fn *cost)
{
    for (unsigned i = 0; i < MOST_WORKERS; i++) {
        if (w->ends[i] == 0 && at_work(w) < (w->turns.side_by_side ? MOST_WORKERS : 1)) {
            w->began[i] = w->now;
            w->ends[i] = w->now + cost(w->runs++, at_work(w) + 1);
        }
    }
}

/* Let `duration` ns pass. Runs finished per ns. */
static double work(workers *w, cost_fn *cost, uint64_t duration)
{
    uint64_t start = w->now, finished = 0;
    w->side_by_side_ns = 0;
    while (w->now - start < duration) {
        unsigned first = MOST_WORKERS;
        start_workers(w, cost);
        for (unsigned i = 0; i < MOST_WORKERS; i++) {
            if (w->ends[i] != 0 && (first == MOST_WORKERS || w->ends[i] < w->ends[first]))
                first = i;
        }
        CHECK(first < MOST_WORKERS);
        if (w->turns.side_by_side)
            w->side_by_side_ns += w->ends[first] - w->now;
        w->now = w->ends[first];
        uint64_t spent = w->now - w->began[first];
        w->ends[first] = 0;
        finished++;
        bool took_turns = !w->turns.side_by_side && w->run_ns < 20 * US;
        w->run_ns = spent < 100 * US || cost == long_ones ? spent : w->run_ns;
        dlrs_turns_report(&w->turns, 1, 1, spent, w->run_ns, 20 * US, took_turns, w->now);
        CHECK(!w->turns.side_by_side || w->turns.takes_long);
    }
    return (double)finished / (double)(w->now - start);
}

/* Begin with workers that have found out that side by side is better. */
static void workers_init_side_by_side(workers *w)
{
    workers_init(w);
    work(w, some_wait, 200 * MS);
    CHECK(w->turns.side_by_side && w->turns.is_better);
}

static void test_short_runs_are_done_in_turns(void)
{
    workers w;
    workers_init(&w);
    work(&w, short_ones, 1000 * MS);
    CHECK_EQUAL(w.side_by_side_ns, 0);
    work(&w, rather_short_ones, 1000 * MS);
    CHECK_EQUAL(w.side_by_side_ns, 0);
}

static void test_few_runs_that_wait_do_so_side_by_side(void)
{
    workers w;
    workers_init(&w);
    work(&w, some_wait, 12 * MS);
    CHECK(w.turns.takes_long && w.turns.step < 0);
    work(&w, some_wait, 73 * MS); /* half a trial is enough */
    CHECK(w.turns.side_by_side && w.turns.step < 0);
    CHECK(work(&w, some_wait, 5000 * MS) > 3.8 * 4 / (2 * MS));
}

/* Many workers that make all runs take longer. */
static void test_few_long_runs_that_are_in_the_way_are_done_in_turns(void)
{
    workers w;
    workers_init(&w);
    CHECK(work(&w, some_are_in_the_way, 5000 * MS) > 0.95 * 4 / (2 * MS));
    workers_init(&w);
    CHECK(work(&w, some_are_more_in_the_way, 5000 * MS) > 0.9 * 4 / (2 * MS));
    CHECK(w.side_by_side_ns < 500 * MS);
}

static void test_runs_that_are_held_up_now_and_then_change_nothing(void)
{
    workers w;
    workers_init(&w);
    work(&w, held_up, 5000 * MS);
    CHECK_EQUAL(w.side_by_side_ns, 0);

    workers_init(&w);
    work(&w, short_ones, 10 * MS);
    dlrs_turns_report(&w.turns, 1, 1, 10 * MS, w.run_ns, 20 * US, true, w.now);
    CHECK(!w.turns.takes_long);
}

static void test_what_was_found_out_holds_in_the_next_burst(void)
{
    workers w;
    workers_init_side_by_side(&w);
    work(&w, short_ones, 20 * MS);
    CHECK(!w.turns.takes_long);
    work(&w, some_wait, 50 * MS);
    CHECK(w.turns.side_by_side);
}

static void test_a_trial_that_the_long_runs_do_not_last_for_is_given_up(void)
{
    workers w;
    workers_init(&w);
    for (int i = 0; i < 20; i++) {
        work(&w, some_wait, 30 * MS);
        CHECK(w.turns.step >= 0 && !w.turns.side_by_side);
        work(&w, short_ones, 20 * MS);
        CHECK(w.turns.step < 0);
    }
}

static void test_short_runs_after_long_ones_are_done_in_turns_again(void)
{
    workers w;
    workers_init(&w);
    work(&w, long_ones, 1000 * MS);
    CHECK(w.turns.takes_long);
    work(&w, rather_short_ones, 100 * MS);
    CHECK(!w.turns.takes_long);
}

static void test_what_becomes_worse_is_given_up(void)
{
    workers w;
    workers_init_side_by_side(&w);
    work(&w, some_are_more_in_the_way, 2500 * MS);
    CHECK(!w.turns.is_better);
    work(&w, some_wait, 1000 * MS);
    CHECK(w.turns.side_by_side);
}

/* The trial that would tell ends with the alarm. */
static void test_what_was_found_out_does_not_hold_for_ever(void)
{
    workers w;
    workers_init_side_by_side(&w);
    work(&w, held_up_side_by_side, 5000 * MS);
    CHECK(!w.turns.is_better);
    work(&w, held_up_side_by_side, 5000 * MS);
    CHECK_EQUAL(w.side_by_side_ns, 0);
}

static void test_long_runs_alone_are_not_compared(void)
{
    workers w;
    workers_init(&w);
    work(&w, long_ones, 3000 * MS);
    CHECK(!w.turns.is_better && w.side_by_side_ns == 0);
    work(&w, some_wait, 100 * MS);
    CHECK(w.turns.side_by_side);
}

static void test_times_that_go_back_do_no_harm(void)
{
    workers w;
    workers_init(&w);
    work(&w, some_wait, 20 * MS);
    for (int i = 0; i < 1000; i++)
        dlrs_turns_report(&w.turns, 16, 16, 2 * MS, 2 * US, 20 * US, true, w.now + (i % 2 == 0 ? 30 * MS : 0));
    CHECK(w.turns.rates[0] >= 0 && w.turns.rates[0] < 1e300);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_short_runs_are_done_in_turns);
    RUN(test_few_runs_that_wait_do_so_side_by_side);
    RUN(test_few_long_runs_that_are_in_the_way_are_done_in_turns);
    RUN(test_runs_that_are_held_up_now_and_then_change_nothing);
    RUN(test_what_was_found_out_holds_in_the_next_burst);
    RUN(test_a_trial_that_the_long_runs_do_not_last_for_is_given_up);
    RUN(test_short_runs_after_long_ones_are_done_in_turns_again);
    RUN(test_what_becomes_worse_is_given_up);
    RUN(test_what_was_found_out_does_not_hold_for_ever);
    RUN(test_long_runs_alone_are_not_compared);
    RUN(test_times_that_go_back_do_no_harm);
    return check_end();
}
