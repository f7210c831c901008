/* What the workers of a pool can claim, in what order, and who is woken for it. See _pool_parts.h for how the parts of
 * the pool work together. Nothing here waits, and all of it is called with the lock of the pool held. */
#include "_platform.h"

#include "_pool_parts.h"

#include "_numbers.h"

/* ---- the circle of epochs ---- */

void dlrs_circle_add_locked(dlrs_pool *pool, dlrs_epoch *epoch)
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

void dlrs_circle_remove_locked(dlrs_pool *pool, dlrs_epoch *epoch)
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

/* ---- what can be claimed ---- */

static void unstarted_append_locked(dlrs_epoch *epoch, dlrs_slot *slot)
{
    dlrs_slot **link = &epoch->first_unstarted;
    while (*link != NULL)
        link = &(*link)->next_unstarted;
    slot->next_unstarted = NULL;
    *link = slot;
}

void dlrs_unstarted_remove_locked(dlrs_epoch *epoch, const dlrs_slot *slot)
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

/* Are the items of a batch of `num_items` claimed one by one? A batch without items is nobody's last item. */
static bool is_fetched_singly(const dlrs_epoch *epoch, uint64_t num_items)
{
    return epoch->items_in_parallel > 1 && num_items > 0;
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

bool dlrs_claimable_locked(const dlrs_pool *pool)
{
    return more_could_claim_locked(pool, 0);
}

/* ---- waking workers ---- */

void dlrs_signal_worker_locked(dlrs_pool *pool)
{
    if (pool->parked > pool->waking) {
        pool->waking++;
        pthread_cond_signal(&pool->work_ready);
    }
}

void dlrs_wake_workers_locked(dlrs_pool *pool)
{
    if (!pool->spinning && pool->parked <= pool->waking)
        return;
    if (pool->coming == 0 && dlrs_claimable_locked(pool)) {
        if (!may_come_locked(pool)) {
            if (!pool->watched)
                dlrs_signal_worker_locked(pool);
        } else if (pool->spinning) {
            atomic_fetch_add_explicit(&pool->calls, 1, memory_order_release);
        } else {
            dlrs_signal_worker_locked(pool);
        }
    }
    if (pool->run_ns > 0 && !is_cheap_locked(pool) && pool->awake + pool->waking < limit_locked(pool) + pool->extra
        && more_could_claim_locked(pool, pool->coming + pool->waking))
        dlrs_signal_worker_locked(pool);
}

/* ---- claiming ---- */

void dlrs_slot_may_be_ending_locked(dlrs_epoch *epoch, const dlrs_slot *slot)
{
    if (dlrs_slot_is_ending(slot))
        epoch->in_progress--;
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
            dlrs_slot_became_ready_locked(epoch, slot);
            continue;
        }
        epoch->in_progress++;
        if (epoch->num_lanes > 0)
            epoch->lane_is_busy[slot->batch % epoch->num_lanes] = true;
        if (singly)
            unstarted_append_locked(epoch, slot);
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
    dlrs_slot_may_be_ending_locked(epoch, slot);
    if (singly && slot->started == slot->num_items)
        dlrs_unstarted_remove_locked(epoch, slot);
    epoch->holds++;
    return true;
}

bool dlrs_claim_locked(dlrs_worker *worker, dlrs_run *run)
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
            dlrs_wake_workers_locked(pool);
            return true;
        }
        epoch = epoch->next;
    } while (epoch != first);
    return false;
}
