/* The reorder buffer. See _reorder.h for what it promises.
 *
 * Why the order cannot break: slots are given out in the order of `claimed` and taken back in the order of `taken`,
 * each of which only ever grows by one, and slots[n % size] can hold one batch alone because claimed - taken never
 * exceeds size. Growing keeps that true: the slots in use are laid out anew for the larger modulus, as pointers, so
 * that workers who hold a slot do not notice. */
#include "_reorder.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "_numbers.h"

enum { INITIAL_SIZE = 4 };

/* Double the slots, or as far as the capacity allows. Called when all of them are in use, and by init when there
 * are none. */
static bool grow(dlrs_ring *ring)
{
    assert(ring->claimed - ring->taken == ring->size);
    uint64_t larger = ring->size > ring->capacity / 2 ? ring->capacity : ring->size * 2;
    if (ring->size == 0)
        larger = dlrs_min_u64(ring->capacity, INITIAL_SIZE);
    if (larger > SIZE_MAX / sizeof *ring->slots)
        return false;
    dlrs_slot **slots = malloc((size_t)larger * sizeof *slots);
    if (slots == NULL)
        return false;
    /* The new slots get the places of the batches claimed .. taken + larger - 1. */
    for (uint64_t n = ring->claimed; n < ring->taken + larger; n++) {
        slots[n % larger] = calloc(1, sizeof **slots);
        if (slots[n % larger] == NULL) {
            for (uint64_t made = ring->claimed; made < n; made++)
                free(slots[made % larger]);
            free(slots);
            return false;
        }
    }
    for (uint64_t n = ring->taken; n < ring->claimed; n++)
        slots[n % larger] = ring->slots[n % ring->size];
    free(ring->slots);
    ring->slots = slots;
    ring->size = larger;
    return true;
}

bool dlrs_ring_init(dlrs_ring *ring, uint64_t capacity)
{
    assert(capacity > 0);
    memset(ring, 0, sizeof *ring);
    ring->capacity = capacity;
    return grow(ring);
}

void dlrs_ring_free(dlrs_ring *ring)
{
    for (uint64_t i = 0; i < ring->size; i++) {
        free(ring->slots[i]->results);
        free(ring->slots[i]);
    }
    free(ring->slots);
    memset(ring, 0, sizeof *ring);
}

bool dlrs_ring_has_room(const dlrs_ring *ring)
{
    return ring->claimed - ring->taken < ring->capacity;
}

bool dlrs_ring_has_room_beside(const dlrs_ring *ring, const dlrs_ring *other)
{
    uint64_t others = other->claimed - other->taken;
    return others < ring->capacity && ring->claimed - ring->taken < ring->capacity - others;
}

/* Make sure that the slot has an entry, all NULL, for each of its items. */
static bool clear_results(dlrs_slot *slot)
{
    if (slot->num_items > SIZE_MAX / sizeof *slot->results)
        return false;
    if (slot->results_size < slot->num_items) {
        void **results = malloc((size_t)slot->num_items * sizeof *results);
        if (results == NULL)
            return false;
        free(slot->results);
        slot->results = results;
        slot->results_size = slot->num_items;
    }
    for (uint64_t i = 0; i < slot->num_items; i++)
        slot->results[i] = NULL;
    return true;
}

dlrs_slot *dlrs_ring_claim(dlrs_ring *ring, uint64_t num_items, bool singly)
{
    if (!dlrs_ring_has_room(ring))
        return NULL;
    if (ring->claimed - ring->taken == ring->size && !grow(ring))
        return NULL;
    dlrs_slot *slot = ring->slots[ring->claimed % ring->size];
    assert(slot->state == DLRS_SLOT_FREE);
    slot->batch = slot->place = ring->claimed++;
    slot->state = DLRS_SLOT_OPEN;
    slot->outcome = NULL;
    slot->num_items = num_items;
    slot->started = 0;
    slot->finished = 0;
    slot->closed = false;
    slot->handed_over = false;
    slot->failed_at = DLRS_NO_ITEM;
    if (singly && !clear_results(slot))
        slot->state = DLRS_SLOT_LOST;
    return slot;
}

