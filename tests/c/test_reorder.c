/* The reorder buffer alone, on one thread, against a model that is too simple to be wrong. What happens to it when
 * memory runs out is in test_faults.c, which can make it run out. */
#include "check.h"

#include "_reorder.h"

enum { MOST_BATCHES = 16, MOST_ITEMS = 4, MOST_OBJECTS = 1 << 12 };

/* ---- things that are put into the ring, each of which has to come back once ---- */

static unsigned char objects[MOST_OBJECTS]; /* how often each came back */
static unsigned objects_made;

static void *object_new(void)
{
    CHECK(objects_made < MOST_OBJECTS);
    objects[objects_made] = 0;
    return &objects[objects_made++];
}

static void object_back(void *object)
{
    CHECK(object != NULL);
    CHECK_EQUAL(++*(unsigned char *)object, 1);
}

static void check_all_objects_back(void)
{
    for (unsigned i = 0; i < objects_made; i++)
        CHECK_EQUAL(objects[i], 1);
    objects_made = 0;
}

/* ---- what the pool does with a slot ---- */

static void start_item(dlrs_slot *slot)
{
    slot->started++;
}

static void publish(dlrs_slot *slot, void *outcome)
{
    slot->state = DLRS_SLOT_DONE;
    slot->outcome = outcome;
}

static void close_all(dlrs_ring *ring)
{
    for (uint64_t n = ring->taken; n < ring->claimed; n++)
        ring->slots[n % ring->size]->closed = true;
}

static dlrs_slot *claim_whole(dlrs_ring *ring)
{
    dlrs_slot *slot = dlrs_ring_claim(ring, 1, false);
    if (slot != NULL)
        slot->started = slot->num_items;
    return slot;
}

/* ---- the model ---- */

typedef enum { OPEN, DONE } stage;

typedef struct batch {
    dlrs_slot *slot; /* must stay where it is for as long as the batch has it */
    stage stage;
    bool singly, closed, last_was_said;
    uint64_t num_items, started, finished, failed_at;
    bool under_way[MOST_ITEMS];
    void *results[MOST_ITEMS];
    void *outcome;
} batch;

typedef struct model {
    dlrs_ring ring;
    uint64_t capacity, items_in_parallel, claimed, taken, random;
    batch batches[MOST_BATCHES]; /* batch n is batches[n % MOST_BATCHES] */
} model;

static batch *batch_at(model *m, uint64_t n)
{
    return &m->batches[n % MOST_BATCHES];
}

/* Any of the batches that have a slot, or NULL. */
static batch *any_batch(model *m)
{
    if (m->claimed == m->taken)
        return NULL;
    return batch_at(m, m->taken + check_random(&m->random, m->claimed - m->taken));
}

static void step_claim(model *m)
{
    uint64_t num_items = 1 + check_random(&m->random, MOST_ITEMS);
    bool singly = check_random(&m->random, 4) != 0;
    bool room = m->claimed < m->taken + m->capacity;
    CHECK_EQUAL(dlrs_ring_has_room(&m->ring), room);
    dlrs_slot *slot = dlrs_ring_claim(&m->ring, num_items, singly);
    CHECK_EQUAL(slot != NULL, room);
    if (slot == NULL)
        return;
    for (uint64_t n = m->taken; n < m->claimed; n++)
        CHECK(batch_at(m, n)->slot != slot);
    CHECK_EQUAL(slot->batch, m->claimed);
    CHECK_EQUAL(slot->state, DLRS_SLOT_OPEN);
    CHECK_EQUAL(slot->num_items, num_items);
    CHECK_EQUAL(slot->started, 0);
    CHECK_EQUAL(slot->finished, 0);
    CHECK_EQUAL(slot->failed_at, DLRS_NO_ITEM);
    CHECK(!slot->closed && !slot->handed_over && slot->outcome == NULL);
    for (uint64_t i = 0; singly && i < num_items; i++)
        CHECK(slot->results[i] == NULL);
    batch *claimed = batch_at(m, m->claimed++);
    *claimed = (batch){.slot = slot, .singly = singly, .num_items = num_items, .failed_at = DLRS_NO_ITEM};
    if (!singly) {
        slot->started = num_items; /* the run is the whole batch */
        batch_at(m, m->claimed - 1)->started = num_items;
    }
}

