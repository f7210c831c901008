/* What the parts of the pool share: its structs with what guards them, and what the parts call in each other. It is for
 * them alone; what the pool promises to others is in _pool.h.
 *
 *   _claim.c   what can be claimed, in what order, and who is woken for it
 *   _worker.c  the threads: when they wait, what they report, and their calls from inside the `work` hook
 *   _epoch.c   the consumer's side, and who is told that a batch is ready
 *   _pool.c    the life of a pool
 *
 * How the parallel part works
 *
 * Each epoch has a ring of slots and a count of the items offered so far. A worker, under the lock of the pool,
 * claims a run: it reserves the slot of the next batch, or takes the next item of a batch that is in progress. It
 * works on the run without the lock, then, under the lock again, leaves the outcome in the slot and claims its next
 * run. The consumer takes the outcome from the oldest slot once it is there, which makes room for one more batch.
 * Epochs of one pool take turns.
 *
 * Waking. A worker parks only under the lock and only after it found nothing to claim. Whatever makes something
 * claimable (an epoch, more items, room in a ring) wakes one parked worker, unless one is already on its way to claim,
 * and whoever claims wakes one more if there is something left to claim. So nothing is ever claimable while everybody
 * parks. Beside that, where runs are not cheap, whoever comes or claims wakes one more if fewer are on their way than
 * could claim: the items of a batch are begun side by side. No crowd is woken for a batch that one worker claims whole.
 *
 * Who is awake. A worker is awake from when it has found something to claim until it is back, detached, having found
 * nothing. The pace (_pace.h) says how many may be; the others stay parked though there is work. Where only one can be
 * attached, the very first has a head start: until it has finished a run, HEAD_START_NS at most, others that came would
 * take the attachment from it and from the consumer, who waits for that run. Items may wait for each other, so one of
 * those who stay watches, and when nothing gets finished for STALL_NS lets all of them go. Where items compute
 * meanwhile they are more likely just long: it waits for as long as a run takes, LONG_STALL_NS at most, and then lets
 * one more go, and if that is in vain as many more as have gone. A watch never takes longer than that, whoever is
 * awake.
 *
 * NOTE [ cheap runs ] Where only one thread can be attached at a time, workers and the consumer take turns, and a turn
 * costs more than a cheap run. So for as long as runs are cheap a turn is made long: one worker fills the whole window
 * before the consumer comes back in, and it begins to fill again when the consumer has emptied the window and waits,
 * or has stayed away for LINGER_NS. Whoever waits meanwhile looks for the other for a few microseconds before it
 * parks. Where some runs among the cheap ones are long, it is tried whether turns are better (_turns.h), and if not, runs
 * are no cheap ones.
 *
 * Two locks, taken in this order: that of the process (_process.c), then the lock of a pool. The first guards what is
 * counted and listed about all pools and is used when threads start and end; the second guards the work of one pool. */
#ifndef DLRS_POOL_PARTS_H
#define DLRS_POOL_PARTS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "_pace.h"
#include "_pool.h"
#include "_process.h"
#include "_stopwatch.h"
#include "_turns.h"

enum {
    /* How long one looks for what one waits for before one parks, where runs are known to be cheap. Not at all if it
     * took much longer the last times. */
    SPIN_CHEAP_NS = 100000,
    WORTH_SPINNING = 2,

    CHEAP_NS = 20000,    /* a run that takes less is cheap; about what two turns cost */
    LINGER_NS = 1000000, /* how long a worker leaves room for cheap runs alone if no consumer waits */
};

struct dlrs_worker {
    /* Set once before the thread starts. */
    dlrs_pool *pool;
    unsigned index;
    sigset_t work_signals; /* signals blocked while it works: what its maker had blocked */
    char name[40];

    /* The worker's own. */
    pthread_t thread;        /* read by others, under `pool->lock`, while it is awake */
    bool has_entered;        /* the `enter` hook was called */
    void *thread_context;    /* what it returned */
    dlrs_stopwatch watch;
    uint64_t told_ns;        /* when it last told the pace how busy it is; 0 while it has not yet */
    uint64_t told_busy_ns;   /* its own clock then */
    uint64_t waited_ns;      /* how long it waits for something to claim, a moving average */

