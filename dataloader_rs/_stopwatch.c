/* The stopwatch. See _stopwatch.h for what it promises. */
#include "_stopwatch.h"

enum {
    CLOCK_NS = 1500, /* a run that takes less is timed together with others */
    CLOCK_RUNS = 16, /* with so many */

    WHOLE_NS = 200000, /* a run of so much is done in one go */
    PIECE_NS = 100000, /* a longer one in pieces of so much */
};

uint64_t dlrs_averaged(uint64_t average, uint64_t sample)
{
    if (sample == 0)
        sample = 1;
    if (average == 0 || sample / 4 > average || sample < average / 4)
        return sample;
    return average - average / 4 + sample / 4;
}

void dlrs_stopwatch_start(dlrs_stopwatch *watch, uint64_t now_ns)
{
    dlrs_stopwatch_begin(watch, now_ns);
    watch->has_started = true;
}

void dlrs_stopwatch_begin_piece(dlrs_stopwatch *watch, uint64_t now_ns)
{
    watch->piece_began_ns = now_ns;
}

void dlrs_stopwatch_begin(dlrs_stopwatch *watch, uint64_t now_ns)
{
    watch->began_ns = watch->piece_began_ns = now_ns;
    watch->runs = watch->items = 0;
    watch->in_pieces = watch->has_started = false;
}

void dlrs_stopwatch_skip(dlrs_stopwatch *watch, uint64_t spent_ns)
{
    watch->began_ns += spent_ns;
    watch->piece_began_ns += spent_ns;
}

bool dlrs_stopwatch_count(dlrs_stopwatch *watch, uint64_t items)
{
    watch->runs++;
    watch->items += items;
    bool is_short = watch->run_ns != 0 && watch->run_ns < CLOCK_NS && !watch->one_by_one;
    return watch->has_started || !is_short || watch->runs >= CLOCK_RUNS;
}

void dlrs_stopwatch_time(dlrs_stopwatch *watch, uint64_t now_ns)
{
    uint64_t spent_ns = now_ns - watch->began_ns, run_ns = spent_ns / watch->runs;
    if (!watch->in_pieces && watch->items > 0)
        watch->item_ns = dlrs_averaged(watch->item_ns, spent_ns / watch->items);
    /* One run in which the system took the processor away does not make all runs dear; a second one may. */
    bool is_dear = watch->run_ns != 0 && run_ns > watch->run_ns * 2;
    if (is_dear && !watch->was_dear)
        run_ns = watch->run_ns * 2;
    watch->was_dear = is_dear;
    watch->run_ns = dlrs_averaged(watch->run_ns, run_ns);
}

void dlrs_stopwatch_time_piece(dlrs_stopwatch *watch, uint64_t items, uint64_t now_ns)
{
    watch->item_ns = dlrs_averaged(watch->item_ns, (now_ns - watch->piece_began_ns) / items);
    watch->piece_began_ns = now_ns;
    watch->in_pieces = true;
}

uint64_t dlrs_stopwatch_piece(const dlrs_stopwatch *watch, uint64_t left)
{
    if (left == 0)
        return 0;
    if (watch->item_ns == 0)
        return 1;
    if (left <= WHOLE_NS / watch->item_ns)
        return left;
    uint64_t piece = PIECE_NS / watch->item_ns;
    return piece > 0 ? piece : 1;
}
