/* Contract of the reorder buffer: a ring of slots, one for each batch that is in progress or waiting.
 *
 * A batch gets its slot when it is claimed, not when it is finished, so the order of the batches is never lost
 * and never has to be restored:
 *
 *            taken                    claimed
 *              |                         |
 *      . . . [DONE] [OPEN] [DONE] [OPEN] . . .        claimed <= taken + capacity
 *              ^ the consumer waits here
 *
 * This half is plain arithmetic: no threads, no locks, no knowledge of what a result is. Every function here is
 * called with the lock of the pool held (or by the only thread there is). */
#ifndef DLRS_REORDER_H
#define DLRS_REORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum dlrs_slot_state {
    DLRS_SLOT_FREE = 0, /* no batch has it */
    DLRS_SLOT_OPEN,     /* claimed, and its outcome is not known yet */
    DLRS_SLOT_DONE,     /* `outcome` waits for the consumer */
    DLRS_SLOT_LOST,     /* there was no memory to hold the results of the batch's items */
} dlrs_slot_state;

#define DLRS_NO_ITEM UINT64_MAX

/* A place in the reorder buffer. Slots do not move while the ring grows, so a pointer to one stays good until the
 * ring is freed. */
typedef struct dlrs_slot {
    uint64_t batch; /* number of the batch in its epoch, from 0 */
    uint64_t place; /* the slot is slots[place % size] of its ring; `batch`, unless batches are promoted */
    dlrs_slot_state state;
    void *outcome; /* DONE: what the batch came to; the ring never looks into it */

    /* Items of the batch. started - finished items are under way right now. */
    uint64_t num_items;
    uint64_t started;   /* items handed to workers; they are handed out from position 0 on */
    uint64_t finished;
    bool closed;        /* no further item is started: one failed, or nobody wants the batch any more */
    bool handed_over;   /* the worker of the last item has been told so; `results` are its own */
    uint64_t failed_at; /* lowest position that failed, or DLRS_NO_ITEM */
    void **results;     /* an entry an item, NULL until that item finished; used when items are claimed singly */
    uint64_t results_size;
    struct dlrs_slot *next_unstarted; /* the pool's: next batch with items that nobody has started */
} dlrs_slot;

typedef struct dlrs_ring {
    dlrs_slot **slots; /* slot of batch n is slots[n % size], unless batches are promoted */
    uint64_t size;     /* slots there are, at least 1; grows by doubling up to `capacity` */
    uint64_t capacity; /* slots there may be, at least 1 */
    uint64_t claimed;  /* number of the next batch to be claimed */
    uint64_t taken;    /* number of the next batch the consumer gets; taken <= claimed <= taken + capacity */
    uint64_t promoted; /* batches that were promoted; taken <= promoted <= claimed if any is */
} dlrs_ring;

/* Make an empty ring that may hold `capacity` batches, 1 or more. False if there is no memory. A huge capacity
 * costs nothing before it is used. */
bool dlrs_ring_init(dlrs_ring *ring, uint64_t capacity);

/* Free the slots. What they point to is the caller's to release first (dlrs_ring_reclaim). */
void dlrs_ring_free(dlrs_ring *ring);

/* Is there room for one more batch? */
bool dlrs_ring_has_room(const dlrs_ring *ring);

/* The same, if the batches of another ring count too. */
bool dlrs_ring_has_room_beside(const dlrs_ring *ring, const dlrs_ring *other);

/* Claim the next batch, of `num_items` items. With `singly`, the slot gets an entry in `results` for
 * each item; if there is no memory for them the slot comes back LOST, to be met in its place in the order. NULL
 * if the ring is full; also if it could not grow, in which case it goes on with the slots it has. */
dlrs_slot *dlrs_ring_claim(dlrs_ring *ring, uint64_t num_items, bool singly);

/* The slot the consumer waits for, or NULL if its batch is not claimed yet. */
dlrs_slot *dlrs_ring_head(const dlrs_ring *ring);

/* Can the consumer take the head, that is, is it DONE or LOST? */
bool dlrs_ring_head_ready(const dlrs_ring *ring);

/* Hand the slot of the head back for a later batch. Its outcome is the caller's from here on. */
void dlrs_ring_release_head(dlrs_ring *ring);

/* Let a batch that is DONE or LOST be taken before all that are not: for who wants batches in the order of arrival, and
 * then promotes each. */
void dlrs_ring_promote(dlrs_ring *ring, dlrs_slot *slot);

/* May one more item of the batch be started, with at most `items_in_parallel` of them under way? */
bool dlrs_slot_can_start(const dlrs_slot *slot, uint64_t items_in_parallel);

/* Record that the item at `position` finished. True for exactly one item of a batch: the last one, after which no
 * item is under way and none will be started. */
bool dlrs_slot_finish(dlrs_slot *slot, uint64_t position, void *result, bool failed);

/* Are its last items under way: all are started, and at least half are finished? A batch of one has no last items: it
 * is under way until it is done. */
bool dlrs_slot_is_ending(const dlrs_slot *slot);

/* Is nobody at work on this open slot, and will nobody be? True only for a closed one whose results nobody owns. */
bool dlrs_slot_is_idle(const dlrs_slot *slot);

/* Take one thing that a finished or idle slot still holds (an outcome or a result) out of the ring, or NULL when
 * there is none left. For a ring that nobody claims from any more; `*cursor` starts at 0. */
void *dlrs_ring_reclaim(dlrs_ring *ring, uint64_t *cursor);

/* What looks at a thing that the ring holds, without taking it; anything but 0 ends the visit. */
typedef int dlrs_visit_fn(void *held, void *context);

/* Show `visit` everything that the slots hold: outcomes nobody took, and results of items that no worker owns yet.
 * Returns what the last call of `visit` returned, or 0. */
int dlrs_ring_visit(const dlrs_ring *ring, dlrs_visit_fn *visit, void *context);

#endif