static void step_start(model *m)
{
    batch *b = any_batch(m);
    if (b == NULL || !b->singly)
        return;
    bool can = b->stage == OPEN && !b->closed && b->started < b->num_items
               && b->started - b->finished < m->items_in_parallel;
    CHECK_EQUAL(dlrs_slot_can_start(b->slot, m->items_in_parallel), can);
    if (!can)
        return;
    start_item(b->slot);
    b->under_way[b->started++] = true;
}

static void finish(model *m, batch *b)
{
    uint64_t position = check_random(&m->random, b->started);
    while (!b->under_way[position])
        position = (position + 1) % b->started;
    bool failed = check_random(&m->random, 8) == 0;
    b->under_way[position] = false;
    b->results[position] = object_new();
    b->finished++;
    if (failed) {
        b->closed = true;
        if (position < b->failed_at)
            b->failed_at = position;
    }
    bool last = b->finished == b->started && (b->closed || b->started == b->num_items);
    CHECK(!b->last_was_said);
    CHECK_EQUAL(dlrs_slot_finish(b->slot, position, b->results[position], failed), last);
    b->last_was_said = last;
}

static void step_finish(model *m)
{
    batch *b = any_batch(m);
    if (b != NULL && b->singly && b->finished < b->started)
        finish(m, b);
}

/* What the worker of the last item does with the results, which are its own. */
static void hand_over(batch *b)
{
    if (!b->singly)
        return;
    CHECK_EQUAL(b->slot->started, b->started);
    CHECK_EQUAL(b->slot->failed_at, b->failed_at);
    for (uint64_t i = 0; i < b->started; i++) {
        CHECK(b->slot->results[i] == b->results[i]);
        object_back(b->slot->results[i]);
    }
}

static void step_publish(model *m)
{
    batch *b = any_batch(m);
    if (b == NULL || b->stage != OPEN || (b->singly && !b->last_was_said))
        return;
    hand_over(b);
    b->stage = DONE;
    b->outcome = object_new();
    publish(b->slot, b->outcome);
}

static void step_take(model *m)
{
    bool any = m->taken < m->claimed;
    batch *b = batch_at(m, m->taken);
    bool ready = any && b->stage == DONE;
    CHECK_EQUAL(dlrs_ring_head_ready(&m->ring), ready);
    CHECK(dlrs_ring_head(&m->ring) == (any ? b->slot : NULL));
    if (!ready)
        return;
    CHECK_EQUAL(b->slot->batch, m->taken);
    CHECK(b->slot->outcome == b->outcome);
    object_back(b->slot->outcome);
    dlrs_ring_release_head(&m->ring);
    m->taken++;
}

static void check_state(model *m)
{
    CHECK_EQUAL(m->ring.claimed, m->claimed);
    CHECK_EQUAL(m->ring.taken, m->taken);
    CHECK(m->ring.claimed <= m->ring.taken + m->capacity);
    CHECK(m->ring.size >= 1 && m->ring.size <= m->capacity);
    for (uint64_t n = m->taken; n < m->claimed; n++) {
        const batch *b = batch_at(m, n);
        CHECK(m->ring.slots[n % m->ring.size] == b->slot);
        CHECK_EQUAL(b->slot->batch, n);
        CHECK(!dlrs_slot_is_idle(b->slot));
    }
}

/* The epoch is cancelled: what nobody works on is reclaimed, the rest comes back to those who work on it. Both go on
 * at the same time. */
static void cancel(model *m)
{
    close_all(&m->ring);
    for (uint64_t n = m->taken; n < m->claimed; n++)
        batch_at(m, n)->closed = true;
    uint64_t cursor = 0, n = m->taken;
    bool reclaiming = true;
    while (reclaiming || n < m->claimed) {
        if (reclaiming && check_random(&m->random, 2) == 0) {
            void *found = dlrs_ring_reclaim(&m->ring, &cursor);
            if (found != NULL)
                object_back(found);
            else
                reclaiming = false;
        } else if (n < m->claimed) {
            batch *b = batch_at(m, n);
            if (b->singly && b->finished < b->started) {
                finish(m, b);
                continue;
            }
            if (b->stage == OPEN && (!b->singly || b->last_was_said)) {
                hand_over(b);
                publish(b->slot, NULL);
            }
            n++;
        }
    }
    CHECK(dlrs_ring_reclaim(&m->ring, &cursor) == NULL);
}

