/* The process: see _process.h, and the end of _pool.h, for what it promises.
 *
 * NOTE [ fork ] Only the thread that called fork() is there in the child; the workers are gone, wherever they were, and
 * what they had locked stays locked. So the child abandons all pools of its parent: their memory is left alone, and
 * each call finds out by the generation that a pool is not its own before it touches a lock. Only `process.lock` is
 * made anew, by assignment, since the child has one thread. If a worker itself forks, the child's only thread is that
 * worker, which ends when its run returns. */
#include "_platform.h"

#include "_process.h"

#include <stdatomic.h>

#include "_gate.h"

static struct {
    pthread_mutex_t lock;
    /* Guarded by `lock`. */
    dlrs_member *members; /* those with live threads */
    uint64_t live;        /* threads of all of them */
    uint64_t ids;         /* number of the newest member */
    bool exiting;         /* set once, never cleared */
    bool has_condition;
    pthread_cond_t thread_left; /* `live` of the process and of a member went down; owners wait */

    atomic_uint_fast64_t generation; /* forks that led to this process */
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- fork ---- */

static void in_forked_child(void)
{
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    atomic_fetch_add(&process.generation, 1);
    process.lock = unlocked;
    process.has_condition = false; /* may have had waiters; it is made anew before its next use */
    process.members = NULL;
    process.live = 0;
    dlrs_gate_reset();
}

static pthread_once_t fork_handler_once = PTHREAD_ONCE_INIT;
static int fork_handler_error;

static void install_fork_handler(void)
{
    fork_handler_error = pthread_atfork(NULL, NULL, in_forked_child);
}

dlrs_status dlrs_process_prepare(void)
{
    pthread_once(&fork_handler_once, install_fork_handler);
    return fork_handler_error == 0 ? DLRS_OK : DLRS_NO_MEMORY;
}

uint64_t dlrs_process_generation(void)
{
    return atomic_load_explicit(&process.generation, memory_order_relaxed);
}

/* ---- members ---- */

dlrs_status dlrs_member_register(dlrs_member *member)
{
    dlrs_status status = dlrs_process_prepare();
    if (status != DLRS_OK)
        return status;
    pthread_mutex_lock(&process.lock);
    if (!process.has_condition)
        process.has_condition = dlrs_cond_init(&process.thread_left) == 0;
    if (process.exiting)
        status = DLRS_STOPPED;
    else if (!process.has_condition)
        status = DLRS_NO_MEMORY;
    else
        member->id = ++process.ids;
    pthread_mutex_unlock(&process.lock);
    member->generation = dlrs_process_generation();
    member->references = 1;
    return status;
}

bool dlrs_member_add_thread(dlrs_member *member)
{
    pthread_mutex_lock(&process.lock);
    process.live++;
    member->references++;
    if (member->live++ == 0) {
        member->previous = NULL;
        member->next = process.members;
        if (member->next != NULL)
            member->next->previous = member;
        process.members = member;
    }
    bool exiting = process.exiting;
    pthread_mutex_unlock(&process.lock);
    return !exiting;
}

bool dlrs_member_drop(dlrs_member *member, bool is_thread)
{
    pthread_mutex_lock(&process.lock);
    if (is_thread) {
        process.live--;
        if (--member->live == 0) {
            if (member->previous != NULL)
                member->previous->next = member->next;
            else
                process.members = member->next;
            if (member->next != NULL)
                member->next->previous = member->previous;
        }
        pthread_cond_broadcast(&process.thread_left);
    }
    bool last = --member->references == 0;
    pthread_mutex_unlock(&process.lock);
    return last;
}

/* Wait until a count of live threads is 0, or for `timeout_ns`. Is it? */
static bool wait_for_none(const uint64_t *live, uint64_t timeout_ns)
{
    uint64_t deadline = dlrs_deadline_after(timeout_ns);
    pthread_mutex_lock(&process.lock);
    while (*live > 0 && dlrs_now_ns() < deadline)
        dlrs_cond_wait_until(&process.thread_left, &process.lock, deadline);
    bool none_left = *live == 0;
    pthread_mutex_unlock(&process.lock);
    return none_left;
}

bool dlrs_member_wait(dlrs_member *member, uint64_t timeout_ns)
{
    return wait_for_none(&member->live, timeout_ns);
}

/* ---- exit ---- */

void dlrs_process_stop(void)
{
    pthread_mutex_lock(&process.lock);
    process.exiting = true;
    for (dlrs_member *member = process.members; member != NULL; member = member->next)
        member->stop(member);
    pthread_mutex_unlock(&process.lock);
}

bool dlrs_process_wait(uint64_t timeout_ns)
{
    return wait_for_none(&process.live, timeout_ns);
}
