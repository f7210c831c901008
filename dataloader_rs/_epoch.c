/* The consumer's side of an epoch, and who is told that a batch is ready. See _pool.h for what it promises, and
 * _pool_parts.h for how the parts of the pool work together. */
#include "_platform.h"

#include "_pool_parts.h"

#include <assert.h>
#include <stdlib.h>

#include "_gate.h"
#include "_numbers.h"

enum {
    SPIN_NS = 5000, /* how long one looks before one parks, where runs are not cheap: about what being woken costs */

    LOOK_MOST_NS = 1200000, /* how long a turn may take; a consumer looks a few times until then whether it goes on */
    PATIENCE_NS = 300000, /* how long a consumer whose batch is ready lets a worker go on with cheap runs */

    LOOK_NS = 200000,  /* at the gate: twice a piece of a run (_stopwatch.c) */
    LOOKS_IN_VAIN = 4, /* at the gate: after so many, every LOOK_AGAIN-th time only */
    LOOK_AGAIN = 64,

    SLOW_NS = 300000, /* who took longer to attach is asked for so many times: */
    ASKED_FOR = 16,
    SLOW_WAITING_NS = 1000000, /* the same where workers mostly wait, and may all come at once */
};

/* ---- telling consumers ---- */

static bool is_ready(const dlrs_epoch *epoch)
{
    return atomic_load_explicit(&epoch->head_is_ready, memory_order_acquire);
}

/* Ask at the gate, until dlrs_epoch_attached. */
static void begin_to_ask(dlrs_epoch *epoch)
{
    epoch->asks_gate = true;
    dlrs_gate_ask();
}

/* Ask at the gate for a consumer whose batch has just become ready. By the time that it runs, who made it ready would
 * be in the next item; which matters only if items keep it from attaching, and costs what the worker could do
 * meanwhile. */
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

void dlrs_slot_became_ready_locked(dlrs_epoch *epoch, dlrs_slot *slot)
{
    if (epoch->unordered)
        dlrs_ring_promote(&epoch->ring, slot);
    if (slot->place == epoch->ring.taken)
        head_changed_locked(epoch);
}

void dlrs_tell_consumers_locked(dlrs_pool *pool)
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
    dlrs_circle_add_locked(pool, epoch);
    dlrs_pace_disturb(&pool->pace, pool->last_report_ns);
    if (options->items_in_parallel > 1)
        dlrs_pace_begin_with_all(&pool->pace);
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
    dlrs_wake_workers_locked(epoch->pool);
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
        dlrs_wake_workers_locked(pool);
    } else if (was_full && !pool->spinning && pool->lingering == 0) {
        pool->lingers_until_ns = dlrs_now_ns() + LINGER_NS;
        dlrs_signal_worker_locked(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* ---- the consumer waits ---- */

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

/* Do workers mostly wait, for a disk or a network? Then the interpreter is free, and all would stand aside at once. */
static bool are_waiting_locked(const dlrs_pool *pool)
{
    return !takes_turns_locked(pool) && dlrs_pace_is_waiting(&pool->pace);
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
    dlrs_wake_workers_locked(pool);
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
        if (dlrs_claimable_locked(pool) && (may_come_locked(pool) || !pool->watched)) {
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

/* ---- the end of an epoch ---- */

void dlrs_epoch_cancel(dlrs_epoch *epoch)
{
    dlrs_pool *pool = epoch->pool;
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    if (!epoch->cancelled) {
        epoch->cancelled = true;
        dlrs_circle_remove_locked(pool, epoch);
        part_from_earlier_locked(epoch);
        if (epoch->before != NULL)
            part_from_earlier_locked(epoch->before);
        dlrs_wake_workers_locked(pool);
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