static void test_random_interleavings_agree_with_the_model(void)
{
    static void (*const steps[])(model *) = {step_claim,  step_start,   step_start, step_finish,
                                             step_finish, step_publish, step_take};
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        for (unsigned round = 0; round < check_rounds(300); round++) {
            model m = {.capacity = capacity, .random = capacity * 1000 + round};
            m.items_in_parallel = 1 + check_random(&m.random, 3);
            CHECK(dlrs_ring_init(&m.ring, capacity));
            uint64_t num_steps = check_random(&m.random, 400);
            for (uint64_t i = 0; i < num_steps; i++) {
                steps[check_random(&m.random, sizeof steps / sizeof steps[0])](&m);
                check_state(&m);
            }
            cancel(&m);
            check_all_objects_back();
            dlrs_ring_free(&m.ring);
        }
    }
}

/* ---- order and bound ---- */

static void test_batches_leave_in_the_order_they_were_claimed(void)
{
    /* All are finished backwards. */
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        dlrs_ring ring;
        CHECK(dlrs_ring_init(&ring, capacity));
        uint64_t expected = 0;
        for (int lap = 0; lap < 5; lap++) {
            dlrs_slot *slots[9];
            for (uint64_t i = 0; i < capacity; i++)
                CHECK((slots[i] = claim_whole(&ring)) != NULL);
            for (uint64_t i = capacity; i-- > 0;) {
                CHECK(!dlrs_ring_head_ready(&ring));
                publish(slots[i], object_new());
            }
            for (uint64_t i = 0; i < capacity; i++) {
                CHECK(dlrs_ring_head_ready(&ring));
                CHECK_EQUAL(dlrs_ring_head(&ring)->batch, expected++);
                object_back(dlrs_ring_head(&ring)->outcome);
                dlrs_ring_release_head(&ring);
            }
            CHECK(dlrs_ring_head(&ring) == NULL);
            CHECK(!dlrs_ring_head_ready(&ring));
        }
        check_all_objects_back();
        dlrs_ring_free(&ring);
    }
}

static void test_full_ring_gives_no_slot(void)
{
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        dlrs_ring ring;
        CHECK(dlrs_ring_init(&ring, capacity));
        for (uint64_t n = 0; n < capacity; n++) {
            CHECK(dlrs_ring_has_room(&ring));
            CHECK(claim_whole(&ring) != NULL);
        }
        for (int lap = 0; lap < 20; lap++) {
            CHECK(!dlrs_ring_has_room(&ring));
            CHECK(claim_whole(&ring) == NULL);
            CHECK_EQUAL(ring.claimed, ring.taken + capacity);
            dlrs_ring_head(&ring)->state = DLRS_SLOT_DONE;
            dlrs_ring_release_head(&ring);
            CHECK(dlrs_ring_has_room(&ring));
            CHECK(claim_whole(&ring) != NULL);
        }
        CHECK_EQUAL(ring.size, capacity);
        dlrs_ring_free(&ring);
    }
}

static void test_slots_stay_where_they_are_while_the_ring_grows(void)
{
    /* The ring is rotated by `shift` before it grows. */
    enum { CAPACITY = 100 };
    for (unsigned shift = 0; shift < 9; shift++) {
        dlrs_ring ring;
        dlrs_slot *slots[CAPACITY];
        CHECK(dlrs_ring_init(&ring, CAPACITY));
        for (unsigned i = 0; i < shift; i++) {
            publish(claim_whole(&ring), NULL);
            dlrs_ring_release_head(&ring);
        }
        for (unsigned i = 0; i < CAPACITY; i++) {
            CHECK((slots[i] = dlrs_ring_claim(&ring, 3, true)) != NULL);
            slots[i]->results[0] = &slots[i];
            for (unsigned j = 0; j <= i; j++) {
                CHECK(ring.slots[(shift + j) % ring.size] == slots[j]);
                CHECK_EQUAL(slots[j]->batch, shift + j);
                CHECK(slots[j]->results[0] == &slots[j]);
            }
        }
        for (unsigned i = 0; i < CAPACITY; i++) {
            publish(slots[i], NULL);
            CHECK(dlrs_ring_head(&ring) == slots[i]);
            dlrs_ring_release_head(&ring);
        }
        dlrs_ring_free(&ring);
    }
}

