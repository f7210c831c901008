/* The worker pool. See _pool.h for what it promises.
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
 * nothing. The pace (_pace.h) says how many may be; the others stay parked though there is work. Items may wait for
 * each other, so one of those who stay watches, and when nothing gets finished for STALL_NS lets all of them go. Where
 * items compute meanwhile they are more likely just long: it waits for as long as a run takes, LONG_STALL_NS at most, and
 * then lets one more go, and if that is in vain as many more as have gone. A watch never takes longer than that, whoever
 * is awake.
 *
 * NOTE [ cheap runs ] Where only one thread can be attached at a time, workers and the consumer take turns, and a turn
 * costs more than a cheap run. So for as long as runs are cheap a turn is made long: one worker fills the whole window
 * before the consumer comes back in, and it begins to fill again when the consumer has emptied the window and waits,
 * or has stayed away for LINGER_NS. Whoever waits meanwhile looks for the other for a few microseconds before it
 * parks.
 *
 * Two locks, taken in this order: that of the process (_process.c), then the lock of a pool. The first guards what is
 * counted and listed about all pools and is used when threads start and end; the second guards the work of one pool. */
#include "_platform.h"

#include "_pool.h"

#include <assert.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "_gate.h"
#include "_numbers.h"
#include "_pace.h"
#include "_process.h"
#include "_stopwatch.h"

enum {
    /* How long one looks for what one waits for before one parks: about what parking and being woken costs; longer
     * where runs are known to be cheap. Not at all if it took much longer the last times. */
    SPIN_NS = 5000,
    SPIN_CHEAP_NS = 100000,
    WORTH_SPINNING = 2,

    CHEAP_NS = 20000,     /* a run that takes less is cheap; about what two turns cost */
    LOOK_MOST_NS = 1200000, /* how long a turn may take; a consumer looks a few times until then whether it goes on */
    PATIENCE_NS = 300000, /* how long a consumer whose batch is ready lets a worker go on with cheap runs */
    LINGER_NS = 1000000,  /* how long a worker leaves room for cheap runs alone if no consumer waits */
    STALL_NS = 5000000,   /* nothing finished for so long may mean that items wait for each other */
    COMPUTING_NS = 1000000, /* or that they take long, if those who are awake computed for so much of it */
    LONG_STALL_NS = 50000000,

    TELL_NS = 2000000, /* a worker tells every so often how busy it is */

    LOOK_NS = 200000,  /* at the gate: twice a piece of a run (_stopwatch.c) */
    LOOKS_IN_VAIN = 4, /* at the gate: after so many, every LOOK_AGAIN-th time only */
    LOOK_AGAIN = 64,

    SLOW_NS = 300000, /* who took longer to attach is asked for so many times: */
    ASKED_FOR = 16,
    SLOW_WAITING_NS = 1000000, /* the same where workers mostly wait, and may all come at once */
};

struct dlrs_worker {
    /* Set once before the thread starts. */
    dlrs_pool *pool;
    unsigned index;
    sigset_t work_signals; /* signals blocked while it works: what its maker had blocked */
    char name[40];

    /* The worker's own. */
    pthread_t thread;        /* read by others, under `pool->lock`, while it is awake */
    void *thread_context;    /* what the `enter` hook returned */
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
    uint64_t in_progress;       /* slots that are OPEN; at most batches_in_parallel */
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
    uint64_t run_ns;          /* how long a run takes, a moving average; 0 before the first is done */
    uint64_t last_report_ns;
    uint64_t lingers_until_ns; /* see NOTE [ cheap runs ] */
    unsigned lingering;        /* workers that are parked until then */
    pthread_cond_t work_ready; /* a run can be claimed, or stopping; workers wait */

    dlrs_worker workers[]; /* num_threads of them */
};

static bool is_from_parent(const dlrs_pool *pool)
{
    return pool->member.generation != dlrs_process_generation();
}

/* ---- the circle of epochs ---- */

static void circle_add_locked(dlrs_pool *pool, dlrs_epoch *epoch)
{
    if (pool->asked_first == NULL) {
        pool->asked_first = epoch->next = epoch->previous = epoch;
        return;
    }
    epoch->next = pool->asked_first;
    epoch->previous = pool->asked_first->previous;
    epoch->previous->next = epoch;
    epoch->next->previous = epoch;
}

static void circle_remove_locked(dlrs_pool *pool, dlrs_epoch *epoch)
{
    if (epoch->next == epoch) {
        pool->asked_first = NULL;
    } else {
        epoch->previous->next = epoch->next;
        epoch->next->previous = epoch->previous;
        if (pool->asked_first == epoch)
            pool->asked_first = epoch->next;
    }
    epoch->next = epoch->previous = NULL;
}

/* ---- claiming ---- */

static void unstarted_append(dlrs_epoch *epoch, dlrs_slot *slot)
{
    dlrs_slot **link = &epoch->first_unstarted;
    while (*link != NULL)
        link = &(*link)->next_unstarted;
    slot->next_unstarted = NULL;
    *link = slot;
}

static void unstarted_remove(dlrs_epoch *epoch, const dlrs_slot *slot)
{
    for (dlrs_slot **link = &epoch->first_unstarted; *link != NULL; link = &(*link)->next_unstarted) {
        if (*link == slot) {
            *link = slot->next_unstarted;
            return;
        }
    }
}

/* The oldest batch in progress that may start one more item now, or NULL. */
static dlrs_slot *startable_locked(const dlrs_epoch *epoch)
{
    for (dlrs_slot *slot = epoch->first_unstarted; slot != NULL; slot = slot->next_unstarted) {
        if (dlrs_slot_can_start(slot, epoch->items_in_parallel))
            return slot;
    }
    return NULL;
}

/* May a batch be opened beside those of the epoch that this one comes after? */
static bool can_open_after_locked(const dlrs_epoch *epoch)
{
    const dlrs_epoch *earlier = epoch->after;
    return earlier->all_offered && earlier->ring.claimed == earlier->batches_offered
           && epoch->in_progress + earlier->in_progress < epoch->batches_in_parallel
           && dlrs_ring_has_room_beside(&epoch->ring, &earlier->ring);
}