    /* Guarded by `pool->lock`. */
    bool is_awake;
    uint64_t seen_busy_ns;   /* how long processors had run it when one last looked; 0 if it was not awake */
    dlrs_run at; /* its run, but for the slot; the epoch is NULL while it has none */
    dlrs_pace_worker pace;
};

struct dlrs_epoch {
    /* Set once by dlrs_epoch_new. */
    dlrs_pool *pool;
    void *user;
    uint64_t batch_size;
    uint64_t batches_in_parallel;
    uint64_t items_in_parallel;
    uint64_t num_lanes;
    bool unordered;

    /* Written under `pool->lock`; a hint that may be read without it. True iff the head of the ring is ready. */
    atomic_bool head_is_ready;

    /* The consumer's own. */
    uint64_t waited_ns; /* how long it waits for a batch, a moving average */
    uint64_t look_again_ns; /* how long it waits for a turn to end before it looks whether its batch is ready */
    bool asks_gate; /* from when its batch is ready until it has attached; while it waits, its workers may set it */
    uint64_t ready_ns; /* since when, likewise; 0 if workers asked for it */
    uint64_t attached_ns; /* how long it took to attach the last time that they did not */
    unsigned looks_in_vain; /* at the gate, in a row */

    /* Guarded by `pool->lock`. */
    dlrs_ring ring;
    uint64_t items_offered;
    uint64_t batches_offered;   /* batches that may be claimed: ring.claimed <= batches_offered */
    uint64_t *sizes;            /* without a batch_size: batch n, while not claimed, has sizes[n % sizes_size] items */
    uint64_t sizes_size;
    bool *lane_is_busy;         /* num_lanes of them */
    uint64_t lanes_ended;
    bool all_offered;           /* no more batches are offered */
    dlrs_epoch *after, *before; /* see dlrs_epoch_options.after, and the other way round; NULL once they have parted */
    uint64_t in_progress;       /* slots that are OPEN and not ending; at most batches_in_parallel */
    dlrs_slot *first_unstarted; /* OPEN slots, oldest first, with items that nobody has started */
    uint64_t holds;             /* the consumer, and each worker with a run of this epoch */
    uint64_t reclaim_cursor;
    bool cancelled;
    unsigned asked_for; /* so many times workers ask at the gate for the consumer, since it was slow to attach */
    bool consumer_waits;
    bool consumer_waits_for_turn; /* it need not be told when the head is ready, but when the turn is over */
    dlrs_epoch *next, *previous; /* circle of the pool's epochs, until cancelled */
    pthread_cond_t head_ready;   /* the head of the ring is ready, or the pool is stopping; the consumer waits */
};

struct dlrs_pool {
    dlrs_member member; /* see _process.h */

    /* Set once by dlrs_pool_new; any thread may read these without a lock. */
    dlrs_hooks hooks;
    unsigned num_processors;
    unsigned num_threads;
    bool exclusive;
    bool adaptive;
    bool enters_at_once;

    /* Written under `lock`, read anywhere. Set once, never cleared. */
    atomic_bool stopping;
    atomic_bool failed; /* a worker could not start its work; set, without `lock`, before `stopping` is */

    /* Written under `lock`; hints that may be read without it. */
    atomic_bool turn_is_over; /* a worker came back since one last claimed; see NOTE [ cheap runs ] */
    atomic_uint calls; /* changes when the worker that spins has something to claim */

    atomic_uint num_finished; /* runs, and pieces of runs; may wrap; workers add to it without `lock` */

    pthread_mutex_t lock;
    /* Guarded by `lock`. */
    dlrs_epoch *asked_first; /* any of the circle of epochs, the one to be asked first; NULL without epochs */
    unsigned parked;  /* workers that wait for `work_ready` */
    unsigned waking;  /* how many of them have been signalled; waking <= parked */
    unsigned awake;   /* workers that are */
    unsigned coming;  /* workers that found something to claim and are about to claim it */
    unsigned hungry;  /* consumers that are inside dlrs_epoch_wait */
    bool spinning;    /* one of the workers looks for a change of `calls` instead of waiting for `work_ready` */
    bool watched;     /* one of the workers that are parked looks whether anything gets finished */
    uint64_t process_busy_ns; /* how long processors had run the process when one last looked */
    unsigned extra;   /* workers that came beyond the limit, or are about to, since nothing got finished */
    dlrs_pace pace;
    dlrs_turns turns;
    uint64_t run_ns;          /* how long a run takes, a moving average; 0 before the first is done */
    uint64_t idle_ns;         /* how long nobody was awake, all in all, until somebody last came */
    uint64_t idle_since_ns;   /* while nobody is awake; else 0 */
    uint64_t last_report_ns;  /* in working_ns_locked */
    uint64_t head_start_until_ns; /* of the first worker that came; 0 before, and where it has none */
    uint64_t lingers_until_ns; /* see NOTE [ cheap runs ] */
    unsigned lingering;        /* workers that are parked until then */
    pthread_cond_t work_ready; /* a run can be claimed, or stopping; workers wait */

