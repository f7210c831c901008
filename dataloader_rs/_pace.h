/* Contract of the pace: how many workers of a pool should be awake. More are not always faster: threads that fight for
 * one lock (an interpreter's, an allocator's, the count of an object they all use) can be slower than one of them
 * alone. So the pace tries from time to time whether half or twice as many get more items done, and keeps to what is
 * better.
 *
 *      limit = best  --trial due-->  [best][candidate][best][candidate]  --clearly better?-->  limit = best
 *
 * A trial is four short segments in turns, because the speed of a machine drifts. In each of them the pace counts what
 * each worker finishes from its first report to the end of the segment, so that it does not matter where in its work a
 * worker was when the segment began, and a worker does not seem fast because it has the lock just then.
 *
 * More workers than processors that keep them all busy are a crowd, and need no trial: it is thinned to as many as there
 * are processors, and stays so if these are as busy then. If they are not, items wait for something, too, and all of
 * the crowd are let go again.
 *
 * This half is plain arithmetic on reports and times: no threads, no clock, no locks. Every function here is called
 * with the lock of the pool held. */
#ifndef DLRS_PACE_H
#define DLRS_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* What the pace knows of a worker; starts out zeroed. */
typedef struct dlrs_pace_worker {
    uint64_t segment;  /* which the rest is about */
    uint64_t first_ns; /* its first report */
    struct dlrs_pace_worker *next; /* with reports about the same segment */
} dlrs_pace_worker;

typedef struct dlrs_pace {
    unsigned limit; /* workers that should be awake now: 1 .. most */
    unsigned most;
    unsigned num_processors;
    bool exclusive; /* only one worker is attached at a time */
    unsigned best;
    unsigned candidate; /* during a trial: what is compared with `best` */
    int step;           /* of the trial, 0 .. 3: even ones are with `best`; or -1 without a trial */
    bool settling;      /* workers that are to go, or to come, have not all done so yet */
    bool upwards;       /* which way the next trial goes, if both are possible */
    uint64_t segment;   /* number of the segment that is measured; 0 is none */
    uint64_t since_ns;  /* when the settling or the segment began; 0: with the next report */
    unsigned disturbances; /* of this step of the trial */
    dlrs_pace_worker *reporting; /* who has reported in this segment */
    uint64_t reports, items; /* in this segment; without a trial, since the last one */
    uint64_t reported_ns; /* without a trial: how long they took */
    uint64_t candidate_ns; /* spent with the candidate in this trial */
    uint64_t trial_due_ns; /* 0 before the first report */
    uint64_t fewer_due_ns; /* nor is it tried before then whether fewer are faster */
    uint64_t thinning_due_ns; /* nor is a crowd thinned before then */
    uint64_t more_period_ns; /* to the next trial, after one with more workers in vain */
    unsigned crowd;        /* while it is thinned: how many they were; else 0 */
    double crowd_busy;     /* processors that they kept busy */
    bool thinned_in_vain;  /* the last time, and no trial with fewer came since */
    double put_off_run_ns; /* what a run took when `fewer_due_ns` was put off; 0: not seen yet */
    unsigned looks_untold; /* in a row, at how busy workers are, when none had told */
    bool is_waiting;       /* the workers were mostly waiting when it was looked last */
    unsigned tells;     /* since the last trial */
    uint64_t timed_ns;  /* the time that they were about */
    double all_busy_ns; /* and how long all who were awake were run in it, if they were like the one who told */
    uint64_t stalled_until_ns;
    uint64_t stall_hold_ns; /* how long the next stall keeps the pace from trying */
    double rates[2]; /* items per ns, of the segments with `best` and of those with the candidate; sums */
} dlrs_pace;

/* Begin with as many of `most` workers, 1 or more, awake as there are processors. `exclusive`: only one of them is
 * attached at a time. */
void dlrs_pace_init(dlrs_pace *pace, unsigned most, unsigned num_processors, bool exclusive);

/* Begin with all workers after all: items are known to wait, or nothing is to be found out. Without effect after the
 * first report. */
void dlrs_pace_begin_with_all(dlrs_pace *pace);

/* A worker reports a run finished, or several short ones, of `items`, for which it took `elapsed_ns`; `awake` workers
 * are awake. Times may go back a little between workers. */
void dlrs_pace_report(dlrs_pace *pace, dlrs_pace_worker *worker, uint64_t items, uint64_t elapsed_ns, uint64_t now_ns,
                      unsigned awake);

/* A worker tells that in the last `elapsed_ns` a processor ran it for `busy_ns`; now and then is enough. Workers that mostly
 * wait, for a disk or a network, are never tried with fewer of them. */
void dlrs_pace_tell_busy(dlrs_pace *pace, uint64_t elapsed_ns, uint64_t busy_ns, uint64_t now_ns, unsigned awake);

/* The work changes its kind, or begins after a while: the segment that is measured begins anew, and where epochs are
 * too short for one, the trial is given up. */
void dlrs_pace_disturb(dlrs_pace *pace, uint64_t now_ns);

/* Nothing was finished for so long that items may be waiting for each other: all workers may be awake, and no trial
 * takes that back for a second; for twice as long, up to about a minute, with each stall that follows soon after. */
void dlrs_pace_stall(dlrs_pace *pace, uint64_t now_ns);

/* Do workers mostly wait for something that is not here, a disk or a network, as far as they told last? */
bool dlrs_pace_is_waiting(const dlrs_pace *pace);

/* Was there a stall, whose time is not over yet? */
bool dlrs_pace_is_stalled(const dlrs_pace *pace, uint64_t now_ns);

#endif