static void test_huge_capacity_costs_nothing(void)
{
    static const uint64_t capacities[] = {1u << 20, (uint64_t)1 << 62, ((uint64_t)1 << 62) + 1, UINT64_MAX - 1,
                                          UINT64_MAX};
    for (unsigned i = 0; i < sizeof capacities / sizeof capacities[0]; i++) {
        dlrs_ring ring;
        CHECK(dlrs_ring_init(&ring, capacities[i]));
        CHECK(ring.size <= 16);
        for (uint64_t n = 0; n < 1000; n++) {
            CHECK(dlrs_ring_has_room(&ring));
            publish(claim_whole(&ring), NULL);
            if (n >= 40)
                dlrs_ring_release_head(&ring);
        }
        CHECK(ring.size <= 128);
        dlrs_ring_free(&ring);
    }
}

/* ---- items ---- */

/* Next permutation of `order` in lexical order; false after the last. */
static bool permute(unsigned *order, unsigned n)
{
    unsigned i = n - 1, j = n - 1;
    while (i > 0 && order[i - 1] > order[i])
        i--;
    if (i == 0)
        return false;
    while (order[j] < order[i - 1])
        j--;
    unsigned kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
    for (j = n - 1; i < j; i++, j--) {
        kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    return true;
}

static void test_last_item_is_said_once_and_the_lowest_failure_is_kept(void)
{
    /* All items are under way; every order of finishing, and every set of items that fail. */
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 1));
    for (unsigned num_items = 1; num_items <= MOST_ITEMS; num_items++) {
        for (unsigned failing = 0; failing < 1u << num_items; failing++) {
            unsigned order[MOST_ITEMS] = {0, 1, 2, 3};
            do {
                dlrs_slot *slot = dlrs_ring_claim(&ring, num_items, true);
                for (unsigned i = 0; i < num_items; i++)
                    start_item(slot);
                uint64_t lowest = DLRS_NO_ITEM;
                for (unsigned i = 0; i < num_items; i++) {
                    bool fails = failing >> order[i] & 1;
                    if (fails && order[i] < lowest)
                        lowest = order[i];
                    CHECK_EQUAL(dlrs_slot_finish(slot, order[i], &order[i], fails), i == num_items - 1);
                    CHECK_EQUAL(slot->failed_at, lowest);
                    CHECK_EQUAL(slot->handed_over, i == num_items - 1);
                    CHECK_EQUAL(slot->closed, lowest != DLRS_NO_ITEM);
                }
                for (unsigned i = 0; i < num_items; i++)
                    CHECK(slot->results[order[i]] == &order[i]);
                publish(slot, NULL);
                dlrs_ring_release_head(&ring);
            } while (permute(order, num_items));
        }
    }
    dlrs_ring_free(&ring);
}

static void test_closed_batch_starts_nothing_more(void)
{
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 2));
    dlrs_slot *slot = dlrs_ring_claim(&ring, 4, true);
    start_item(slot);
    start_item(slot);
    CHECK(dlrs_slot_can_start(slot, 3));
    CHECK(!dlrs_slot_finish(slot, 1, &ring, true));
    CHECK(!dlrs_slot_can_start(slot, 3));
    CHECK(dlrs_slot_finish(slot, 0, &ring, false)); /* items 2 and 3 are never started, so this was the last */
    CHECK_EQUAL(slot->started, 2);
    CHECK_EQUAL(slot->failed_at, 1);
    CHECK(!dlrs_slot_can_start(slot, 3));

    slot = dlrs_ring_claim(&ring, 4, true);
    slot->closed = true; /* nobody wants it */
    CHECK(!dlrs_slot_can_start(slot, 3));
    dlrs_ring_free(&ring);
}

