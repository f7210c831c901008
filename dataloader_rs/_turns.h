/* Contract of the turns: whether workers that take turns, one at a time, get more done than side by side, where that is
 * in doubt.
 *
 * Where only one thread can be attached at a time, and runs are cheap, workers take turns. If a few of many cheap runs
 * take so long that all are not cheap on average, it may be that these wait, for a disk or a network, and that
 * workers should do so side by side; or that the system takes the processor away, or that somebody else is attached,
 * and more workers would only make that worse. Nothing that is cheap to ask for tells the one from the other. So it is
 * tried:
 *
 *      in turns  --a few are long, trial due-->  [in turns][side by side][in turns][side by side]  --faster?-->  so
 *
 * Nothing changes before such a trial, so a short false alarm costs nothing, and a long one two steps now and then. What
 * was found out holds for a while, also for the next long runs after a time without.
 *
 * Plain arithmetic on reports and times: no threads, no clock, no locks. Every function here is called with the lock of
 * the pool held. */
#ifndef DLRS_TURNS_H
#define DLRS_TURNS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct dlrs_turns {
    bool side_by_side; /* they should take no turns now, also while most runs are cheap */
    bool takes_long;   /* runs are not cheap on average: a few of them, or most, are long */
    bool is_better;    /* side by side they got more done, in the last trial */
    int step;          /* of the trial, 0 .. 3: odd ones are side by side; or -1 without a trial */
    uint64_t recent_ns; /* a moving average of how long a run takes, times TURNS_RECENT_RUNS */
    uint64_t due_ns;    /* the next trial, if a few runs are long then */
    uint64_t in_vain_ns; /* after how long the next trial comes if this one is in vain */
    uint64_t better_until_ns; /* how long `is_better` holds */
    uint64_t settled_ns; /* from then on this step is measured, */
    uint64_t since_ns;   /* since the first report after that; 0 before */
    uint64_t reports, turns_taken, items;
    double rates[2]; /* items per ns, in turns and side by side, in this half of the trial */
} dlrs_turns;

/* Begin in turns. */
void dlrs_turns_init(dlrs_turns *turns);

/* A worker reports `runs` runs finished, 1 to 16, of `items`, which took `spent_ns`. Most runs take about `run_ns`, which
 * is cheap if it is less than `cheap_ns`; `took_turns`: workers did so until now. Times may go back a little between
 * workers. */
void dlrs_turns_report(dlrs_turns *turns, uint64_t runs, uint64_t items, uint64_t spent_ns, uint64_t run_ns,
                       uint64_t cheap_ns, bool took_turns, uint64_t now_ns);

#endif
