/* Contract of the stopwatch of a worker: how long its runs and their items take, as moving averages. Runs that are much
 * shorter than it takes to read the clock are timed together. Arithmetic alone; each worker has its own. */
#ifndef DLRS_STOPWATCH_H
#define DLRS_STOPWATCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct dlrs_stopwatch {
    uint64_t began_ns;       /* the oldest run that is not timed yet */
    uint64_t piece_began_ns; /* the piece it is at, of a run that is done in pieces; else the same */
    uint64_t runs, items;    /* finished, and not timed yet */
    bool in_pieces;          /* a piece of the run it is at is finished */
    bool has_started;        /* no run was finished since dlrs_stopwatch_start */
    bool was_dear;           /* the last run took much longer than those before */
    bool one_by_one;         /* given: no runs are timed together, since some are known to be long */
    uint64_t run_ns;         /* how long a run takes; 0 before the first is timed */
    uint64_t item_ns;        /* how long an item takes, likewise */
} dlrs_stopwatch;

/* A moving average of whole numbers > 0 that follows at once where things become quite different; 0 is none yet. */
uint64_t dlrs_averaged(uint64_t average, uint64_t sample);

/* The worker begins to work after it did not; the first run from now on is timed by itself. */
void dlrs_stopwatch_start(dlrs_stopwatch *watch, uint64_t now_ns);

/* A run begins, and those before it are timed. */
void dlrs_stopwatch_begin(dlrs_stopwatch *watch, uint64_t now_ns);

/* The first piece of a run begins. */
void dlrs_stopwatch_begin_piece(dlrs_stopwatch *watch, uint64_t now_ns);

/* What follows does not count: time that has passed without the worker being at work. */
void dlrs_stopwatch_skip(dlrs_stopwatch *watch, uint64_t spent_ns);

/* A run of `items` is finished. True if it is time to read the clock, for dlrs_stopwatch_time. */
bool dlrs_stopwatch_count(dlrs_stopwatch *watch, uint64_t items);

/* Time the runs that were counted. dlrs_stopwatch_begin comes next. */
void dlrs_stopwatch_time(dlrs_stopwatch *watch, uint64_t now_ns);

/* A piece, of `items`, 1 or more, of a run is finished. */
void dlrs_stopwatch_time_piece(dlrs_stopwatch *watch, uint64_t items, uint64_t now_ns);

/* How many of the `left` items of a run should be done in one go: all, unless they take long. */
uint64_t dlrs_stopwatch_piece(const dlrs_stopwatch *watch, uint64_t left);

#endif