static bool can_open_locked(const dlrs_epoch *epoch)
{
    return epoch->in_progress < epoch->batches_in_parallel && epoch->ring.claimed < epoch->batches_offered
           && dlrs_ring_has_room(&epoch->ring)
           && (epoch->num_lanes == 0 || !epoch->lane_is_busy[epoch->ring.claimed % epoch->num_lanes])
           && (epoch->after == NULL || can_open_after_locked(epoch));
}

/* Items of the next batch. */
static uint64_t next_size_locked(const dlrs_epoch *epoch)
{
    if (epoch->batch_size == 0)
        return epoch->sizes[epoch->ring.claimed % epoch->sizes_size];
    return dlrs_min_u64(epoch->batch_size, epoch->items_offered - epoch->ring.claimed * epoch->batch_size);
}

static bool is_cheap_locked(const dlrs_pool *pool)
{
    return pool->run_ns > 0 && pool->run_ns < CHEAP_NS;
}

/* Do workers and consumers take turns? See NOTE [ cheap runs ]. */
static bool takes_turns_locked(const dlrs_pool *pool)
{
    return pool->exclusive && pool->adaptive && is_cheap_locked(pool)
           && !dlrs_pace_is_stalled(&pool->pace, pool->last_report_ns);
}

/* How many workers may be awake. Without reports, as in a pool that is not adaptive, the pace lets all be. */
static unsigned limit_locked(const dlrs_pool *pool)
{
    return takes_turns_locked(pool) ? 1 : pool->pace.limit;
}

/* May one more come? */
static bool may_come_locked(const dlrs_pool *pool)
{
    return pool->awake < limit_locked(pool) + pool->extra;
}

static bool is_ready(const dlrs_epoch *epoch)
{
    return atomic_load_explicit(&epoch->head_is_ready, memory_order_acquire);
}

/* Do workers mostly wait, for a disk or a network? Then the interpreter is free, and all would stand aside at once. */
static bool are_waiting_locked(const dlrs_pool *pool)
{
    return !takes_turns_locked(pool) && dlrs_pace_is_waiting(&pool->pace);
}

/* Ask at the gate, until dlrs_epoch_attached. */
static void begin_to_ask(dlrs_epoch *epoch)
{
    epoch->asks_gate = true;
    dlrs_gate_ask();
}

/* Ask at the gate for a consumer whose batch has just become ready. By the time that it runs, who made it ready would be
 * in the next item; which matters only if items keep it from attaching, and costs what the worker could do meanwhile. */
static void ask_for_consumer_locked(dlrs_epoch *epoch)
{
    if (epoch->asked_for == 0 || epoch->asks_gate || takes_turns_locked(epoch->pool))
        return;
    epoch->asked_for--;
    begin_to_ask(epoch);
}

static void head_changed_locked(dlrs_epoch *epoch)
{
    bool ready = dlrs_ring_head_ready(&epoch->ring);
    if (ready != atomic_load_explicit(&epoch->head_is_ready, memory_order_relaxed))
        atomic_store_explicit(&epoch->head_is_ready, ready, memory_order_release);
    if (!ready || !epoch->consumer_waits || (epoch->consumer_waits_for_turn && takes_turns_locked(epoch->pool)))
        return;
    ask_for_consumer_locked(epoch);
    pthread_cond_signal(&epoch->head_ready);
}

/* The slot is DONE or LOST now. */
static void slot_is_ready_locked(dlrs_epoch *epoch, dlrs_slot *slot)
{
    if (epoch->unordered)
        dlrs_ring_promote(&epoch->ring, slot);
    if (slot->place == epoch->ring.taken)
        head_changed_locked(epoch);
}

/* Tell the consumers whose heads are ready, of which some may not have been told when they became so. */
static void tell_consumers_locked(dlrs_pool *pool)
{
    dlrs_epoch *epoch = pool->asked_first;
    if (epoch == NULL)
        return;
    do {
        if (epoch->consumer_waits && is_ready(epoch))
            pthread_cond_signal(&epoch->head_ready);
        epoch = epoch->next;
    } while (epoch != pool->asked_first);
}

/* Are the items of a batch of `num_items` claimed one by one? A batch without items is nobody's last item. */
static bool is_fetched_singly(const dlrs_epoch *epoch, uint64_t num_items)
{
    return epoch->items_in_parallel > 1 && num_items > 0;
}

/* Open the next batch, or NULL if there is none to open. Batches that are lost on the way are left in their places. */
static dlrs_slot *open_batch_locked(dlrs_epoch *epoch)
{
    while (can_open_locked(epoch)) {
        uint64_t num_items = next_size_locked(epoch);
        bool singly = is_fetched_singly(epoch, num_items);
        dlrs_slot *slot = dlrs_ring_claim(&epoch->ring, num_items, singly);
        if (slot == NULL)
            return NULL;
        if (slot->state == DLRS_SLOT_LOST) {
            slot_is_ready_locked(epoch, slot);
            continue;
        }
        epoch->in_progress++;
        if (epoch->num_lanes > 0)
            epoch->lane_is_busy[slot->batch % epoch->num_lanes] = true;
        if (singly)
            unstarted_append(epoch, slot);
        return slot;
    }
    return NULL;
}

static bool claim_of_epoch_locked(dlrs_epoch *epoch, dlrs_run *run)
{
    dlrs_slot *slot = startable_locked(epoch);
    if (slot == NULL)
        slot = open_batch_locked(epoch);
    if (slot == NULL)
        return false;
    bool singly = is_fetched_singly(epoch, slot->num_items);
    run->epoch = epoch;
    run->user = epoch->user;
    run->slot = slot;
    run->batch = slot->batch;
    run->position = slot->started;
    run->num_items = singly ? 1 : slot->num_items;
    run->batch_items = slot->num_items;
    run->singly = singly;
    slot->started += run->num_items;
    if (singly && slot->started == slot->num_items)
        unstarted_remove(epoch, slot);
    epoch->holds++;
    return true;
}

/* How many workers could claim a run of the epoch at once, as far as that is told easily; 0 if none could. */
static uint64_t claimable_runs_of_locked(const dlrs_epoch *epoch)
{
    uint64_t runs = 0;
    for (const dlrs_slot *slot = epoch->first_unstarted; slot != NULL; slot = slot->next_unstarted) {
        if (dlrs_slot_can_start(slot, epoch->items_in_parallel))
            runs += dlrs_min_u64(epoch->items_in_parallel - (slot->started - slot->finished),
                                 slot->num_items - slot->started);
    }
    if (can_open_locked(epoch)) {
        uint64_t num_items = next_size_locked(epoch);
        runs += is_fetched_singly(epoch, num_items) ? dlrs_min_u64(epoch->items_in_parallel, num_items) : 1;
    }
    return runs;
}