dlrs_slot *dlrs_ring_head(const dlrs_ring *ring)
{
    return ring->taken < ring->claimed ? ring->slots[ring->taken % ring->size] : NULL;
}

bool dlrs_ring_head_ready(const dlrs_ring *ring)
{
    const dlrs_slot *head = dlrs_ring_head(ring);
    return head != NULL && (head->state == DLRS_SLOT_DONE || head->state == DLRS_SLOT_LOST);
}

void dlrs_ring_release_head(dlrs_ring *ring)
{
    dlrs_slot *head = dlrs_ring_head(ring);
    assert(head != NULL && head->state != DLRS_SLOT_OPEN);
    head->state = DLRS_SLOT_FREE;
    head->outcome = NULL;
    ring->taken++;
}

void dlrs_ring_promote(dlrs_ring *ring, dlrs_slot *slot)
{
    dlrs_slot **to = &ring->slots[ring->promoted % ring->size], **from = &ring->slots[slot->place % ring->size];
    assert(*from == slot && slot->state != DLRS_SLOT_OPEN && ring->promoted <= slot->place);
    (*to)->place = slot->place;
    *from = *to;
    slot->place = ring->promoted++;
    *to = slot;
}

bool dlrs_slot_can_start(const dlrs_slot *slot, uint64_t items_in_parallel)
{
    return slot->state == DLRS_SLOT_OPEN && !slot->closed && slot->started < slot->num_items
           && slot->started - slot->finished < items_in_parallel;
}

bool dlrs_slot_finish(dlrs_slot *slot, uint64_t position, void *result, bool failed)
{
    assert(slot->state == DLRS_SLOT_OPEN && slot->finished < slot->started && position < slot->num_items);
    slot->results[position] = result;
    slot->finished++;
    if (failed) {
        slot->closed = true;
        slot->failed_at = dlrs_min_u64(slot->failed_at, position);
    }
    slot->handed_over = slot->finished == slot->started && (slot->closed || slot->started == slot->num_items);
    return slot->handed_over;
}

bool dlrs_slot_is_ending(const dlrs_slot *slot)
{
    return slot->num_items > 1 && slot->started == slot->num_items && slot->finished >= slot->num_items - slot->finished;
}

bool dlrs_slot_is_idle(const dlrs_slot *slot)
{
    return slot->state == DLRS_SLOT_OPEN && slot->closed && !slot->handed_over && slot->finished == slot->started;
}

/* Take one result, the last, out of an idle slot, or NULL. */
static void *reclaim_result(dlrs_slot *slot)
{
    while (slot->started > 0) {
        slot->finished = --slot->started;
        if (slot->results[slot->started] != NULL)
            return slot->results[slot->started];
    }
    return NULL;
}

void *dlrs_ring_reclaim(dlrs_ring *ring, uint64_t *cursor)
{
    /* The cursor counts the slots, from the head on, that hold nothing any more or are somebody's to finish. */
    for (; *cursor < ring->claimed - ring->taken; ++*cursor) {
        dlrs_slot *slot = ring->slots[(ring->taken + *cursor) % ring->size];
        void *found = NULL;
        if (slot->state == DLRS_SLOT_DONE) {
            found = slot->outcome;
            slot->outcome = NULL;
        } else if (dlrs_slot_is_idle(slot)) {
            found = reclaim_result(slot);
        }
        if (found != NULL)
            return found;
    }
    return NULL;
}

static int visit_slot(const dlrs_slot *slot, dlrs_visit_fn *visit, void *context)
{
    if (slot->state == DLRS_SLOT_DONE)
        return slot->outcome == NULL ? 0 : visit(slot->outcome, context);
    if (slot->state != DLRS_SLOT_OPEN || slot->handed_over || slot->results == NULL)
        return 0;
    int status = 0;
    for (uint64_t i = 0; i < slot->started && status == 0; i++) {
        if (slot->results[i] != NULL)
            status = visit(slot->results[i], context);
    }
    return status;
}

int dlrs_ring_visit(const dlrs_ring *ring, dlrs_visit_fn *visit, void *context)
{
    int status = 0;
    for (uint64_t n = ring->taken; n < ring->claimed && status == 0; n++)
        status = visit_slot(ring->slots[n % ring->size], visit, context);
    return status;
}
