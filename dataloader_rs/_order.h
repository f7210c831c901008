/* Contract of the shuffled order: which index stands at which position of an epoch.
 *
 * Pure arithmetic: no threads, no Python, no global state. The order of (length, seed, epoch) is the same on
 * every machine, and frozen: it may change only together with DLRS_ORDER_VERSION. An order is immutable once
 * made, so any number of threads may read it without a lock. */
#ifndef DLRS_ORDER_H
#define DLRS_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DLRS_ORDER_VERSION 1

/* Up to this length an order is an exact, uniform permutation held in a table of 2 bytes an index; above it
 * indices are computed one by one and the order holds no memory. */
#define DLRS_ORDER_TABLE_MAX 65536u

#define DLRS_ORDER_ROUNDS 8

typedef struct dlrs_order {
    uint64_t length;
    uint16_t *table; /* the permutation; NULL if the order is computed or empty; owned */
    /* The rest is for the computed order only. */
    unsigned left_bits;  /* bits of the left half of the block */
    unsigned right_bits; /* bits of the right half; left_bits or left_bits + 1 */
    uint32_t keys[DLRS_ORDER_ROUNDS]; /* one a half-round */
} dlrs_order;

/* Make the order of `length` items for epoch number `epoch` of `seed`. False, with nothing to free, if there is
 * no memory for the table. Takes O(length) up to DLRS_ORDER_TABLE_MAX and O(1) above. */
bool dlrs_order_init(dlrs_order *order, uint64_t length, uint64_t seed, uint64_t epoch);

/* The index at `position`; the caller has checked position < length. */
uint64_t dlrs_order_at(const dlrs_order *order, uint64_t position);

/* The indices at `count` positions from `first` on, into `indices`; the caller has checked first + count <= length.
 * Several times faster than one by one. */
void dlrs_order_fill(const dlrs_order *order, uint64_t first, size_t count, uint64_t *indices);

/* The position of `index`, the inverse of the above; the caller has checked index < length. O(length) for a
 * table: it is there for tests and tools. */
uint64_t dlrs_order_find(const dlrs_order *order, uint64_t index);

/* Give back the table. An order that was freed or zeroed may be freed again. */
void dlrs_order_free(dlrs_order *order);

#endif
