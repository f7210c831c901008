/* Contract of the pace: how many workers of a pool should be awake. More are not always faster: threads that fight for
 * one lock (an interpreter's, an allocator's, the count of an object they all use) can be slower than one of them alone.
 * So the pace tries from time to time whether half or twice as many get more items done, and keeps to what is better.
 *
 *      limit = best  --trial due-->  [best][candidate][best][candidate]  --clearly better?-->  limit = best
 *
 * A trial is four short segments in turns, because the speed of a machine drifts; in each of them the pace counts the
 * items of every worker between its first and its last report, so that runs which straddle the borders do no harm.
 *
 * This half is plain arithmetic on reports and times: no threads, no clock, no locks. Every function here is called with
 * the lock of the pool held. */
#ifndef DLRS_PACE_H
#define DLRS_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* What the pace remembers for each worker; starts out zeroed. */
typedef struct dlrs_pace_reports {
    uint64_t segment; /* which the rest is about */
    uint64_t first_ns, last_ns;
    uint64_t items; /* finished between the two */
} dlrs_pace_reports;

typedef struct dlrs_pace {
    unsigned limit; /* workers that should be awake now: 1 .. most */
    unsigned most;
    unsigned best;
    unsigned candidate; /* during a trial: what is compared with `best` */
    int step;           /* of the trial, 0 .. 3: even ones are with `best`; or -1 without a trial */
    bool settling;      /* workers that are to go, or to come, have not all done so yet */
    bool upwards;       /* which way the next trial goes, if both are possible */
    uint64_t segment;   /* number of the segment that is measured; 0 is none */
    uint64_t since_ns;  /* when the settling or the segment began */
    uint64_t candidate_ns; /* spent with the candidate in this trial */
    uint64_t trial_due_ns; /* 0 before the first report */
    uint64_t stalled_until_ns;
    uint64_t stall_hold_ns; /* how long the next stall keeps the pace from trying */
    uint64_t segment_reports, segment_items;
    double segment_rate; /* items per ns in this segment so far, of all workers */
    double rates[2];     /* of the segments with `best`, and of those with the candidate; sums */
} dlrs_pace;

/* Begin with all of `most` workers, 1 or more, awake. */
void dlrs_pace_init(dlrs_pace *pace, unsigned most);

/* A worker reports one or more whole runs of `items` finished, for which it took `elapsed_ns`; `awake` workers are awake.
 * Reports may come in any order, and times may go back a little between workers. */
void dlrs_pace_report(dlrs_pace *pace, dlrs_pace_reports *own, uint64_t items, uint64_t elapsed_ns, uint64_t now_ns,
                      unsigned awake);

/* The work changed its kind, or there was none for a while: what a trial measured so far says nothing. */
void dlrs_pace_disturb(dlrs_pace *pace);

/* Nothing was finished for so long that items may be waiting for each other: all workers may be awake, and no trial takes
 * that back for a second; for twice as long with each further stall, up to about a minute. */
void dlrs_pace_stall(dlrs_pace *pace, uint64_t now_ns);

/* Was there a stall, whose time is not over yet? */
bool dlrs_pace_is_stalled(const dlrs_pace *pace, uint64_t now_ns);

#endif
