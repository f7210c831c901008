/* What a fork waits for, and what waits for a fork.
 *
 * NOTE [ steps and forks ] A thread that becomes a worker takes two steps that hold locks of others. If the process
 * forked meanwhile, the child would find those locks held by a thread that is not there.
 *
 *   1. It makes a thread state, under a lock of the interpreter that fork() does not see to before CPython 3.12. No
 *      Python runs in this step, so a fork waits for its end, however long that takes.
 *   2. It makes itself known to `threading`. This step may run code of the user: the collector may call a finalizer,
 *      which may iterate a loader, whose workers take steps of their own, or fork, or ask for what the forking thread
 *      holds. So steps do not exclude each other, a fork that still waits keeps nobody from taking one, and it waits
 *      for a second and no more: `threading` makes what it holds anew in the child.
 *
 * While a thread forks no other begins a step. Nothing is locked meanwhile; in the child, whose only thread it is, what
 * lies here is set right before fork() returns. */
#ifndef DLRS_FORK_H
#define DLRS_FORK_H

#include "_platform.h"

#include <pthread.h>
#include <stdbool.h>

static struct {
    pthread_mutex_t lock;
    pthread_cond_t forked; /* `forks` went down */
    /* Guarded by `lock`. */
    unsigned new_states, steps; /* threads that are in the first step, and in the second */
    unsigned forks;             /* that are under way */
} dlrs_forking = {.lock = PTHREAD_MUTEX_INITIALIZER, .forked = PTHREAD_COND_INITIALIZER};

/* Those of the calling thread. A finalizer may fork in the second step, and a hook of a fork may fork. */
static _Thread_local unsigned dlrs_own_steps, dlrs_own_forks;

static inline void dlrs_await_no_fork_locked(void)
{
    while (dlrs_forking.forks != dlrs_own_forks)
        pthread_cond_wait(&dlrs_forking.forked, &dlrs_forking.lock);
}

/* Begin the first step, once no other thread forks. Called detached. */
static inline void dlrs_begin_new_state(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_await_no_fork_locked();
    dlrs_forking.new_states++;
    pthread_mutex_unlock(&dlrs_forking.lock);
}

static inline void dlrs_end_new_state(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_forking.new_states--;
    pthread_mutex_unlock(&dlrs_forking.lock);
}

/* Begin the second step, if no other thread forks. Called attached, so that a thread which the interpreter ends while
 * it attaches is not counted. */
static inline bool dlrs_try_begin_step(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    bool begins = dlrs_forking.forks == dlrs_own_forks;
    dlrs_forking.steps += begins;
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_steps += begins;
    return begins;
}

static inline void dlrs_end_step(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_forking.steps--;
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_steps--;
}

/* Wait, detached, until no other thread forks. By the time that the caller looks again, one may. */
static inline void dlrs_await_no_fork(void)
{
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_await_no_fork_locked();
    pthread_mutex_unlock(&dlrs_forking.lock);
}

/* Begin a fork, once no other thread is in the first step, and, with `waits`, none in the second, or a second has
 * passed. Called detached. Steps are short, so it looks again and again instead of being told. */
static inline void dlrs_begin_fork(bool waits)
{
    static const long most_ns = 10000000;
    uint64_t patient_until_ns = dlrs_now_ns() + 1000000000;
    struct timespec pause = {.tv_nsec = 20000};
    pthread_mutex_lock(&dlrs_forking.lock);
    while (dlrs_forking.new_states > 0
           || (waits && dlrs_forking.steps != dlrs_own_steps && dlrs_now_ns() < patient_until_ns)) {
        pthread_mutex_unlock(&dlrs_forking.lock);
        nanosleep(&pause, NULL);
        pause.tv_nsec = 2 * pause.tv_nsec < most_ns ? 2 * pause.tv_nsec : most_ns;
        pthread_mutex_lock(&dlrs_forking.lock);
    }
    dlrs_forking.forks++;
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_forks++;
}

/* In the parent. Without effect where none was begun. */
static inline void dlrs_end_fork(void)
{
    if (dlrs_own_forks == 0)
        return;
    pthread_mutex_lock(&dlrs_forking.lock);
    dlrs_forking.forks--;
    pthread_cond_broadcast(&dlrs_forking.forked);
    pthread_mutex_unlock(&dlrs_forking.lock);
    dlrs_own_forks--;
}

/* In the child, inside fork(): hooks of others, which run before ours, may load, and fork. */
static void dlrs_end_fork_in_child(void)
{
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t nobody_waits = PTHREAD_COND_INITIALIZER;
    dlrs_own_forks -= dlrs_own_forks > 0;
    dlrs_forking.lock = unlocked;
    dlrs_forking.forked = nobody_waits;
    dlrs_forking.new_states = 0;
    dlrs_forking.steps = dlrs_own_steps;
    dlrs_forking.forks = dlrs_own_forks;
}

/* Called once. 0, or an error number. */
static inline int dlrs_prepare_forks(void)
{
    return pthread_atfork(NULL, NULL, dlrs_end_fork_in_child);
}

#endif
