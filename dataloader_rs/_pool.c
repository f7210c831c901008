/* The life of a pool: it is made, stopped, waited for and given up. See _pool.h for what it promises, and _pool_parts.h
 * for how its parts work together. */
#include "_platform.h"

#include "_pool_parts.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>

static void stop_locked(dlrs_pool *pool)
{
    atomic_store(&pool->stopping, true);
    pthread_cond_broadcast(&pool->work_ready);
    dlrs_epoch *epoch = pool->asked_first;
    if (epoch == NULL)
        return;
    do {
        pthread_cond_signal(&epoch->head_ready);
        epoch = epoch->next;
    } while (epoch != pool->asked_first);
}

static void pool_free(dlrs_pool *pool)
{
    assert(pool->asked_first == NULL);
    pthread_cond_destroy(&pool->work_ready);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void dlrs_pool_drop_reference(dlrs_pool *pool, bool is_worker)
{
    if (dlrs_member_drop(&pool->member, is_worker))
        pool_free(pool);
}

static void stop_member(dlrs_member *member)
{
    dlrs_pool_stop((dlrs_pool *)((char *)member - offsetof(dlrs_pool, member)));
}

dlrs_status dlrs_pool_new(const dlrs_pool_options *options, dlrs_pool **made, int *os_error)
{
    assert(options->num_threads > 0);
    dlrs_status status = DLRS_NO_MEMORY;
    dlrs_pool *pool = calloc(1, sizeof *pool + options->num_threads * sizeof pool->workers[0]);
    if (pool == NULL)
        return status;
    if (dlrs_mutex_init(&pool->lock) != 0)
        goto no_lock;
    if (dlrs_cond_init(&pool->work_ready) != 0)
        goto no_condition;
    pool->member.stop = stop_member;
    status = dlrs_member_register(&pool->member);
    if (status != DLRS_OK)
        goto not_registered;
    pool->hooks = options->hooks;
    pool->num_threads = options->num_threads;
    pool->turn_is_over = true;
    pool->num_processors = dlrs_usable_processors();
    pool->exclusive = options->exclusive;
    pool->adaptive = options->adaptive;
    pool->enters_at_once = options->enters_at_once;
    dlrs_turns_init(&pool->turns);
    dlrs_pace_init(&pool->pace, options->num_threads, pool->num_processors, options->exclusive);
    if (!options->adaptive)
        dlrs_pace_begin_with_all(&pool->pace);

    *made = pool;
    *os_error = dlrs_pool_start_threads(pool, options->stack_size);
    if (*os_error == 0)
        return DLRS_OK;
    dlrs_pool_stop(pool);
    return DLRS_NO_THREAD;

not_registered:
    pthread_cond_destroy(&pool->work_ready);
no_condition:
    pthread_mutex_destroy(&pool->lock);
no_lock:
    free(pool);
    return status;
}

uint64_t dlrs_pool_id(const dlrs_pool *pool)
{
    return pool->member.id;
}

bool dlrs_pool_is_usable(dlrs_pool *pool)
{
    return !is_from_parent(pool) && !atomic_load(&pool->stopping);
}

void dlrs_pool_stop(dlrs_pool *pool)
{
    if (is_from_parent(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    stop_locked(pool);
    pthread_mutex_unlock(&pool->lock);
}

bool dlrs_pool_wait(dlrs_pool *pool, uint64_t timeout_ns)
{
    return is_from_parent(pool) || dlrs_member_wait(&pool->member, timeout_ns);
}

void dlrs_pool_release(dlrs_pool *pool)
{
    if (is_from_parent(pool))
        return;
    dlrs_pool_stop(pool);
    dlrs_pool_drop_reference(pool, false);
}
