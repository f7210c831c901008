/* Arithmetic that several parts need. */
#ifndef DLRS_NUMBERS_H
#define DLRS_NUMBERS_H

#include <stdint.h>

static inline uint64_t dlrs_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t dlrs_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
