/* What a fork waits for, and what waits for a fork.
 *
 * NOTE [ steps and forks ] A thread that becomes a worker takes two steps that hold locks of others: it makes a thread
 * state, under a lock of the interpreter that fork() does not see to before CPython 3.12, and it makes itself known to
 * `threading`. If the process forked meanwhile, the child would find those locks held by a thread that is not there. So
 * whoever forks through Python waits until no other thread is in a step, and while it forks none begins one.
 *
 * A step may run code of the user: the collector may call a finalizer, which may iterate a loader, whose workers take
 * steps of their own. So steps do not exclude each other, and a fork that still waits keeps nobody from taking one.
 * Nothing is locked while the process forks; its child has one thread, and sets things right by assignment. */
#ifndef DLRS_FORK_H
#define DLRS_FORK_H

#include <pthread.h>

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* one of these went down */
    /* Guarded by `lock`. */
    unsigned steps; /* that threads are in */
    unsigned forks; /* that are under way */
} dlrs_forking = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Those of the calling thread. A finalizer may fork in a step, and a hook of a fork may fork. */
static _Thread_local unsigned dlrs_own_steps, dlrs_own_forks;

/* Begin a step, if no other thread forks. */
static inline int dlrs_try_begin_step(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    int begins = dlrs_forking.forks == dlrs_own_forks;
    dlrs_forking.steps += begins;
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_steps += begins;
    return begins;
}

static inline void dlrs_end_step(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_forking.steps--;
    pthread_cond_broadcast(&dlrs_forking.changed);
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_steps--;
}

/* Wait, detached, until no other thread forks. By the time that the caller looks again, one may. */
static inline void dlrs_await_no_fork(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    while (dlrs_forking.forks != dlrs_own_forks)
        pthread_cond_wait(&dlrs_forking.changed, &dlrs_forking.lock);
    pthread_mutex_unlock(&dlrs_forking.lock);
}

/* Begin a fork, if no other thread is in a step, or in any case. */
static inline int dlrs_try_begin_fork(int in_any_case)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    int begins = in_any_case || dlrs_forking.steps == dlrs_own_steps;
    dlrs_forking.forks += begins;
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_forks += begins;
    return begins;
}

/* Wait, detached, until no other thread is in a step. By the time that the caller looks again, one may be. */
static inline void dlrs_await_no_step(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    while (dlrs_forking.steps != dlrs_own_steps)
        pthread_cond_wait(&dlrs_forking.changed, &dlrs_forking.lock);
    pthread_mutex_unlock(&dlrs_forking.lock);
}

/* In the parent. Without effect where none was begun. */
static inline void dlrs_end_fork(void)
{
    if (dlrs_own_forks == 0)
        return;
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_forking.forks--;
    pthread_cond_broadcast(&dlrs_forking.changed);
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_forks--;
}

/* In the child, where only the calling thread is left of those that were in a step, or forked. */
static inline void dlrs_end_fork_in_child(void)
{
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t nobody_waits = PTHREAD_COND_INITIALIZER;
    dlrs_own_forks -= dlrs_own_forks > 0;
    dlrs_forking.lock = unlocked;
    dlrs_forking.changed = nobody_waits;
    dlrs_forking.steps = dlrs_own_steps;
    dlrs_forking.forks = dlrs_own_forks;
}

#endif
