/* A count that only grows, and that threads can wait for: a gate, a barrier or a semaphore, as a test needs it. */
#ifndef TALLY_H
#define TALLY_H

#include <pthread.h>
#include <stdint.h>

#include "check.h"

typedef struct tally {
    pthread_mutex_t lock;
    pthread_cond_t grew;
    uint64_t count;
} tally;

static inline void tally_init(tally *t)
{
    CHECK(pthread_mutex_init(&t->lock, NULL) == 0);
    CHECK(pthread_cond_init(&t->grew, NULL) == 0);
    t->count = 0;
}

static inline void tally_free(tally *t)
{
    pthread_cond_destroy(&t->grew);
    pthread_mutex_destroy(&t->lock);
}

static inline void tally_add(tally *t)
{
    pthread_mutex_lock(&t->lock);
    t->count++;
    pthread_cond_broadcast(&t->grew);
    pthread_mutex_unlock(&t->lock);
}

static inline void tally_await(tally *t, uint64_t at_least)
{
    pthread_mutex_lock(&t->lock);
    while (t->count < at_least)
        pthread_cond_wait(&t->grew, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

static inline uint64_t tally_count(tally *t)
{
    pthread_mutex_lock(&t->lock);
    uint64_t count = t->count;
    pthread_mutex_unlock(&t->lock);
    return count;
}

#endif