    dlrs_worker workers[]; /* num_threads of them */
};

/* ---- what several parts ask ---- */

static inline bool is_from_parent(const dlrs_pool *pool)
{
    return pool->member.generation != dlrs_process_generation();
}

static inline bool is_cheap_locked(const dlrs_pool *pool)
{
    return pool->run_ns > 0 && pool->run_ns < CHEAP_NS && !pool->turns.side_by_side;
}

/* The time as the pace has it, while somebody is awake: it stands still while nobody is. What was found out about the
 * work does not age between epochs, and short ones with long pauses do not begin with a trial each. */
static inline uint64_t working_ns_locked(const dlrs_pool *pool, uint64_t now_ns)
{
    return now_ns - pool->idle_ns;
}

/* Do workers and consumers take turns? See NOTE [ cheap runs ]. */
static inline bool takes_turns_locked(const dlrs_pool *pool)
{
    return pool->exclusive && pool->adaptive && is_cheap_locked(pool)
           && !dlrs_pace_is_stalled(&pool->pace, pool->last_report_ns);
}

/* How many workers may be awake. */
static inline unsigned limit_locked(const dlrs_pool *pool)
{
    return takes_turns_locked(pool) ? 1 : pool->pace.limit;
}

/* May one more come? */
static inline bool may_come_locked(const dlrs_pool *pool)
{
    return pool->awake < limit_locked(pool) + pool->extra;
}

/* Threads that run in parallel are what looking for each other is for. */
static inline bool may_spin_locked(const dlrs_pool *pool)
{
    return pool->num_processors > limit_locked(pool);
}

static inline bool is_worth_spinning(uint64_t waited_ns, uint64_t spin_ns)
{
    return waited_ns < spin_ns * WORTH_SPINNING;
}

/* ---- _claim.c ---- */

/* Begin to ask the epoch for runs, after all others; and ask it no more. */
void dlrs_circle_add_locked(dlrs_pool *pool, dlrs_epoch *epoch);
void dlrs_circle_remove_locked(dlrs_pool *pool, dlrs_epoch *epoch);

/* No further item of the batch is to be started: its last one is, or one failed. */
void dlrs_unstarted_remove_locked(dlrs_epoch *epoch, const dlrs_slot *slot);

/* An item of the batch was started or finished, which was not ending before: if it is now, it no longer counts. */
void dlrs_slot_may_be_ending_locked(dlrs_epoch *epoch, const dlrs_slot *slot);

/* Could a worker claim a run of any epoch? */
bool dlrs_claimable_locked(const dlrs_pool *pool);

/* Claim a run for the worker, and wake another worker if there is more. False if there is no run. */
bool dlrs_claim_locked(dlrs_worker *worker, dlrs_run *run);

/* Called whenever something may have become claimable, and by each worker that comes. A worker that comes decides for
 * itself whether it may claim. */
void dlrs_wake_workers_locked(dlrs_pool *pool);

/* Wake one parked worker, if there is one that is not on its way already. */
void dlrs_signal_worker_locked(dlrs_pool *pool);

/* ---- _epoch.c ---- */

/* The slot is DONE or LOST now. */
void dlrs_slot_became_ready_locked(dlrs_epoch *epoch, dlrs_slot *slot);

/* Tell the consumers whose heads are ready, of which some may not have been told when they became so. */
void dlrs_tell_consumers_locked(dlrs_pool *pool);

/* ---- _worker.c ---- */

/* Start all threads, or return the error of the first that could not be started. */
int dlrs_pool_start_threads(dlrs_pool *pool, size_t stack_size);

/* ---- _pool.c ---- */

/* Drop the reference of a worker, or of the owner. The last one frees the pool. */
void dlrs_pool_drop_reference(dlrs_pool *pool, bool is_worker);

#endif
