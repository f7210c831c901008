/* Tests of the stopwatch. */
#include "_stopwatch.h"
#include "check.h"

#define US 1000ull

static void test_average_starts_follows_and_smooths(void)
{
    CHECK_EQUAL(dlrs_averaged(0, 100), 100);
    CHECK_EQUAL(dlrs_averaged(100, 100), 100);
    CHECK_EQUAL(dlrs_averaged(100, 200), 125);
    CHECK_EQUAL(dlrs_averaged(100, 1000), 1000);
    CHECK_EQUAL(dlrs_averaged(1000, 100), 100);
    CHECK_EQUAL(dlrs_averaged(0, 0), 1); /* 0 is none */
    CHECK_EQUAL(dlrs_averaged(1, 0), 1);
    CHECK_EQUAL(dlrs_averaged(UINT64_MAX, UINT64_MAX), UINT64_MAX - UINT64_MAX / 4 + UINT64_MAX / 4);
}

/* Runs of `items` that take `run_ns` each. How often the clock was read. */
static unsigned run(dlrs_stopwatch *watch, uint64_t *now, unsigned runs, uint64_t items, uint64_t run_ns)
{
    unsigned reads = 0;
    for (unsigned i = 0; i < runs; i++) {
        *now += run_ns;
        if (dlrs_stopwatch_count(watch, items)) {
            dlrs_stopwatch_time(watch, *now);
            dlrs_stopwatch_begin(watch, *now);
            reads++;
        }
    }
    return reads;
}

static void test_runs_are_timed(void)
{
    dlrs_stopwatch watch = {0};
    uint64_t now = 1;
    dlrs_stopwatch_begin(&watch, now);
    CHECK_EQUAL(run(&watch, &now, 10, 32, 64 * US), 10);
    CHECK_EQUAL(watch.run_ns, 64 * US);
    CHECK_EQUAL(watch.item_ns, 2 * US);
}

static void test_runs_without_items_tell_nothing_about_items(void)
{
    dlrs_stopwatch watch = {0};
    uint64_t now = 1;
    dlrs_stopwatch_begin(&watch, now);
    run(&watch, &now, 10, 0, 64 * US);
    CHECK_EQUAL(watch.run_ns, 64 * US);
    CHECK_EQUAL(watch.item_ns, 0);
}

static void test_very_short_runs_are_timed_together(void)
{
    dlrs_stopwatch watch = {0};
    uint64_t now = 1;
    dlrs_stopwatch_begin(&watch, now);
    CHECK_EQUAL(run(&watch, &now, 1 + 160, 2, 200), 1 + 10);
    CHECK_EQUAL(watch.run_ns, 200);
    CHECK_EQUAL(watch.item_ns, 100);
    watch.one_by_one = true;
    CHECK_EQUAL(run(&watch, &now, 10, 2, 200), 10);
}

static void test_one_long_run_does_not_make_all_dear(void)
{
    dlrs_stopwatch watch = {0};
    uint64_t now = 1;
    dlrs_stopwatch_begin(&watch, now);
    run(&watch, &now, 10, 1, 5 * US);
    run(&watch, &now, 1, 1, 5000 * US);
    CHECK(watch.run_ns < 10 * US);
    run(&watch, &now, 40, 1, 5000 * US);
    CHECK(watch.run_ns > 1000 * US);
}

static void test_time_that_is_skipped_does_not_count(void)
{
    dlrs_stopwatch watch = {0};
    dlrs_stopwatch_begin(&watch, 1000);
    dlrs_stopwatch_skip(&watch, 7000);
    CHECK(dlrs_stopwatch_count(&watch, 4));
    dlrs_stopwatch_time(&watch, 1000 + 7000 + 4000);
    CHECK_EQUAL(watch.run_ns, 4000);
    CHECK_EQUAL(watch.item_ns, 1000);
}

static void test_long_runs_come_in_pieces(void)
{
    dlrs_stopwatch watch = {0};
    uint64_t now = 1, left = 1000, done = 0, pieces = 0;
    dlrs_stopwatch_begin(&watch, now);
    while (left > 0) {
        uint64_t piece = dlrs_stopwatch_piece(&watch, left);
        CHECK(piece >= 1 && piece <= left);
        CHECK(pieces > 0 || piece == 1); /* nothing is known yet */
        now += piece * 10 * US;
        CHECK(piece * 10 <= 200);
        dlrs_stopwatch_time_piece(&watch, piece, now);
        left -= piece;
        done += piece;
        pieces++;
    }
    CHECK_EQUAL(done, 1000);
    CHECK_EQUAL(watch.item_ns, 10 * US);
    CHECK(dlrs_stopwatch_count(&watch, 1000));
    dlrs_stopwatch_time(&watch, now + 5000 * US); /* what followed the items */
    CHECK_EQUAL(watch.item_ns, 10 * US);
    CHECK_EQUAL(watch.run_ns, 15000 * US);
    dlrs_stopwatch_begin(&watch, now);
    CHECK_EQUAL(dlrs_stopwatch_piece(&watch, 20), 20); /* 0.2 ms is not long */
    CHECK_EQUAL(dlrs_stopwatch_piece(&watch, 21), 10);
    CHECK_EQUAL(dlrs_stopwatch_piece(&watch, 0), 0);
}

static void test_items_longer_than_a_piece_come_one_by_one(void)
{
    dlrs_stopwatch watch = {0};
    dlrs_stopwatch_begin(&watch, 1);
    dlrs_stopwatch_time_piece(&watch, 1, 1 + 5000 * US);
    CHECK_EQUAL(dlrs_stopwatch_piece(&watch, 9), 1);
    CHECK_EQUAL(dlrs_stopwatch_piece(&watch, 1), 1);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_average_starts_follows_and_smooths);
    RUN(test_runs_are_timed);
    RUN(test_runs_without_items_tell_nothing_about_items);
    RUN(test_very_short_runs_are_timed_together);
    RUN(test_one_long_run_does_not_make_all_dear);
    RUN(test_time_that_is_skipped_does_not_count);
    RUN(test_long_runs_come_in_pieces);
    RUN(test_items_longer_than_a_piece_come_one_by_one);
    return check_end();
}