/* Could more than `few` workers claim a run of any epoch? */
static bool more_could_claim_locked(const dlrs_pool *pool, uint64_t few)
{
    uint64_t runs = 0;
    const dlrs_epoch *epoch = pool->asked_first;
    if (epoch == NULL || atomic_load_explicit(&pool->stopping, memory_order_relaxed))
        return false;
    do {
        runs += claimable_runs_of_locked(epoch);
        epoch = epoch->next;
    } while (runs <= few && epoch != pool->asked_first);
    return runs > few;
}

static bool claimable_locked(const dlrs_pool *pool)
{
    return more_could_claim_locked(pool, 0);
}

/* Is a worker that could claim to leave it for a while? */
static bool lingers_locked(const dlrs_pool *pool)
{
    return takes_turns_locked(pool) && pool->hungry == 0 && dlrs_now_ns() < pool->lingers_until_ns;
}

static void signal_worker_locked(dlrs_pool *pool)
{
    if (pool->parked > pool->waking) {
        pool->waking++;
        pthread_cond_signal(&pool->work_ready);
    }
}

/* Called whenever something may have become claimable, and by each worker that comes. A worker that comes decides for
 * itself whether it may claim. */
static void wake_workers_locked(dlrs_pool *pool)
{
    if (!pool->spinning && pool->parked <= pool->waking)
        return;
    if (pool->coming == 0 && claimable_locked(pool)) {
        if (!may_come_locked(pool)) {
            if (!pool->watched)
                signal_worker_locked(pool);
        } else if (pool->spinning) {
            atomic_fetch_add_explicit(&pool->calls, 1, memory_order_release);
        } else {
            signal_worker_locked(pool);
        }
    }
    if (pool->run_ns >= CHEAP_NS && pool->awake + pool->waking < limit_locked(pool) + pool->extra
        && more_could_claim_locked(pool, pool->coming + pool->waking))
        signal_worker_locked(pool);
}

static bool claim_locked(dlrs_worker *worker, dlrs_run *run)
{
    dlrs_pool *pool = worker->pool;
    dlrs_epoch *first = pool->asked_first, *epoch = first;
    worker->at.epoch = NULL;
    if (epoch == NULL || atomic_load_explicit(&pool->stopping, memory_order_relaxed))
        return false;
    do {
        if (claim_of_epoch_locked(epoch, run)) {
            pool->asked_first = epoch->next;
            worker->at = *run;
            wake_workers_locked(pool);
            return true;
        }
        epoch = epoch->next;
    } while (epoch != first);
    return false;
}

/* ---- the worker ---- */

/* Block, on the calling thread, all signals that may as well go to another: those that a fault of its own raises must
 * be seen where they arise, and a sampling profiler counts the thread that it interrupts. */
