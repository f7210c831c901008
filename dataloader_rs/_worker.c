/* The threads of a pool: when they wait, what they report, and their calls from inside the `work` hook. See _pool.h for
 * what those promise, and _pool_parts.h for how the parts of the pool work together. */
#include "_platform.h"

#include "_pool_parts.h"

#include <assert.h>
#include <stdio.h>

#include "_gate.h"
#include "_numbers.h"

enum {
    STALL_NS = 5000000,     /* nothing finished for so long may mean that items wait for each other */
    COMPUTING_NS = 1000000, /* or that they take long, if those who are awake computed for so much of it */
    LONG_STALL_NS = 50000000,

    HEAD_START_NS = 200000, /* where only one can be attached: about what it takes from there to a first batch */

    TELL_NS = 2000000, /* a worker tells every so often how busy it is */
};

/* ---- parked, and watching ---- */

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
    pool->last_report_ns = working_ns_locked(pool, dlrs_now_ns());
    dlrs_pace_stall(&pool->pace, pool->last_report_ns);
    pool->extra = 0;
    dlrs_tell_consumers_locked(pool);
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
    bool are_missing; /* those who are parked, for work that waits */
    computed_locked(pool);
    pool->watched = true;
    do {
        are_missing = park_locked(pool, dlrs_now_ns() + STALL_NS, false) && pool->awake > 0
                      && dlrs_claimable_locked(pool);
        in_vain = are_missing && seen == atomic_load_explicit(&pool->num_finished, memory_order_relaxed);
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
    else if (are_missing && !computes)
        dlrs_pace_begin_with_all(&pool->pace);
}

/* ---- between two stretches of work ---- */

static void begin_turn_locked(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    if (pool->idle_since_ns != 0)
        pool->idle_ns += dlrs_now_ns() - pool->idle_since_ns;
    pool->idle_since_ns = 0;
    if (pool->exclusive && pool->adaptive && pool->head_start_until_ns == 0)
        pool->head_start_until_ns = dlrs_now_ns() + HEAD_START_NS;
    worker->is_awake = true;
    pool->awake++;
    atomic_store_explicit(&pool->turn_is_over, false, memory_order_relaxed);
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
    dlrs_tell_consumers_locked(pool);
}

/* What the worker tells next, of how busy it is, begins now. */
static void tell_from(dlrs_worker *worker, uint64_t now_ns, uint64_t busy_ns)
{
    worker->told_ns = now_ns;
    worker->told_busy_ns = busy_ns;
}

/* Is a worker that could claim to leave it for a while? */
static bool lingers_locked(const dlrs_pool *pool)
{
    return takes_turns_locked(pool) && pool->hungry == 0 && dlrs_now_ns() < pool->lingers_until_ns;
}

/* Has the first worker to come not finished anything yet? For a moment others would only be in its way. */
static bool has_head_start_locked(const dlrs_pool *pool)
{
    return pool->awake > 0 && pool->run_ns == 0 && pool->head_start_until_ns != 0
           && dlrs_now_ns() < pool->head_start_until_ns;
}

/* Does the worker tell the pace how busy it is? Who does cheap runs, in turns or alone, is. */
static bool tells_locked(const dlrs_worker *worker)
{
    uint64_t run_ns = worker->watch.run_ns;
    return worker->pool->adaptive && (run_ns == 0 || run_ns >= CHEAP_NS || worker->pool->turns.side_by_side);
}

/* Wait until there is something to claim, for which worker_claim is then called. False if the pool is stopping. */
static bool worker_wait(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    bool has_parked = false, has_spun = false, claims = false, tells = false;
    uint64_t began_ns = 0;
    pthread_mutex_lock(&pool->lock);
    end_turn_locked(worker);
    while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
        bool claimable = dlrs_claimable_locked(pool);
        bool is_one_too_many = !may_come_locked(pool);
        bool lingers = lingers_locked(pool);
        bool gives_head_start = has_head_start_locked(pool);
        claims = claimable && !is_one_too_many && !lingers && !gives_head_start;
        if (claims)
            break;
        if (began_ns == 0) {
            began_ns = dlrs_now_ns();
            if (pool->awake == 0 && pool->idle_since_ns == 0)
                pool->idle_since_ns = began_ns;
        }
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
        if (gives_head_start && claimable)
            park_locked(pool, pool->head_start_until_ns, false);
        else if (is_one_too_many && claimable && !pool->watched)
            watch_locked(pool);
        else
            park_locked(pool, lingers ? pool->lingers_until_ns : 0, lingers);
    }
    if (claims) {
        if (began_ns != 0)
            worker->waited_ns = dlrs_averaged(worker->waited_ns, dlrs_now_ns() - began_ns);
        pool->coming++;
        begin_turn_locked(worker);
        dlrs_wake_workers_locked(pool);
        tells = tells_locked(worker);
    }
    pthread_mutex_unlock(&pool->lock);
    if (has_parked)
        pthread_sigmask(SIG_SETMASK, &worker->work_signals, NULL);
    /* From here on, so that waiting to be attached is part of it. */
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
    bool claimed = dlrs_claim_locked(worker, run);
    pthread_mutex_unlock(&pool->lock);
    return claimed;
}

/* ---- reports of a worker: how long things take ---- */