static void test_no_more_items_than_allowed_are_under_way(void)
{
    for (uint64_t limit = 1; limit <= 5; limit++) {
        dlrs_ring ring;
        CHECK(dlrs_ring_init(&ring, 1));
        dlrs_slot *slot = dlrs_ring_claim(&ring, 4, true);
        uint64_t at_once = limit < 4 ? limit : 4;
        for (uint64_t i = 0; i < at_once; i++) {
            CHECK(dlrs_slot_can_start(slot, limit));
            start_item(slot);
        }
        CHECK(!dlrs_slot_can_start(slot, limit));
        for (uint64_t i = 0; i < 4; i++) {
            CHECK_EQUAL(dlrs_slot_finish(slot, i, &ring, false), i == 3);
            CHECK_EQUAL(dlrs_slot_can_start(slot, limit), slot->started < 4);
            if (slot->started < 4)
                start_item(slot);
        }
        dlrs_ring_free(&ring);
    }
}

static void test_batch_is_ending_when_its_last_items_are_under_way(void)
{
    for (uint64_t num_items = 1; num_items <= MOST_ITEMS; num_items++) {
        for (uint64_t started = 1; started <= num_items; started++) {
            dlrs_ring ring;
            CHECK(dlrs_ring_init(&ring, 1));
            dlrs_slot *slot = dlrs_ring_claim(&ring, num_items, true);
            for (uint64_t n = 0; n < started; n++)
                start_item(slot);
            for (uint64_t n = 0; n < started; n++) {
                CHECK_EQUAL(dlrs_slot_is_ending(slot), num_items > 1 && started == num_items && 2 * n >= num_items);
                dlrs_slot_finish(slot, n, NULL, false);
            }
            dlrs_ring_free(&ring);
        }
    }
}

static void test_done_batch_starts_nothing(void)
{
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 1));
    dlrs_slot *slot = dlrs_ring_claim(&ring, 4, true);
    publish(slot, NULL);
    CHECK(!dlrs_slot_can_start(slot, 3));
    dlrs_ring_release_head(&ring);
    CHECK(!dlrs_slot_can_start(slot, 3));
    dlrs_ring_free(&ring);
}

static void test_results_are_clean_when_a_slot_is_used_again(void)
{
    static const uint64_t sizes[] = {3, 1, 3, 4, 2, 7, 7};
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 1));
    for (unsigned i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        dlrs_slot *slot = dlrs_ring_claim(&ring, sizes[i], true);
        CHECK(!slot->handed_over && !slot->closed);
        CHECK_EQUAL(slot->failed_at, DLRS_NO_ITEM);
        for (uint64_t p = 0; p < sizes[i]; p++)
            CHECK(slot->results[p] == NULL);
        for (uint64_t p = 0; p < sizes[i]; p++) {
            start_item(slot);
            dlrs_slot_finish(slot, p, &ring, p > 0);
        }
        publish(slot, NULL);
        dlrs_ring_release_head(&ring);
    }
    dlrs_ring_free(&ring);
}

static void test_batch_too_large_for_its_results_is_lost_in_its_place(void)
{
    uint64_t too_many = (uint64_t)1 << 62;
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 3));
    dlrs_slot *first = claim_whole(&ring);
    dlrs_slot *lost = dlrs_ring_claim(&ring, too_many, true);
    dlrs_slot *whole = dlrs_ring_claim(&ring, too_many, false); /* needs no entries */
    CHECK(first != NULL && lost != NULL && whole != NULL);
    CHECK_EQUAL(lost->state, DLRS_SLOT_LOST);
    CHECK_EQUAL(lost->batch, 1);
    CHECK_EQUAL(whole->state, DLRS_SLOT_OPEN);
    CHECK(!dlrs_slot_can_start(lost, 3));
    CHECK(!dlrs_ring_head_ready(&ring)); /* the first comes first */
    publish(first, NULL);
    dlrs_ring_release_head(&ring);
    CHECK(dlrs_ring_head_ready(&ring) && dlrs_ring_head(&ring) == lost);
    dlrs_ring_release_head(&ring);
    CHECK(!dlrs_ring_head_ready(&ring));
    publish(whole, NULL);
    dlrs_ring_release_head(&ring);
    for (int lap = 0; lap < 4; lap++) { /* the slot that lost works again */
        dlrs_slot *slot = dlrs_ring_claim(&ring, 2, true);
        CHECK_EQUAL(slot->state, DLRS_SLOT_OPEN);
        CHECK(slot->results[0] == NULL && slot->results[1] == NULL);
        publish(slot, NULL);
        dlrs_ring_release_head(&ring);
    }
    dlrs_ring_free(&ring);
}