static void block_signals(sigset_t *before)
{
    static const int kept[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++)
        sigdelset(&blocked, kept[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, before);
}

/* Threads that run in parallel are what looking for each other is for. */
static bool may_spin_locked(const dlrs_pool *pool)
{
    return pool->num_processors > limit_locked(pool);
}

static bool is_worth_spinning(uint64_t waited_ns, uint64_t spin_ns)
{
    return waited_ns < spin_ns * WORTH_SPINNING;
}

/* Look for a call for a few microseconds; one worker of a pool at a time does. */
static void spin_for_call_locked(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    unsigned seen = atomic_load_explicit(&pool->calls, memory_order_relaxed);
    bool called = false;
    pool->spinning = true;
    pthread_mutex_unlock(&pool->lock);
    uint64_t deadline = dlrs_now_ns() + SPIN_CHEAP_NS;
    do {
        for (int i = 0; i < 32 && !called; i++) {
            called = atomic_load_explicit(&pool->calls, memory_order_acquire) != seen;
            dlrs_relax();
        }
    } while (!called && dlrs_now_ns() < deadline);
    pthread_mutex_lock(&pool->lock);
    pool->spinning = false;
}

/* Wait for `work_ready`, until `deadline_ns` if that is not 0. Is the time over? */
static bool park_locked(dlrs_pool *pool, uint64_t deadline_ns, bool lingers)
{
    pool->parked++;
    pool->lingering += lingers;
    if (deadline_ns == 0)
        pthread_cond_wait(&pool->work_ready, &pool->lock);
    else
        dlrs_cond_wait_until(&pool->work_ready, &pool->lock, deadline_ns);
    pool->lingering -= lingers;
    pool->parked--;
    if (pool->waking > 0)
        pool->waking--;
    return deadline_ns != 0 && dlrs_now_ns() >= deadline_ns;
}

/* How long processors have run workers that were awake at the last call and still are, since then. Where only one
 * thread can be attached, that of all threads: the others may be waiting for one that is none of ours. */
static uint64_t computed_locked(dlrs_pool *pool)
{
    uint64_t computed_ns = 0;
    if (pool->exclusive) {
        uint64_t before_ns = pool->process_busy_ns;
        pool->process_busy_ns = dlrs_process_busy_ns();
        return pool->process_busy_ns - before_ns;
    }
    for (unsigned i = 0; i < pool->num_threads; i++) {
        dlrs_worker *worker = &pool->workers[i];
        uint64_t before_ns = worker->seen_busy_ns;
        worker->seen_busy_ns = worker->is_awake ? dlrs_busy_of_thread_ns(worker->thread) : 0;
        if (before_ns != 0 && worker->seen_busy_ns > before_ns)
            computed_ns += worker->seen_busy_ns - before_ns;
    }
    return computed_ns;
}

/* Items may be waiting for each other. */
static void let_all_go_locked(dlrs_pool *pool)
{
    pool->last_report_ns = dlrs_now_ns();
    dlrs_pace_stall(&pool->pace, pool->last_report_ns);
    pool->extra = 0;
    tell_consumers_locked(pool);
}

/* As many as have come beyond the limit come once more; one, if none have. */
static unsigned more_extra_locked(const dlrs_pool *pool)
{
    unsigned beyond = pool->awake > limit_locked(pool) ? pool->awake - limit_locked(pool) : 0;
    unsigned extra = beyond > pool->extra ? beyond : pool->extra;
    return extra > 0 ? 2 * extra : 1;
}

/* Stay parked until something gets finished by those who are awake, and else let others go. */
static void watch_locked(dlrs_pool *pool)
{
    unsigned seen = atomic_load_explicit(&pool->num_finished, memory_order_relaxed);
    uint64_t began_ns = dlrs_now_ns(), patience_ns = dlrs_min_u64(pool->run_ns, LONG_STALL_NS);
    bool in_vain, computes, is_early;
    computed_locked(pool);
    pool->watched = true;
    do {
        in_vain = park_locked(pool, dlrs_now_ns() + STALL_NS, false)
                  && seen == atomic_load_explicit(&pool->num_finished, memory_order_relaxed) && pool->awake > 0
                  && claimable_locked(pool);
        computes = computed_locked(pool) >= COMPUTING_NS;
        /* Those who are too many go at the end of their runs, if these end. */
        bool are_leaving = pool->awake > limit_locked(pool) + pool->extra;
        is_early = dlrs_now_ns() - began_ns < (are_leaving ? LONG_STALL_NS : patience_ns);
    } while (in_vain && computes && is_early);
    pool->watched = false;
    if (in_vain && computes)
        pool->extra = more_extra_locked(pool);
    else if (in_vain)
        let_all_go_locked(pool);
}

static void begin_turn_locked(dlrs_worker *worker)
{
    worker->is_awake = true;
    worker->pool->awake++;
    atomic_store_explicit(&worker->pool->turn_is_over, false, memory_order_relaxed);
}

static void end_turn_locked(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    if (!worker->is_awake)
        return;
    worker->is_awake = false;
    pool->awake--;
    pool->extra -= pool->extra > 0;
    atomic_store_explicit(&pool->turn_is_over, true, memory_order_release);
    if (takes_turns_locked(pool))
        pool->lingers_until_ns = dlrs_now_ns() + LINGER_NS;
    tell_consumers_locked(pool);
}

/* What the worker tells next, of how busy it is, begins now. */
static void tell_from(dlrs_worker *worker, uint64_t now_ns, uint64_t busy_ns)
{
    worker->told_ns = now_ns;
    worker->told_busy_ns = busy_ns;
}

/* Wait until there is something to claim, for which worker_claim is then called. False if the pool is stopping. */
static bool worker_wait(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    bool has_parked = false, has_spun = false, claims = false;
    uint64_t began_ns = 0;
    pthread_mutex_lock(&pool->lock);
    end_turn_locked(worker);
    while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
        bool claimable = claimable_locked(pool);
        bool is_one_too_many = !may_come_locked(pool);
        bool lingers = lingers_locked(pool);
        claims = claimable && !is_one_too_many && !lingers;
        if (claims)
            break;
        if (began_ns == 0)
            began_ns = dlrs_now_ns();
        if (!has_spun && !is_one_too_many && !pool->spinning && is_cheap_locked(pool) && may_spin_locked(pool)
            && is_worth_spinning(worker->waited_ns, SPIN_CHEAP_NS)) {
            has_spun = true;
            spin_for_call_locked(worker);
            continue;
        }
        if (!has_parked) {
            has_parked = true;
            block_signals(NULL);
        }
        lingers = lingers && !is_one_too_many && pool->lingering == 0; /* one is enough */
        if (is_one_too_many && claimable && !pool->watched)
            watch_locked(pool);
        else
            park_locked(pool, lingers ? pool->lingers_until_ns : 0, lingers);
    }
    if (claims) {
        if (began_ns != 0)
            worker->waited_ns = dlrs_averaged(worker->waited_ns, dlrs_now_ns() - began_ns);
        pool->coming++;
        begin_turn_locked(worker);
        wake_workers_locked(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    if (has_parked)
        pthread_sigmask(SIG_SETMASK, &worker->work_signals, NULL);
    /* From here on, so that waiting to be attached is part of it. */
    bool tells = pool->adaptive && (worker->watch.run_ns == 0 || worker->watch.run_ns >= CHEAP_NS);
    if (claims)
        tell_from(worker, tells ? dlrs_now_ns() : 0, tells ? dlrs_thread_busy_ns() : 0);
    return claims;
}

/* Claim what worker_wait found, if nobody else has meanwhile. */
static bool worker_claim(dlrs_worker *worker, dlrs_run *run)
{
    dlrs_pool *pool = worker->pool;
    dlrs_stopwatch_start(&worker->watch, dlrs_now_ns());
    pthread_mutex_lock(&pool->lock);
    pool->coming--;
    bool claimed = claim_locked(worker, run);
    pthread_mutex_unlock(&pool->lock);
    return claimed;
}

/* ---- reports of a worker: how long things take ---- */

/* Tell the pace now and then how busy the worker is. To find that out is a system call; who does cheap runs is busy. */
static void tell_busy_locked(dlrs_worker *worker, uint64_t now_ns)
{
    if (worker->watch.run_ns < CHEAP_NS || now_ns - worker->told_ns < TELL_NS)
        return;
    uint64_t busy_ns = dlrs_thread_busy_ns();
    if (worker->told_ns != 0)
        dlrs_pace_tell_busy(&worker->pool->pace, now_ns - worker->told_ns, busy_ns - worker->told_busy_ns, now_ns,
                            worker->pool->awake);
    tell_from(worker, now_ns, busy_ns);
}

/* Tell the pace of the runs that are finished and not timed yet. */
static void report_runs_locked(dlrs_worker *worker, uint64_t now_ns)
{
    dlrs_pool *pool = worker->pool;
    bool took_turns = takes_turns_locked(pool);
    pool->last_report_ns = now_ns;
    dlrs_stopwatch_time(&worker->watch, now_ns);
    pool->run_ns = dlrs_averaged(pool->run_ns, worker->watch.run_ns);
    if (takes_turns_locked(pool) || (pool->extra > 0 && pool->awake > limit_locked(pool))) {
        /* It is not the limit that says how many workers are awake: there is nothing to compare. */
        dlrs_pace_disturb(&pool->pace, now_ns);
        worker->told_ns = 0;
    } else if (pool->adaptive) {
        tell_busy_locked(worker, now_ns);
        dlrs_pace_report(&pool->pace, &worker->pace, worker->watch.items, now_ns - worker->watch.began_ns, now_ns,
                         pool->awake);
    }
    dlrs_stopwatch_begin(&worker->watch, now_ns);
    if (took_turns && !takes_turns_locked(pool))
        tell_consumers_locked(pool);
}

void dlrs_worker_let_consumers_pass(dlrs_worker *worker)
{
    const dlrs_hooks *hooks = &worker->pool->hooks;
    if (!worker->pool->exclusive || !dlrs_gate_is_asked() || is_from_parent(worker->pool))
        return;
    uint64_t began = dlrs_now_ns();
    hooks->detach(worker->thread_context);
    dlrs_gate_stand_aside(worker->pool->num_processors > 1);
    hooks->attach(worker->thread_context);
    dlrs_stopwatch_skip(&worker->watch, dlrs_now_ns() - began);
}

uint64_t dlrs_worker_piece(dlrs_worker *worker, uint64_t finished, uint64_t left)
{
    dlrs_pool *pool = worker->pool;
    if (is_from_parent(pool))
        return left;
    if (finished > 0) {
        dlrs_stopwatch_time_piece(&worker->watch, finished, dlrs_now_ns());
        atomic_fetch_add_explicit(&pool->num_finished, 1, memory_order_relaxed);
    }
    uint64_t piece = dlrs_stopwatch_piece(&worker->watch, left);
    if (finished == 0 && piece < left)
        dlrs_stopwatch_begin_piece(&worker->watch, dlrs_now_ns());
    return piece;
}

static void stop_locked(dlrs_pool *pool)
{
    atomic_store(&pool->stopping, true);
    pthread_cond_broadcast(&pool->work_ready);
    dlrs_epoch *epoch = pool->asked_first;
    if (epoch == NULL)
        return;
    do {
        pthread_cond_signal(&epoch->head_ready);
        epoch = epoch->next;
    } while (epoch != pool->asked_first);
}

static void pool_free(dlrs_pool *pool)
{
    assert(pool->asked_first == NULL);
    pthread_cond_destroy(&pool->work_ready);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static void drop_reference(dlrs_pool *pool, bool is_worker)
{
    if (dlrs_member_drop(&pool->member, is_worker))
        pool_free(pool);
}

static void *worker_main(void *argument)
{
    dlrs_worker *worker = argument;
    dlrs_pool *pool = worker->pool;
    dlrs_run run;

    worker->thread = pthread_self();
    dlrs_name_thread(worker->name);
    /* The thread was born with signals blocked. They are let in while it works, because child processes that the
     * work starts inherit the mask, and blocked again while it is parked and when it is about to end. */
    pthread_sigmask(SIG_SETMASK, &worker->work_signals, NULL);
    void *thread_context = worker->thread_context = pool->hooks.enter(pool->hooks.context, worker);
    if (thread_context == NULL) {
        atomic_store(&pool->failed, true);
        dlrs_pool_stop(pool);
    } else {
        while (worker_wait(worker)) {
            if (pool->exclusive)
                dlrs_gate_stand_aside(pool->num_processors > 1);
            if (pool->hooks.attach != NULL)
                pool->hooks.attach(thread_context);
            if (worker_claim(worker, &run))
                pool->hooks.work(thread_context, worker, &run);
            if (pool->hooks.detach != NULL)
                pool->hooks.detach(thread_context);
            if (is_from_parent(pool))
                return NULL;
        }
        pool->hooks.leave(thread_context, worker);
        if (is_from_parent(pool))
            return NULL;
        block_signals(NULL);
    }
    drop_reference(pool, true);
    return NULL;
}

unsigned dlrs_worker_index(const dlrs_worker *worker)
{
    return worker->index;
}

uint64_t dlrs_worker_pool_id(const dlrs_worker *worker)
{
    return worker->pool->member.id;
}

const char *dlrs_worker_name(const dlrs_worker *worker)
{
    return worker->name;
}

void dlrs_worker_leave_lane(dlrs_worker *worker, const dlrs_run *run, bool ended, bool all_ended)
{
    dlrs_epoch *epoch = run->epoch;
    dlrs_pool *pool = worker->pool;
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    epoch->lane_is_busy[run->batch % epoch->num_lanes] = false;
    epoch->lanes_ended += ended;
    if (all_ended || epoch->lanes_ended == epoch->num_lanes)
        epoch->batches_offered = epoch->ring.claimed;
    wake_workers_locked(pool);
    pthread_mutex_unlock(&pool->lock);
}

bool dlrs_worker_finish_item(const dlrs_run *run, void *result, bool failed)
{
    dlrs_epoch *epoch = run->epoch;
    dlrs_pool *pool = epoch->pool;
    assert(run->singly && result != NULL);
    if (is_from_parent(pool))
        return false;
    pthread_mutex_lock(&pool->lock);
    if (failed)
        unstarted_remove(epoch, run->slot);
    bool last = dlrs_slot_finish(run->slot, run->position, result, failed);
    pthread_mutex_unlock(&pool->lock);
    return last;
}

bool dlrs_run_is_wanted(const dlrs_run *run)
{
    dlrs_pool *pool = run->epoch->pool;
    if (is_from_parent(pool))
        return false;
    pthread_mutex_lock(&pool->lock);
    bool wanted = !run->epoch->cancelled;
    pthread_mutex_unlock(&pool->lock);
    return wanted;
}

bool dlrs_worker_next(dlrs_worker *worker, dlrs_run *run, void *outcome, void **unwanted, dlrs_epoch **orphan)
{
    dlrs_pool *pool = worker->pool;
    dlrs_epoch *left = run->epoch;
    *unwanted = NULL;
    *orphan = NULL;
    if (is_from_parent(pool))
        return false;
    uint64_t now = dlrs_stopwatch_count(&worker->watch, run->num_items) ? dlrs_now_ns() : 0;
    atomic_fetch_add_explicit(&pool->num_finished, 1, memory_order_relaxed);
    pthread_mutex_lock(&pool->lock);
    if (now != 0)
        report_runs_locked(worker, now);
    if (outcome != NULL) {
        left->in_progress--;
        run->slot->state = DLRS_SLOT_DONE;
        if (left->cancelled) {
            run->slot->outcome = NULL;
            *unwanted = outcome;
        } else {
            run->slot->outcome = outcome;
            slot_is_ready_locked(left, run->slot);
        }
    }
    worker->at.epoch = NULL;
    bool claimed = pool->awake <= limit_locked(pool) && claim_locked(worker, run);
    if (--left->holds == 0)
        *orphan = left;
    pthread_mutex_unlock(&pool->lock);
    return claimed;
}

/* ---- the owner ---- */

static void stop_member(dlrs_member *member)
{
    dlrs_pool_stop((dlrs_pool *)((char *)member - offsetof(dlrs_pool, member)));
}

/* Start all threads, or return the error of the first that could not be started. */
static int start_threads(dlrs_pool *pool, size_t stack_size)
{
    pthread_attr_t attributes;
    sigset_t before;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    error = pthread_attr_setstacksize(&attributes, (stack_size + page - 1) / page * page);
    if (error != 0)
        goto done;

    block_signals(&before);
    for (unsigned i = 0; i < pool->num_threads && error == 0; i++) {
        dlrs_worker *worker = &pool->workers[i];
        pthread_t thread;
        worker->pool = pool;
        worker->index = i;
        worker->work_signals = before;
        snprintf(worker->name, sizeof worker->name, "dlrs-%llu-%u", (unsigned long long)pool->member.id, i);
        /* A process that began to exit meanwhile stopped the pools that were on its list then. */
        if (!dlrs_member_add_thread(&pool->member))
            dlrs_pool_stop(pool);
        error = pthread_create(&thread, &attributes, worker_main, worker);
        if (error != 0)
            drop_reference(pool, true);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
done:
    pthread_attr_destroy(&attributes);
    return error;
}

dlrs_status dlrs_pool_new(const dlrs_pool_options *options, dlrs_pool **made, int *os_error)
{
    assert(options->num_threads > 0);
    dlrs_status status = DLRS_NO_MEMORY;
    dlrs_pool *pool = calloc(1, sizeof *pool + options->num_threads * sizeof pool->workers[0]);
    if (pool == NULL)
        return status;
    if (dlrs_mutex_init(&pool->lock) != 0)
        goto no_lock;
    if (dlrs_cond_init(&pool->work_ready) != 0)
        goto no_condition;
    pool->member.stop = stop_member;
    status = dlrs_member_register(&pool->member);
    if (status != DLRS_OK)
        goto not_registered;
    pool->hooks = options->hooks;
    pool->num_threads = options->num_threads;
    pool->turn_is_over = true;
    pool->num_processors = dlrs_usable_processors();
    pool->exclusive = options->exclusive;
    pool->adaptive = options->adaptive;
    dlrs_pace_init(&pool->pace, options->num_threads, pool->num_processors, options->exclusive);

    *made = pool;
    *os_error = start_threads(pool, options->stack_size);
    if (*os_error == 0)
        return DLRS_OK;
    dlrs_pool_stop(pool);
    return DLRS_NO_THREAD;

not_registered:
    pthread_cond_destroy(&pool->work_ready);
no_condition:
    pthread_mutex_destroy(&pool->lock);
no_lock:
    free(pool);
    return status;
}

uint64_t dlrs_pool_id(const dlrs_pool *pool)
{
    return pool->member.id;
}

bool dlrs_pool_is_usable(dlrs_pool *pool)
{
    return !is_from_parent(pool) && !atomic_load(&pool->stopping);
}

void dlrs_pool_stop(dlrs_pool *pool)
{
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    stop_locked(pool);
    pthread_mutex_unlock(&pool->lock);
}

bool dlrs_pool_wait(dlrs_pool *pool, uint64_t timeout_ns)
{
    return is_from_parent(pool) || dlrs_member_wait(&pool->member, timeout_ns);
}

void dlrs_pool_release(dlrs_pool *pool)
{
    if (is_from_parent(pool))
        return;
    dlrs_pool_stop(pool);
    drop_reference(pool, false);
}

/* ---- the consumer ---- */

dlrs_status dlrs_epoch_new(dlrs_pool *pool, const dlrs_epoch_options *options, void *user, dlrs_epoch **made)
{
    assert(options->batches_in_parallel > 0 && options->items_in_parallel > 0);
    assert(options->num_lanes == 0 || options->batch_size > 0);
    if (is_from_parent(pool))
        return DLRS_FORKED;
    dlrs_epoch *epoch = calloc(1, sizeof *epoch);
    if (epoch == NULL)
        return DLRS_NO_MEMORY;
    if (options->num_lanes > 0) {
        epoch->lane_is_busy = calloc(options->num_lanes, sizeof epoch->lane_is_busy[0]);
        if (epoch->lane_is_busy == NULL)
            goto no_lanes;
    }
    if (!dlrs_ring_init(&epoch->ring, options->capacity))
        goto no_ring;
    if (dlrs_cond_init(&epoch->head_ready) != 0)
        goto no_condition;
    epoch->pool = pool;
    epoch->user = user;
    epoch->batch_size = options->batch_size;
    epoch->batches_in_parallel = options->batches_in_parallel;
    epoch->items_in_parallel = options->items_in_parallel;
    epoch->num_lanes = options->num_lanes;
    epoch->unordered = options->unordered;
    epoch->look_again_ns = PATIENCE_NS;
    epoch->holds = 1;
    pthread_mutex_lock(&pool->lock);
    epoch->after = options->after;
    if (options->after != NULL) {
        assert(options->after->pool == pool && !options->after->cancelled && options->after->before == NULL);
        options->after->before = epoch;
    }
    circle_add_locked(pool, epoch);
    dlrs_pace_disturb(&pool->pace, pool->last_report_ns);
    pthread_mutex_unlock(&pool->lock);
    *made = epoch;
    return DLRS_OK;

no_condition:
    dlrs_ring_free(&epoch->ring);
no_ring:
    free(epoch->lane_is_busy);
no_lanes:
    free(epoch);
    return DLRS_NO_MEMORY;
}

static void offered_locked(dlrs_epoch *epoch)
{
    if (epoch->ring.claimed == 0)
        epoch->pool->lingers_until_ns = 0; /* the first batches of an epoch are always fetched ahead */
    wake_workers_locked(epoch->pool);
}

void dlrs_epoch_offer(dlrs_epoch *epoch, uint64_t num_items, bool last)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    assert(epoch->batch_size > 0 || num_items == 0);
    epoch->items_offered += num_items;
    if (epoch->batch_size > 0) {
        epoch->batches_offered = epoch->items_offered / epoch->batch_size;
        epoch->batches_offered += last && epoch->items_offered % epoch->batch_size != 0;
    }
    epoch->all_offered = last;
    offered_locked(epoch);
    pthread_mutex_unlock(&pool->lock);
}

/* Make room for the size of one more batch. */
static bool grow_sizes_locked(dlrs_epoch *epoch)
{
    uint64_t used = epoch->batches_offered - epoch->ring.claimed;
    if (used < epoch->sizes_size)
        return true;
    uint64_t larger = epoch->sizes_size == 0 ? 4 : epoch->sizes_size * 2;
    if (larger > SIZE_MAX / sizeof epoch->sizes[0])
        return false;
    uint64_t *sizes = malloc((size_t)larger * sizeof sizes[0]);
    if (sizes == NULL)
        return false;
    for (uint64_t n = epoch->ring.claimed; n < epoch->batches_offered; n++)
        sizes[n % larger] = epoch->sizes[n % epoch->sizes_size];
    free(epoch->sizes);
    epoch->sizes = sizes;
    epoch->sizes_size = larger;
    return true;
}

dlrs_status dlrs_epoch_offer_batch(dlrs_epoch *epoch, uint64_t num_items)
{
    dlrs_pool *pool = epoch->pool;
    assert(epoch->batch_size == 0);
    if (is_from_parent(pool))
        return DLRS_FORKED;
    pthread_mutex_lock(&pool->lock);
    dlrs_status status = grow_sizes_locked(epoch) ? DLRS_OK : DLRS_NO_MEMORY;
    if (status == DLRS_OK) {
        epoch->sizes[epoch->batches_offered++ % epoch->sizes_size] = num_items;
        offered_locked(epoch);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* What keeps a pool from going on, or DLRS_OK. */
static dlrs_status pool_status(dlrs_pool *pool)
{
    if (!atomic_load_explicit(&pool->stopping, memory_order_acquire))
        return DLRS_OK;
    return atomic_load(&pool->failed) ? DLRS_NO_WORKER : DLRS_STOPPED;
}

/* Is there no room, neither for a batch of this epoch nor for one of the epoch that comes after it? */
static bool is_full_locked(const dlrs_epoch *epoch)
{
    return epoch->before == NULL ? !dlrs_ring_has_room(&epoch->ring)
                                 : !dlrs_ring_has_room_beside(&epoch->before->ring, &epoch->ring);
}

dlrs_status dlrs_epoch_take(dlrs_epoch *epoch, void **outcome, uint64_t *batch)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return DLRS_FORKED;
    dlrs_status status = pool_status(pool);
    if (status != DLRS_OK)
        return status;
    if (!atomic_load_explicit(&epoch->head_is_ready, memory_order_acquire))
        return DLRS_NOT_READY;
    pthread_mutex_lock(&pool->lock);
    const dlrs_slot *head = dlrs_ring_head(&epoch->ring);
    if (head->state == DLRS_SLOT_LOST)
        status = DLRS_LOST;
    else
        *outcome = head->outcome;
    *batch = head->batch;
    bool was_full = is_full_locked(epoch);
    dlrs_ring_release_head(&epoch->ring);
    head_changed_locked(epoch);
    if (!takes_turns_locked(pool) || pool->awake > 0) {
        wake_workers_locked(pool);
    } else if (was_full && !pool->spinning && pool->lingering == 0) {
        pool->lingers_until_ns = dlrs_now_ns() + LINGER_NS;
        signal_worker_locked(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* Look for the head for a few microseconds, which is cheaper than being woken if it comes by then; with `turn`, for the
 * head and the end of the workers' turn. */
static void spin_for_head(dlrs_epoch *epoch, bool turn, uint64_t deadline)
{
    dlrs_pool *pool = epoch->pool;
    bool found = false;
    do {
        for (int i = 0; i < 32 && !found; i++) {
            found = is_ready(epoch) && (!turn || atomic_load_explicit(&pool->turn_is_over, memory_order_acquire));
            dlrs_relax();
        }
    } while (!found && dlrs_now_ns() < deadline);
}

static bool is_over_locked(const dlrs_epoch *epoch)
{
    return epoch->num_lanes > 0 && epoch->ring.taken == epoch->batches_offered;
}

/* Wait until the head is ready and the workers' turn is over, or the pool stops, or time is up. */
static void wait_for_head_locked(dlrs_epoch *epoch, uint64_t deadline_ns)
{
    dlrs_pool *pool = epoch->pool;
    uint64_t patient_until_ns = 0;
    while (pool_status(pool) == DLRS_OK && !is_over_locked(epoch)) {
        uint64_t now_ns = dlrs_now_ns(), until_ns = deadline_ns;
        bool turn = takes_turns_locked(pool);
        if (is_ready(epoch)) {
            if (!turn || epoch->asks_gate || atomic_load_explicit(&pool->turn_is_over, memory_order_relaxed))
                return;
            if (patient_until_ns == 0)
                patient_until_ns = now_ns + PATIENCE_NS;
            until_ns = patient_until_ns;
        } else if (turn && epoch->look_again_ns <= LOOK_MOST_NS) {
            until_ns = dlrs_min_u64(deadline_ns, now_ns + epoch->look_again_ns);
            epoch->look_again_ns *= 2;
        } else {
            turn = false; /* this run is not cheap, whatever the others were: do not wait for it to be over */
        }
        if (now_ns >= deadline_ns || (is_ready(epoch) && now_ns >= until_ns))
            return;
        epoch->consumer_waits = true;
        epoch->consumer_waits_for_turn = turn;
        dlrs_cond_wait_until(&epoch->head_ready, &pool->lock, until_ns);
        epoch->consumer_waits = false;
    }
}

static void part_from_earlier_locked(dlrs_epoch *epoch)
{
    if (epoch->after != NULL)
        epoch->after->before = NULL;
    epoch->after = NULL;
}

/* Ask to be let in, and if workers are busy look whether one stands aside: rarely so where their items leave the GIL to
 * others anyway, and then not each time. */
static void ask_at_gate(dlrs_epoch *epoch, bool busy)
{
    if (!epoch->asks_gate)
        begin_to_ask(epoch);
    if (!busy || epoch->pool->num_processors == 1)
        return;
    bool looks = epoch->looks_in_vain < LOOKS_IN_VAIN || epoch->looks_in_vain % LOOK_AGAIN == 0;
    epoch->looks_in_vain++;
    if (looks && dlrs_gate_look(LOOK_NS))
        epoch->looks_in_vain = 0;
}

dlrs_status dlrs_epoch_wait(dlrs_epoch *epoch, uint64_t timeout_ns)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return DLRS_FORKED;
    uint64_t now = dlrs_now_ns(), deadline = dlrs_deadline_after(timeout_ns);
    pthread_mutex_lock(&pool->lock);
    part_from_earlier_locked(epoch); /* whose consumer may have stopped taking, and who waits here is in earnest */
    if (epoch->attached_ns > (are_waiting_locked(pool) ? SLOW_WAITING_NS : SLOW_NS))
        epoch->asked_for = ASKED_FOR;
    epoch->attached_ns = 0;
    pool->hungry++;
    wake_workers_locked(pool);
    bool turn = takes_turns_locked(pool);
    uint64_t spin_ns = is_cheap_locked(pool) ? SPIN_CHEAP_NS : SPIN_NS;
    if (may_spin_locked(pool) && is_worth_spinning(epoch->waited_ns, spin_ns)) {
        pthread_mutex_unlock(&pool->lock);
        spin_for_head(epoch, turn, now + spin_ns);
        pthread_mutex_lock(&pool->lock);
    }
    wait_for_head_locked(epoch, deadline);
    epoch->waited_ns = dlrs_averaged(epoch->waited_ns, dlrs_now_ns() - now);
    pool->hungry--;
    dlrs_status status = pool_status(pool);
    if (is_ready(epoch)) {
        epoch->look_again_ns = PATIENCE_NS;
    } else if (status == DLRS_OK && is_over_locked(epoch)) {
        status = DLRS_END;
    } else if (status == DLRS_OK) {
        status = DLRS_NOT_READY;
        /* glibc before 2.41 may lose a signal (its bug 25847): here is the time to send it again. */
        if (claimable_locked(pool) && (may_come_locked(pool) || !pool->watched)) {
            pool->waking = pool->parked;
            pthread_cond_broadcast(&pool->work_ready);
        }
    }
    bool busy = pool->awake > 0;
    bool are_waiting = are_waiting_locked(pool);
    pthread_mutex_unlock(&pool->lock);
    if (status != DLRS_OK || !pool->exclusive)
        return status;
    bool was_asked_for = epoch->asks_gate;
    uint64_t ready_ns = dlrs_now_ns();
    if (was_asked_for || !are_waiting)
        ask_at_gate(epoch, busy);
    if (!was_asked_for)
        epoch->ready_ns = epoch->looks_in_vain > 0 ? dlrs_now_ns() : ready_ns;
    return status;
}

void dlrs_epoch_attached(dlrs_epoch *epoch)
{
    epoch->attached_ns = epoch->ready_ns == 0 ? 0 : dlrs_now_ns() - epoch->ready_ns;
    epoch->ready_ns = 0;
    if (!epoch->asks_gate)
        return;
    epoch->asks_gate = false;
    if (!is_from_parent(epoch->pool))
        dlrs_gate_passed();
}

bool dlrs_epoch_find_worker(dlrs_epoch *epoch, unsigned *index, dlrs_run *run)
{
    dlrs_pool *pool = epoch->pool;
    const dlrs_worker *found = NULL;
    if (is_from_parent(pool))
        return false;
    pthread_mutex_lock(&pool->lock);
    for (unsigned i = 0; i < pool->num_threads; i++) {
        const dlrs_worker *worker = &pool->workers[i];
        bool fits = worker->at.epoch == epoch && (epoch->unordered || worker->at.batch == epoch->ring.taken);
        if (fits && (found == NULL || worker->at.batch < found->at.batch))
            found = worker;
    }
    if (found != NULL) {
        *index = found->index;
        *run = (dlrs_run){.batch = found->at.batch,
                          .position = found->at.position,
                          .num_items = found->at.num_items,
                          .singly = found->at.singly};
    }
    pthread_mutex_unlock(&pool->lock);
    return found != NULL;
}

void dlrs_epoch_cancel(dlrs_epoch *epoch)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    if (!epoch->cancelled) {
        epoch->cancelled = true;
        circle_remove_locked(pool, epoch);
        part_from_earlier_locked(epoch);
        if (epoch->before != NULL)
            part_from_earlier_locked(epoch->before);
        wake_workers_locked(pool);
        epoch->first_unstarted = NULL;
        for (uint64_t n = epoch->ring.taken; n < epoch->ring.claimed; n++)
            epoch->ring.slots[n % epoch->ring.size]->closed = true;
    }
    pthread_mutex_unlock(&pool->lock);
}

void *dlrs_epoch_reclaim(dlrs_epoch *epoch)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return NULL;
    pthread_mutex_lock(&pool->lock);
    assert(epoch->cancelled);
    void *found = dlrs_ring_reclaim(&epoch->ring, &epoch->reclaim_cursor);
    pthread_mutex_unlock(&pool->lock);
    return found;
}

int dlrs_epoch_visit(dlrs_epoch *epoch, dlrs_visit_fn *visit, void *context)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return 0;
    pthread_mutex_lock(&pool->lock);
    int status = dlrs_ring_visit(&epoch->ring, visit, context);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

bool dlrs_epoch_leave(dlrs_epoch *epoch)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return false;
    pthread_mutex_lock(&pool->lock);
    assert(epoch->cancelled);
    bool nobody = --epoch->holds == 0;
    pthread_mutex_unlock(&pool->lock);
    return nobody;
}

void dlrs_epoch_free(dlrs_epoch *epoch)
{
    pthread_cond_destroy(&epoch->head_ready);
    dlrs_ring_free(&epoch->ring);
    free(epoch->sizes);
    free(epoch->lane_is_busy);
    free(epoch);
}