/* Tell the pace now and then how busy the worker is. To find that out is a system call. */
static void tell_busy_locked(dlrs_worker *worker, uint64_t now_ns)
{
    if (!tells_locked(worker) || now_ns - worker->told_ns < TELL_NS)
        return;
    uint64_t busy_ns = dlrs_thread_busy_ns();
    if (worker->told_ns != 0)
        dlrs_pace_tell_busy(&worker->pool->pace, now_ns - worker->told_ns, busy_ns - worker->told_busy_ns,
                            working_ns_locked(worker->pool, now_ns), worker->pool->awake);
    tell_from(worker, now_ns, busy_ns);
}

/* Tell the pace of the runs that are finished and not timed yet. */
static void report_runs_locked(dlrs_worker *worker, uint64_t now_ns)
{
    dlrs_pool *pool = worker->pool;
    bool took_turns = takes_turns_locked(pool);
    uint64_t working_ns = working_ns_locked(pool, now_ns);
    pool->last_report_ns = working_ns;
    dlrs_stopwatch_time(&worker->watch, now_ns);
    pool->run_ns = dlrs_averaged(pool->run_ns, worker->watch.run_ns);
    if (pool->exclusive && pool->adaptive && pool->num_threads > 1) {
        dlrs_turns_report(&pool->turns, worker->watch.runs, worker->watch.items, now_ns - worker->watch.began_ns,
                          pool->run_ns, CHEAP_NS, took_turns, working_ns);
        worker->watch.one_by_one = pool->turns.takes_long;
    }
    if (takes_turns_locked(pool) || (pool->extra > 0 && pool->awake > limit_locked(pool))) {
        /* It is not the limit that says how many workers are awake: there is nothing to compare. */
        dlrs_pace_disturb(&pool->pace, working_ns);
        worker->told_ns = 0;
    } else if (pool->adaptive) {
        tell_busy_locked(worker, now_ns);
        dlrs_pace_report(&pool->pace, &worker->pace, worker->watch.items, now_ns - worker->watch.began_ns, working_ns,
                         pool->awake);
    }
    dlrs_stopwatch_begin(&worker->watch, now_ns);
    if (took_turns && !takes_turns_locked(pool))
        dlrs_tell_consumers_locked(pool);
}

/* ---- inside the `work` hook ---- */

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
    dlrs_wake_workers_locked(pool);
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
        dlrs_unstarted_remove_locked(epoch, run->slot);
    bool was_ending = dlrs_slot_is_ending(run->slot);
    bool last = dlrs_slot_finish(run->slot, run->position, result, failed);
    if (!was_ending)
        dlrs_slot_may_be_ending_locked(epoch, run->slot);
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
        left->in_progress -= !dlrs_slot_is_ending(run->slot);
        run->slot->state = DLRS_SLOT_DONE;
        if (left->cancelled) {
            run->slot->outcome = NULL;
            *unwanted = outcome;
        } else {
            run->slot->outcome = outcome;
            dlrs_slot_became_ready_locked(left, run->slot);
        }
    }
    worker->at.epoch = NULL;
    bool claimed = pool->awake <= limit_locked(pool) && dlrs_claim_locked(worker, run);
    if (!claimed && worker->watch.runs > 0)
        report_runs_locked(worker, dlrs_now_ns()); /* before it is forgotten */
    if (--left->holds == 0)
        *orphan = left;
    pthread_mutex_unlock(&pool->lock);
    return claimed;
}

/* ---- the thread ---- */

/* What comes once, before the first stretch of work. Can it work? */
static bool worker_enter(dlrs_worker *worker)
{
    dlrs_pool *pool = worker->pool;
    worker->has_entered = true;
    worker->thread_context = pool->hooks.enter(pool->hooks.context, worker);
    if (worker->thread_context != NULL)
        return true;
    if (is_from_parent(pool))
        return false;
    atomic_store(&pool->failed, true);
    dlrs_pool_stop(pool);
    pthread_mutex_lock(&pool->lock);
    pool->coming -= worker->is_awake; /* what it found it will not claim */
    end_turn_locked(worker);
    pthread_mutex_unlock(&pool->lock);
    return false;
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
    bool can_work = !pool->enters_at_once || worker_enter(worker);
    while (can_work && worker_wait(worker)) {
        if (pool->exclusive)
            dlrs_gate_stand_aside(pool->num_processors > 1);
        can_work = worker->has_entered || worker_enter(worker);
        if (!can_work)
            break;
        void *thread_context = worker->thread_context;
        if (pool->hooks.attach != NULL)
            pool->hooks.attach(thread_context);
        if (worker_claim(worker, &run))
            pool->hooks.work(thread_context, worker, &run);
        if (pool->hooks.detach != NULL)
            pool->hooks.detach(thread_context);
        if (is_from_parent(pool))
            return NULL;
    }
    if (can_work && worker->has_entered)
        pool->hooks.leave(worker->thread_context, worker);
    else if (can_work && pool->hooks.skip != NULL)
        pool->hooks.skip(pool->hooks.context, worker);
    if (is_from_parent(pool))
        return NULL;
    block_signals(NULL);
    dlrs_pool_drop_reference(pool, true);
    return NULL;
}

int dlrs_pool_start_threads(dlrs_pool *pool, size_t stack_size)
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
            dlrs_pool_drop_reference(pool, true);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
done:
    pthread_attr_destroy(&attributes);
    return error;
}