/* ---- what is left when an epoch is cancelled ---- */

static void test_reclaim_returns_what_nobody_owns_and_only_that(void)
{
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 9));
    publish(claim_whole(&ring), object_new()); /* taken */
    dlrs_slot *done = claim_whole(&ring);
    dlrs_slot *idle = dlrs_ring_claim(&ring, 4, true);
    dlrs_slot *busy = dlrs_ring_claim(&ring, 4, true);
    dlrs_slot *told = dlrs_ring_claim(&ring, 2, true);
    dlrs_slot *lost = dlrs_ring_claim(&ring, (uint64_t)1 << 62, true);
    dlrs_slot *whole = claim_whole(&ring);
    dlrs_slot *fresh = dlrs_ring_claim(&ring, 2, true);
    object_back(dlrs_ring_head(&ring)->outcome);
    dlrs_ring_release_head(&ring);

    publish(done, object_new());
    for (unsigned i = 0; i < 2; i++) {
        start_item(idle);
        start_item(busy);
        start_item(told);
    }
    void *idle_results[2] = {object_new(), object_new()};
    void *busy_results[2] = {object_new(), object_new()};
    void *told_results[2] = {object_new(), object_new()};
    CHECK(!dlrs_slot_finish(idle, 1, idle_results[1], false));
    CHECK(!dlrs_slot_finish(idle, 0, idle_results[0], false));
    CHECK(!dlrs_slot_finish(busy, 1, busy_results[1], false));
    CHECK(!dlrs_slot_finish(told, 0, told_results[0], false));
    CHECK(dlrs_slot_finish(told, 1, told_results[1], false));
    CHECK(!dlrs_slot_is_idle(idle)); /* more may be started */

    close_all(&ring);
    CHECK(dlrs_slot_is_idle(idle));
    CHECK(!dlrs_slot_is_idle(busy) && !dlrs_slot_is_idle(told) && !dlrs_slot_is_idle(done));
    CHECK(!dlrs_slot_is_idle(lost) && !dlrs_slot_is_idle(whole));

    uint64_t cursor = 0;
    void *found;
    unsigned reclaimed = 0;
    for (; (found = dlrs_ring_reclaim(&ring, &cursor)) != NULL; reclaimed++)
        object_back(found);
    CHECK_EQUAL(reclaimed, 3); /* the outcome of `done`, and two results of `idle` */
    CHECK_EQUAL(*(unsigned char *)idle_results[0], 1);
    CHECK_EQUAL(*(unsigned char *)idle_results[1], 1);

    CHECK(dlrs_slot_finish(busy, 0, busy_results[0], false)); /* closed, so it is the last */
    CHECK(dlrs_ring_reclaim(&ring, &cursor) == NULL);
    cursor = 0;
    CHECK(dlrs_ring_reclaim(&ring, &cursor) == NULL);
    CHECK(fresh->results[0] == NULL);
    for (unsigned i = 0; i < 2; i++) {
        object_back(busy->results[i]);
        object_back(told->results[i]);
    }
    check_all_objects_back();
    dlrs_ring_free(&ring);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RUN(test_batches_leave_in_the_order_they_were_claimed);
    RUN(test_full_ring_gives_no_slot);
    RUN(test_slots_stay_where_they_are_while_the_ring_grows);
    RUN(test_huge_capacity_costs_nothing);
    RUN(test_last_item_is_said_once_and_the_lowest_failure_is_kept);
    RUN(test_closed_batch_starts_nothing_more);
    RUN(test_no_more_items_than_allowed_are_under_way);
    RUN(test_batch_is_ending_when_its_last_items_are_under_way);
    RUN(test_done_batch_starts_nothing);
    RUN(test_results_are_clean_when_a_slot_is_used_again);
    RUN(test_batch_too_large_for_its_results_is_lost_in_its_place);
    RUN(test_reclaim_returns_what_nobody_owns_and_only_that);
    RUN(test_random_interleavings_agree_with_the_model);
    return check_end();
}
