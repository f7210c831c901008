/* The ring and the pool when the system refuses them memory or threads, and when they wait. This file contains all
 * parts, with every call that can fail or wait replaced by one that counts, refuses on demand, and tells who waits. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* as _platform.h wants it, which comes too late to say so */
#endif

#include "check.h"
#include "tally.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

/* ---- calls that can be refused ---- */

static atomic_long allowance = LONG_MAX; /* the call that finds 1 here is refused */
static atomic_bool persistent;           /* so are all that come after it */
static atomic_int last_refusal;          /* what it was told, an error number */
static atomic_long blocks;               /* of memory, not freed yet */
static atomic_long objects;              /* of pthreads, not destroyed yet */

static void allow_all(void)
{
    atomic_store(&allowance, LONG_MAX);
}

/* From now on, allow `calls` calls and refuse the next one; with `all`, also those that follow it. */
static void refuse_after(long calls, bool all)
{
    atomic_store(&persistent, all);
    atomic_store(&last_refusal, 0);
    atomic_store(&allowance, calls + 1);
}

static int refusal(int error)
{
    long left = atomic_fetch_sub(&allowance, 1);
    if (left > 1 || (left < 1 && !atomic_load(&persistent)))
        return 0;
    atomic_store(&last_refusal, error);
    return error;
}

static void *refusing_malloc(size_t size)
{
    void *block = size >> 40 != 0 || refusal(ENOMEM) ? NULL : malloc(size);
    atomic_fetch_add(&blocks, block != NULL);
    return block;
}

static void *refusing_calloc(size_t count, size_t size)
{
    void *block = refusal(ENOMEM) ? NULL : calloc(count, size);
    atomic_fetch_add(&blocks, block != NULL);
    return block;
}

static void counting_free(void *block)
{
    free(block);
    atomic_fetch_sub(&blocks, block != NULL);
}

#define COUNT_MADE(error) (atomic_fetch_add(&objects, (error) == 0), (error))
#define COUNT_DESTROYED(error) (atomic_fetch_sub(&objects, (error) == 0), (error))

static int refusing_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *attributes)
{
    int error = refusal(EAGAIN);
    if (error == 0)
        error = pthread_mutex_init(lock, attributes);
    return COUNT_MADE(error);
}

static int counting_mutex_destroy(pthread_mutex_t *lock)
{
    int error = pthread_mutex_destroy(lock);
    return COUNT_DESTROYED(error);
}

static int refusing_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes)
{
    int error = refusal(EAGAIN);
    if (error == 0)
        error = pthread_cond_init(cond, attributes);
    return COUNT_MADE(error);
}

static int counting_cond_destroy(pthread_cond_t *cond)
{
    int error = pthread_cond_destroy(cond);
    return COUNT_DESTROYED(error);
}

static int refusing_attr_init(pthread_attr_t *attributes)
{
    int error = refusal(ENOMEM);
    if (error == 0)
        error = pthread_attr_init(attributes);
    return COUNT_MADE(error);
}

static int counting_attr_destroy(pthread_attr_t *attributes)
{
    int error = pthread_attr_destroy(attributes);
    return COUNT_DESTROYED(error);
}

static int refusing_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument)
{
    int error = refusal(EAGAIN);
    return error != 0 ? error : pthread_create(thread, attributes, body, argument);
}

static bool no_fork_handler;

static int refusing_atfork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void))
{
    return no_fork_handler ? ENOMEM : pthread_atfork(before, in_parent, in_child);
}

/* ---- calls that wait ---- */

static pthread_mutex_t spy_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t spy_news = PTHREAD_COND_INITIALIZER;
static unsigned parked, waiting;   /* guarded by spy_lock: workers, and consumers; woken ones until they run */
static uint64_t changes;           /* guarded by spy_lock: of the two */
static atomic_uint wakes;          /* signals that were sent */
static atomic_uint waits;          /* of workers */
static atomic_bool wakes_by_itself; /* every second wait ends at once */

/* Called with the lock of the pool held: whoever sees the new count and then gets that lock knows that the wait has
 * begun. */
static void note(unsigned *count, unsigned change)
{
    pthread_mutex_lock(&spy_lock);
    *count += change;
    changes++;
    pthread_cond_broadcast(&spy_news);
    pthread_mutex_unlock(&spy_lock);
}

static void await(const unsigned *count, unsigned expected)
{
    pthread_mutex_lock(&spy_lock);
    while (*count != expected)
        pthread_cond_wait(&spy_news, &spy_lock);
    pthread_mutex_unlock(&spy_lock);
}

static int spying_signal(pthread_cond_t *cond)
{
    atomic_fetch_add(&wakes, 1);
    return pthread_cond_signal(cond);
}

static int spying_wait(pthread_cond_t *cond, pthread_mutex_t *lock)
{
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    CHECK(sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGTERM) && sigismember(&blocked, SIGUSR2));
    int error = 0;
    note(&parked, 1);
    if (atomic_load(&wakes_by_itself) && atomic_fetch_add(&waits, 1) % 2 == 0) {
        pthread_mutex_unlock(lock);
        sched_yield();
        pthread_mutex_lock(lock);
    } else {
        error = pthread_cond_wait(cond, lock);
    }
    note(&parked, (unsigned)-1);
    return error;
}

static int spying_timed_wait(pthread_cond_t *cond, pthread_mutex_t *lock, const struct timespec *time)
{
    int error = 0;
    note(&waiting, 1);
    if (atomic_load(&wakes_by_itself) && atomic_fetch_add(&waits, 1) % 2 == 0) {
        pthread_mutex_unlock(lock);
        sched_yield();
        pthread_mutex_lock(lock);
    } else {
#ifdef __APPLE__
        error = pthread_cond_timedwait_relative_np(cond, lock, time);
#else
        error = pthread_cond_timedwait(cond, lock, time);
#endif
    }
    note(&waiting, (unsigned)-1);
    return error;
}

#define malloc refusing_malloc
#define calloc refusing_calloc
#define free counting_free
#define pthread_mutex_init refusing_mutex_init
#define pthread_mutex_destroy counting_mutex_destroy
#define pthread_cond_init refusing_cond_init
#define pthread_cond_destroy counting_cond_destroy
#define pthread_attr_init refusing_attr_init
#define pthread_attr_destroy counting_attr_destroy
#define pthread_create refusing_create
#define pthread_atfork refusing_atfork
#define pthread_cond_signal spying_signal
#define pthread_cond_wait spying_wait
#define pthread_cond_timedwait spying_timed_wait
#define pthread_cond_timedwait_relative_np spying_timed_wait
#include "_gate.c"
#include "_pace.c"
#include "_turns.c"
#include "_process.c"
#include "_reorder.c"
#include "_stopwatch.c"

#include "_claim.c"
#include "_epoch.c"
#include "_pool.c"
#include "_worker.c"
#undef malloc
#undef calloc
#undef free
#undef pthread_mutex_init
#undef pthread_mutex_destroy
#undef pthread_cond_init
#undef pthread_cond_destroy
#undef pthread_attr_init
#undef pthread_attr_destroy
#undef pthread_create
#undef pthread_atfork
#undef pthread_cond_signal
#undef pthread_cond_wait
#undef pthread_cond_timedwait
#undef pthread_cond_timedwait_relative_np

/* Nothing is left but the condition of the process, which is made once. */
static void check_nothing_is_left(void)
{
    CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
    CHECK_EQUAL(atomic_load(&blocks), 0);
    CHECK_EQUAL(atomic_load(&objects), process.has_condition ? 1 : 0);
}

/* ---- hooks: item p of batch n is things[2 * n + p], batch n is things[BATCH + n] ---- */

enum { MOST_WORKERS = 4, BATCH = 64, THINGS = 128, STACK_SIZE = 1 << 18 };

static atomic_uint things[THINGS]; /* made, and not come back yet */
static atomic_uint entered, left;
static bool gate_is_shut; /* set while nobody works */
static tally gate, at_gate, freed;

static void *make(uint64_t number)
{
    CHECK(number < THINGS);
    CHECK_EQUAL(atomic_fetch_add(&things[number], 1), 0);
    return &things[number];
}

static void come_back(void *thing)
{
    CHECK_EQUAL(atomic_fetch_sub((atomic_uint *)thing, 1), 1);
}

static void *enter(void *context, dlrs_worker *worker)
{
    (void)worker;
    atomic_fetch_add(&entered, 1);
    return context;
}

static void leave(void *context, dlrs_worker *worker)
{
    (void)context;
    (void)worker;
    atomic_fetch_add(&left, 1);
}

/* Batches of an epoch that was made with LATER have other numbers, so that it may be there beside another one. */
static char later_epoch;
#define LATER ((void *)&later_epoch)
enum { LATER_BATCH = 16, NUM_LANES = 2, LANE_LENGTH = 5 };

static void *outcome_of(dlrs_worker *worker, const dlrs_run *run)
{
    uint64_t batch = run->batch + (run->user == LATER ? LATER_BATCH : 0);
    if (gate_is_shut) {
        tally_add(&at_gate);
        tally_await(&gate, 1);
    }
    if (run->singly) {
        if (!dlrs_worker_finish_item(run, make(batch * 2 + run->position), false))
            return NULL;
        for (uint64_t p = 0; p < run->slot->started; p++)
            come_back(run->slot->results[p]);
    }
    if (run->epoch->num_lanes > 0)
        dlrs_worker_leave_lane(worker, run, run->batch / NUM_LANES == LANE_LENGTH, false);
    return make(BATCH + batch);
}

static void work(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    (void)context;
    dlrs_run run = *first;
    bool more;
    do {
        void *unwanted;
        dlrs_epoch *orphan;
        more = dlrs_worker_next(worker, &run, outcome_of(worker, &run), &unwanted, &orphan);
        if (unwanted != NULL)
            come_back(unwanted);
        if (orphan != NULL) {
            dlrs_epoch_free(orphan);
            tally_add(&freed);
        }
    } while (more);
}

static dlrs_pool_options options_for(unsigned num_threads)
{
    static int context;
    return (dlrs_pool_options){.hooks = {.enter = enter, .work = work, .leave = leave, .context = &context},
                               .num_threads = num_threads,
                               .stack_size = STACK_SIZE};
}

static dlrs_pool *new_pool(unsigned num_threads)
{
    dlrs_pool_options options = options_for(num_threads);
    dlrs_pool *pool = NULL;
    int os_error = 0;
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_OK);
    return pool;
}

static void end_pool(dlrs_pool *pool)
{
    dlrs_pool_stop(pool);
    CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
    dlrs_pool_release(pool);
    CHECK_EQUAL(atomic_load(&entered), atomic_load(&left));
    for (unsigned i = 0; i < THINGS; i++)
        CHECK_EQUAL(atomic_load(&things[i]), 0);
    check_nothing_is_left();
}

static dlrs_epoch_options epoch_options(uint64_t batch_size, uint64_t capacity, uint64_t batches, uint64_t items)
{
    return (dlrs_epoch_options){
        .batch_size = batch_size, .capacity = capacity, .batches_in_parallel = batches, .items_in_parallel = items};
}

static dlrs_epoch *new_epoch(dlrs_pool *pool, dlrs_epoch_options options, uint64_t num_items)
{
    dlrs_epoch *epoch = NULL;
    CHECK_EQUAL(dlrs_epoch_new(pool, &options, NULL, &epoch), DLRS_OK);
    dlrs_epoch_offer(epoch, num_items, true);
    return epoch;
}

/* Take batch `number`, which may be lost if the memory is. */
static bool take(dlrs_epoch *epoch, uint64_t number, bool may_be_lost)
{
    void *outcome = NULL;
    uint64_t batch;
    CHECK_EQUAL(dlrs_epoch_wait(epoch, CHECK_PLENTY_NS), DLRS_OK);
    dlrs_status status = dlrs_epoch_take(epoch, &outcome, &batch);
    if (may_be_lost && status == DLRS_LOST)
        return false;
    CHECK_EQUAL(status, DLRS_OK);
    CHECK(outcome == &things[BATCH + number]);
    come_back(outcome);
    return true;
}

/* True if the epoch was freed here, false if a worker is to. */
static bool end(dlrs_epoch *epoch)
{
    dlrs_epoch_cancel(epoch);
    for (void *found; (found = dlrs_epoch_reclaim(epoch)) != NULL;)
        come_back(found);
    bool mine = dlrs_epoch_leave(epoch);
    if (mine)
        dlrs_epoch_free(epoch);
    return mine;
}

/* ---- the ring without memory ---- */

static void test_ring_is_made_whole_or_not_at_all(void)
{
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        for (unsigned all = 0; all < 2; all++) {
            bool made = false;
            for (long calls = 0; !made; calls++) {
                dlrs_ring ring;
                refuse_after(calls, all);
                made = dlrs_ring_init(&ring, capacity);
                CHECK_EQUAL(atomic_load(&last_refusal) == 0, made);
                if (made) {
                    CHECK(calls >= 2);
                    dlrs_ring_free(&ring);
                }
                CHECK_EQUAL(atomic_load(&blocks), 0);
            }
        }
    }
    allow_all();
}

static void test_ring_that_cannot_grow_goes_on_with_what_it_has(void)
{
    enum { CAPACITY = 9 };
    bool grew_at_last = false;
    for (long calls = 0; !grew_at_last; calls++) {
        dlrs_ring ring;
        CHECK(dlrs_ring_init(&ring, CAPACITY));
        uint64_t size = ring.size;
        for (uint64_t lap = 0; lap < 3; lap++) {
            refuse_after(calls, true);
            while (ring.claimed < ring.taken + CAPACITY) {
                dlrs_slot *slot = dlrs_ring_claim(&ring, 1, false);
                if (slot == NULL)
                    break;
                CHECK_EQUAL(slot->batch, ring.claimed - 1);
                slot->state = DLRS_SLOT_DONE;
                slot->outcome = slot;
            }
            bool refused = atomic_load(&last_refusal) != 0;
            allow_all();
            CHECK_EQUAL(refused, ring.claimed < ring.taken + CAPACITY);
            CHECK(dlrs_ring_has_room(&ring) == refused);
            CHECK(ring.claimed - ring.taken >= size);
            for (uint64_t i = 0; i < 3; i++) { /* so that it is full at another place the next time */
                CHECK(dlrs_ring_head_ready(&ring));
                CHECK_EQUAL(dlrs_ring_head(&ring)->batch, ring.taken);
                dlrs_ring_release_head(&ring);
            }
            grew_at_last = !refused;
        }
        while (dlrs_ring_has_room(&ring)) /* now there is memory */
            CHECK(dlrs_ring_claim(&ring, 1, false) != NULL);
        CHECK_EQUAL(ring.size, CAPACITY);
        dlrs_ring_free(&ring);
        CHECK_EQUAL(atomic_load(&blocks), 0);
    }
}

static void test_batch_without_memory_for_its_results_is_lost(void)
{
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 2));
    refuse_after(0, true);
    CHECK_EQUAL(dlrs_ring_claim(&ring, 3, true)->state, DLRS_SLOT_LOST);
    allow_all();
    CHECK_EQUAL(dlrs_ring_claim(&ring, 3, true)->state, DLRS_SLOT_OPEN);
    CHECK(dlrs_ring_head_ready(&ring));
    dlrs_ring_release_head(&ring);
    CHECK(!dlrs_ring_head_ready(&ring));
    CHECK_EQUAL(dlrs_ring_claim(&ring, 3, true)->state, DLRS_SLOT_OPEN);
    for (unsigned i = 0; i < 2; i++) {
        dlrs_ring_head(&ring)->state = DLRS_SLOT_DONE;
        dlrs_ring_release_head(&ring);
    }
    refuse_after(0, true);
    CHECK_EQUAL(dlrs_ring_claim(&ring, 3, true)->state, DLRS_SLOT_OPEN); /* the memory of an earlier batch does */
    CHECK_EQUAL(dlrs_ring_claim(&ring, 4, true)->state, DLRS_SLOT_LOST);
    allow_all();
    dlrs_ring_free(&ring);
    CHECK_EQUAL(atomic_load(&blocks), 0);
}

static void test_refused_size_is_lost_too(void)
{
    /* Below the check for overflow, so that malloc is asked, and says no. */
    dlrs_ring ring;
    CHECK(dlrs_ring_init(&ring, 1));
    CHECK_EQUAL(dlrs_ring_claim(&ring, SIZE_MAX / sizeof(void *), true)->state, DLRS_SLOT_LOST);
    dlrs_ring_free(&ring);
}

/* ---- the pool without memory and threads ---- */

static void pool_without_fork_handler(void)
{
    no_fork_handler = true;
    for (unsigned i = 0; i < 2; i++) {
        dlrs_pool_options options = options_for(1);
        dlrs_pool *pool = NULL;
        int os_error = 0;
        CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_NO_MEMORY);
        CHECK(pool == NULL);
        check_nothing_is_left();
    }
}

/* Run `body` in a child process, which has to succeed. */
static void run_in_child(void (*body)(void))
{
    int status;
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(CHECK_WATCHDOG_S / 2);
        body();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

static void test_pool_is_not_made_where_forks_would_go_unnoticed(void)
{
    /* The handler is installed once, so this has a process of its own, before any other pool. */
    run_in_child(pool_without_fork_handler);
}

static void use_the_process(void)
{
    CHECK(dlrs_process_wait(0));
    CHECK(process.members == NULL && process.live == 0);
    dlrs_process_stop();
}

static void test_child_does_not_inherit_a_lock_that_is_held(void)
{
    end_pool(new_pool(1)); /* installs the handler */
    pthread_mutex_lock(&process.lock);
    run_in_child(use_the_process);
    pthread_mutex_unlock(&process.lock);
}

static void test_first_pool_prepares_the_process_or_the_next_one_does(void)
{
    for (unsigned i = 0; i < 2; i++) {
        dlrs_pool_options options = options_for(1);
        dlrs_pool *pool = NULL;
        int os_error = 0;
        CHECK(!process.has_condition);
        refuse_after(3, false); /* memory, lock and condition of the pool; then the condition of the process */
        CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_NO_MEMORY);
        allow_all();
        CHECK(pool == NULL && !process.has_condition);
        check_nothing_is_left();
    }
    end_pool(new_pool(1));
    CHECK(process.has_condition);
}

/* Those that were started end by themselves, and then nothing is left of the pool. */
static void end_failed_pool(dlrs_pool *pool)
{
    CHECK(!dlrs_pool_is_usable(pool));
    CHECK(dlrs_pool_wait(pool, UINT64_MAX));
    dlrs_pool_release(pool);
}

static void test_pool_is_made_whole_or_not_at_all(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned all = 0; all < 2; all++) {
            bool made = false;
            unsigned without_thread = 0;
            for (long calls = 0; !made; calls++) {
                dlrs_pool_options options = options_for(workers);
                dlrs_pool *pool = NULL;
                int os_error = 0;
                atomic_store(&entered, 0);
                atomic_store(&left, 0);
                refuse_after(calls, all);
                dlrs_status status = dlrs_pool_new(&options, &pool, &os_error);
                int refused = atomic_load(&last_refusal);
                allow_all();
                made = status == DLRS_OK;
                CHECK_EQUAL(made, refused == 0);
                CHECK_EQUAL(pool != NULL, made || status == DLRS_NO_THREAD);
                if (made) {
                    end_pool(pool);
                    continue;
                }
                CHECK(status == DLRS_NO_MEMORY || status == DLRS_NO_THREAD);
                CHECK_EQUAL(os_error, status == DLRS_NO_THREAD ? refused : 0);
                if (status == DLRS_NO_THREAD) {
                    without_thread++;
                    end_failed_pool(pool);
                }
                CHECK_EQUAL(atomic_load(&entered), atomic_load(&left));
                CHECK(process.live == 0 && process.members == NULL);
                check_nothing_is_left();
            }
            CHECK_EQUAL(without_thread, workers + 1); /* each of them, and the attributes */
        }
    }
}

static void test_impossible_stack_is_told(void)
{
    dlrs_pool_options options = options_for(2);
    options.stack_size = 1;
    for (unsigned i = 0; i < 2; i++) {
        dlrs_pool *pool = NULL;
        int os_error = 0;
        CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_NO_THREAD);
        CHECK(os_error != 0);
        end_failed_pool(pool);
        check_nothing_is_left();
        options.stack_size = 0;
    }
}

static void test_failed_pool_leaves_others_alone(void)
{
    dlrs_pool *before = new_pool(2);
    dlrs_pool_options options = options_for(3);
    dlrs_pool *pool = NULL;
    int os_error = 0;
    refuse_after(6, false); /* memory, lock, condition, attributes, and two threads */
    CHECK_EQUAL(dlrs_pool_new(&options, &pool, &os_error), DLRS_NO_THREAD);
    allow_all();
    CHECK_EQUAL(os_error, EAGAIN);
    end_failed_pool(pool);
    CHECK(dlrs_pool_is_usable(before));
    CHECK_EQUAL(process.live, 2);
    CHECK(process.members == &before->member && before->member.next == NULL);
    dlrs_epoch *epoch = new_epoch(before, epoch_options(1, 2, 2, 1), 3);
    for (uint64_t n = 0; n < 3; n++)
        take(epoch, n, false);
    CHECK(end(epoch));
    end_pool(before);
}

static void test_epoch_is_made_whole_or_not_at_all(void)
{
    dlrs_pool *pool = new_pool(1);
    for (unsigned all = 0; all < 2; all++) {
        bool made = false;
        for (long calls = 0; !made; calls++) {
            dlrs_epoch_options options = {
                .batch_size = 1, .capacity = 9, .batches_in_parallel = 1, .items_in_parallel = 1};
            dlrs_epoch *epoch = NULL;
            long before = atomic_load(&blocks);
            refuse_after(calls, all);
            dlrs_status status = dlrs_epoch_new(pool, &options, NULL, &epoch);
            int refused = atomic_load(&last_refusal);
            allow_all();
            made = status == DLRS_OK;
            CHECK_EQUAL(made, refused == 0);
            CHECK_EQUAL(made, epoch != NULL);
            if (made)
                CHECK(end(epoch));
            else
                CHECK_EQUAL(status, DLRS_NO_MEMORY);
            CHECK_EQUAL(atomic_load(&blocks), before);
            CHECK(pool->asked_first == NULL);
        }
    }
    end_pool(pool);
}

/* A whole epoch of ten batches, of which memory fails somewhere; `stop_at` batches are taken. How many were lost. */
static unsigned epoch_with_refusals(unsigned workers, unsigned items, long calls, bool all, uint64_t stop_at)
{
    unsigned lost = 0;
    dlrs_pool *pool = new_pool(workers);
    dlrs_epoch_options options = {.batch_size = 2, .capacity = 9, .batches_in_parallel = 9, .items_in_parallel = items};
    dlrs_epoch *epoch = NULL;
    refuse_after(calls, all);
    dlrs_status status = dlrs_epoch_new(pool, &options, NULL, &epoch);
    if (status == DLRS_OK) {
        uint64_t freed_before = tally_count(&freed);
        dlrs_epoch_offer(epoch, 19, true);
        for (uint64_t n = 0; n < stop_at; n++)
            lost += !take(epoch, n, items > 1);
        if (!end(epoch))
            tally_await(&freed, freed_before + 1);
    } else {
        CHECK_EQUAL(status, DLRS_NO_MEMORY);
        CHECK(atomic_load(&last_refusal) != 0);
    }
    end_pool(pool);
    allow_all();
    CHECK(lost == 0 || atomic_load(&last_refusal) != 0);
    return lost;
}

static void test_whole_epochs_survive_every_refusal(void)
{
    for (unsigned workers = 1; workers <= check_rounds(3); workers++) {
        for (unsigned items = 1; items <= 2; items++) {
            for (unsigned all = 0; all < 2; all++) {
                unsigned most_lost = 0;
                bool refused = true;
                for (long calls = 0; refused; calls++) {
                    unsigned lost = epoch_with_refusals(workers, items, calls, all, 10);
                    refused = atomic_load(&last_refusal) != 0;
                    if (lost > most_lost)
                        most_lost = lost;
                    CHECK(all || lost <= 1);
                }
                CHECK_EQUAL(most_lost, items == 1 ? 0 : all ? 10 : 1);
            }
        }
    }
}

static void test_epochs_end_early_after_every_refusal(void)
{
    for (unsigned workers = 1; workers <= 2; workers++) {
        for (unsigned items = 1; items <= 2; items++) {
            for (long calls = 0; calls < 25; calls++)
                epoch_with_refusals(workers, items, calls, calls % 2 == 0, (uint64_t)calls % 5);
        }
    }
}

typedef enum kind { UNORDERED, OWN_SIZES, LANES, ONE_AFTER_ANOTHER, NUM_KINDS } kind;

/* Take what is offered of an epoch; with lanes, until they end. How many were lost. */
static unsigned take_all(dlrs_epoch *epoch, uint64_t num_batches, uint64_t first)
{
    unsigned lost = 0;
    bool is_taken[LATER_BATCH] = {false};
    for (uint64_t n = 0; n < num_batches; n++) {
        void *outcome = NULL;
        uint64_t batch;
        dlrs_status status = dlrs_epoch_wait(epoch, CHECK_PLENTY_NS);
        if (status == DLRS_END && epoch->num_lanes > 0)
            return lost;
        CHECK_EQUAL(status, DLRS_OK);
        status = dlrs_epoch_take(epoch, &outcome, &batch);
        CHECK(status == DLRS_OK || status == DLRS_LOST);
        CHECK(batch < LATER_BATCH && !is_taken[batch] && (epoch->unordered || batch == n));
        is_taken[batch] = true;
        lost += status == DLRS_LOST;
        if (status == DLRS_OK) {
            CHECK(outcome == &things[BATCH + first + batch]);
            come_back(outcome);
        }
    }
    return lost;
}

/* How many batches of one could be offered. */
static uint64_t offer_all(dlrs_epoch *epoch)
{
    enum { BATCHES = 10 };
    if (epoch->batch_size != 0) {
        dlrs_epoch_offer(epoch, epoch->num_lanes > 0 ? UINT64_MAX : BATCHES * epoch->batch_size, true);
        return epoch->num_lanes > 0 ? UINT64_MAX : BATCHES;
    }
    uint64_t n = 0;
    while (n < BATCHES && dlrs_epoch_offer_batch(epoch, n % 3) == DLRS_OK)
        n++;
    CHECK(n == BATCHES || atomic_load(&last_refusal) == ENOMEM);
    dlrs_epoch_offer(epoch, 0, true);
    return n;
}

static void epoch_of_kind_with_refusals(kind k, unsigned workers, unsigned items, long calls, bool all)
{
    dlrs_pool *pool = new_pool(workers);
    dlrs_epoch_options options = epoch_options(k == OWN_SIZES ? 0 : k == LANES ? 1 : 2, 9, 9, k == LANES ? 1 : items);
    options.num_lanes = k == LANES ? NUM_LANES : 0;
    options.unordered = k == UNORDERED;
    dlrs_epoch *epoch = NULL, *later = NULL;
    unsigned lost = 0;
    refuse_after(calls, all);
    dlrs_status status = dlrs_epoch_new(pool, &options, NULL, &epoch);
    if (status == DLRS_OK && k == ONE_AFTER_ANOTHER) {
        options.after = epoch;
        status = dlrs_epoch_new(pool, &options, LATER, &later);
    }
    CHECK(status == DLRS_OK || status == DLRS_NO_MEMORY);
    CHECK(status == DLRS_OK || atomic_load(&last_refusal) != 0);
    uint64_t freed_before = tally_count(&freed), to_be_freed = 0;
    uint64_t num_later = later == NULL ? 0 : offer_all(later);
    if (epoch != NULL) {
        lost += take_all(epoch, offer_all(epoch), 0);
        to_be_freed += !end(epoch);
    }
    if (later != NULL) {
        lost += take_all(later, num_later, LATER_BATCH);
        to_be_freed += !end(later);
    }
    tally_await(&freed, freed_before + to_be_freed);
    end_pool(pool);
    allow_all();
    CHECK(lost == 0 || (items > 1 && atomic_load(&last_refusal) != 0));
    CHECK(all || lost <= 1);
}

static void test_epochs_of_every_kind_survive_every_refusal(void)
{
    for (kind k = 0; k < NUM_KINDS; k++) {
        for (unsigned workers = 1; workers <= check_rounds(3); workers++) {
            for (unsigned items = 1; items <= 2; items++) {
                for (unsigned all = 0; all < 2; all++) {
                    bool refused = true;
                    for (long calls = 0; refused; calls++) {
                        epoch_of_kind_with_refusals(k, workers, items, calls, all);
                        refused = atomic_load(&last_refusal) != 0;
                    }
                }
            }
        }
    }
}

static void test_last_one_out_frees_everything(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        tally_init(&gate);
        tally_init(&at_gate);
        gate_is_shut = true;
        dlrs_pool *pool = new_pool(workers);
        dlrs_epoch *epoch = new_epoch(pool, epoch_options(1, 9, workers, 1), 9);
        tally_await(&at_gate, workers);
        CHECK(!end(epoch));
        dlrs_pool_release(pool);
        CHECK(atomic_load(&blocks) > 0);
        tally_add(&gate);
        CHECK(dlrs_process_wait(CHECK_PLENTY_NS));
        while (atomic_load(&blocks) != 0) /* the last worker frees the pool after it said that it left */
            sched_yield();
        check_nothing_is_left();
        for (unsigned i = 0; i < THINGS; i++)
            CHECK_EQUAL(atomic_load(&things[i]), 0);
        gate_is_shut = false;
        tally_free(&gate);
        tally_free(&at_gate);
    }
}

/* ---- waking ---- */

/* Wait until all workers are parked and none has been woken. How many batches of the epoch are claimed by then. */
static uint64_t claimed_when_all_are_parked(dlrs_pool *pool, dlrs_epoch *epoch)
{
    for (;;) {
        pthread_mutex_lock(&spy_lock);
        uint64_t seen = changes;
        pthread_mutex_unlock(&spy_lock);
        pthread_mutex_lock(&pool->lock);
        bool all_are_parked = pool->parked == pool->num_threads && pool->waking == 0;
        uint64_t claimed = epoch->ring.claimed;
        pthread_mutex_unlock(&pool->lock);
        if (all_are_parked)
            return claimed;
        pthread_mutex_lock(&spy_lock);
        while (changes == seen)
            pthread_cond_wait(&spy_news, &spy_lock);
        pthread_mutex_unlock(&spy_lock);
    }
}

static void test_offer_wakes_a_parked_worker(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        dlrs_epoch_options options = {.batch_size = 2, .capacity = 2, .batches_in_parallel = 2, .items_in_parallel = 1};
        dlrs_epoch *epoch = NULL;
        CHECK_EQUAL(dlrs_epoch_new(pool, &options, NULL, &epoch), DLRS_OK);
        for (uint64_t n = 0; n < 20; n++) {
            CHECK_EQUAL(claimed_when_all_are_parked(pool, epoch), n);
            dlrs_epoch_offer(epoch, 1, false);
            dlrs_epoch_offer(epoch, 1, false);
            take(epoch, n, false);
        }
        CHECK_EQUAL(claimed_when_all_are_parked(pool, epoch), 20);
        dlrs_epoch_offer(epoch, 1, false);
        dlrs_epoch_offer(epoch, 0, true);
        take(epoch, 20, false);
        CHECK(end(epoch));
        end_pool(pool);
    }
}

static void test_take_wakes_a_parked_worker(void)
{
    /* The ring is full and everybody is parked; each batch that is taken makes room for one more. */
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        dlrs_epoch *epoch = new_epoch(pool, epoch_options(1, 3, 4, 1), 20);
        for (uint64_t n = 0; n < 20; n++) {
            CHECK_EQUAL(claimed_when_all_are_parked(pool, epoch), n + 3 < 20 ? n + 3 : 20);
            take(epoch, n, false);
        }
        CHECK(end(epoch));
        end_pool(pool);
    }
}

static void test_as_many_workers_are_woken_as_there_is_work_for(void)
{
    for (unsigned batches = 0; batches <= MOST_WORKERS; batches++) {
        tally_init(&gate);
        tally_init(&at_gate);
        gate_is_shut = true;
        dlrs_pool *pool = new_pool(MOST_WORKERS);
        await(&parked, MOST_WORKERS);
        atomic_store(&wakes, 0);
        dlrs_epoch *epoch = new_epoch(pool, epoch_options(1, 9, 9, 1), batches);
        tally_await(&at_gate, batches); /* all at once: each claim woke the next */
        await(&parked, MOST_WORKERS - batches);
        CHECK_EQUAL(atomic_load(&wakes), batches);
        tally_add(&gate);
        for (uint64_t n = 0; n < batches; n++)
            take(epoch, n, false);
        CHECK(end(epoch));
        end_pool(pool);
        gate_is_shut = false;
        tally_free(&gate);
        tally_free(&at_gate);
    }
}

static uint64_t idle_after_an_epoch(dlrs_pool *pool)
{
    dlrs_epoch *epoch = new_epoch(pool, epoch_options(1, 3, 2, 1), 3);
    for (uint64_t n = 0; n < 3; n++)
        take(epoch, n, false);
    claimed_when_all_are_parked(pool, epoch);
    CHECK(end(epoch));
    pthread_mutex_lock(&pool->lock);
    uint64_t idle_ns = pool->idle_ns;
    CHECK(pool->idle_since_ns != 0 && pool->idle_since_ns <= dlrs_now_ns());
    pthread_mutex_unlock(&pool->lock);
    return idle_ns;
}

static void test_time_between_epochs_does_not_count_as_work(void)
{
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        const struct timespec pause = {.tv_nsec = 2000000};
        uint64_t began_ns = dlrs_now_ns();
        dlrs_pool *pool = new_pool(workers);
        uint64_t idle_ns = idle_after_an_epoch(pool);
        for (unsigned n = 0; n < 3; n++) {
            nanosleep(&pause, NULL);
            uint64_t later_ns = idle_after_an_epoch(pool);
            CHECK(later_ns >= idle_ns + 2000000 && later_ns < dlrs_now_ns() - began_ns);
            CHECK(pool->last_report_ns <= dlrs_now_ns() - later_ns); /* as the pace has it */
            idle_ns = later_ns;
        }
        end_pool(pool);
    }
}

typedef struct consumer {
    pthread_t thread;
    dlrs_epoch *epoch;
    dlrs_status status;
} consumer;

static void *wait_for_head(void *argument)
{
    consumer *c = argument;
    c->status = dlrs_epoch_wait(c->epoch, CHECK_PLENTY_NS);
    return NULL;
}

static void test_finished_head_wakes_the_waiting_consumer(void)
{
    for (unsigned items = 1; items <= 2; items++) {
        tally_init(&gate);
        tally_init(&at_gate);
        gate_is_shut = true;
        dlrs_pool *pool = new_pool(2);
        consumer c = {.epoch = new_epoch(pool, epoch_options(2, 9, 1, items), 2)};
        tally_await(&at_gate, items);
        CHECK(pthread_create(&c.thread, NULL, wait_for_head, &c) == 0);
        await(&waiting, 1);
        tally_add(&gate);
        CHECK(pthread_join(c.thread, NULL) == 0);
        CHECK_EQUAL(c.status, DLRS_OK);
        take(c.epoch, 0, false);
        end(c.epoch);
        end_pool(pool);
        gate_is_shut = false;
        tally_free(&gate);
        tally_free(&at_gate);
    }
}

static void test_lost_head_wakes_the_waiting_consumer(void)
{
    dlrs_pool *pool = new_pool(1);
    dlrs_epoch_options options = {.batch_size = 2, .capacity = 2, .batches_in_parallel = 1, .items_in_parallel = 2};
    consumer c = {0};
    CHECK_EQUAL(dlrs_epoch_new(pool, &options, NULL, &c.epoch), DLRS_OK);
    CHECK(pthread_create(&c.thread, NULL, wait_for_head, &c) == 0);
    await(&parked, 1);
    await(&waiting, 1);
    refuse_after(0, true);
    dlrs_epoch_offer(c.epoch, 2, true);
    CHECK(pthread_join(c.thread, NULL) == 0);
    allow_all();
    CHECK_EQUAL(c.status, DLRS_OK);
    CHECK(!take(c.epoch, 0, true));
    CHECK(end(c.epoch));
    end_pool(pool);
}

static void test_stop_wakes_all_who_wait(void)
{
    enum { CONSUMERS = 3 };
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        dlrs_pool *pool = new_pool(workers);
        consumer consumers[CONSUMERS];
        for (unsigned i = 0; i < CONSUMERS; i++) {
            consumers[i] = (consumer){.epoch = new_epoch(pool, epoch_options(2, 9, 1, 1), 0)};
            CHECK(pthread_create(&consumers[i].thread, NULL, wait_for_head, &consumers[i]) == 0);
        }
        await(&parked, workers);
        await(&waiting, CONSUMERS);
        dlrs_pool_stop(pool);
        CHECK(dlrs_pool_wait(pool, CHECK_PLENTY_NS));
        for (unsigned i = 0; i < CONSUMERS; i++) {
            CHECK(pthread_join(consumers[i].thread, NULL) == 0);
            CHECK_EQUAL(consumers[i].status, DLRS_STOPPED);
            CHECK(end(consumers[i].epoch));
        }
        end_pool(pool);
    }
}

static void test_wakes_without_a_reason_change_nothing(void)
{
    atomic_store(&wakes_by_itself, true);
    for (unsigned workers = 1; workers <= MOST_WORKERS; workers++) {
        for (unsigned items = 1; items <= 2; items++) {
            dlrs_pool *pool = new_pool(workers);
            for (unsigned round = 0; round < check_rounds(20); round++) {
                dlrs_epoch *epoch = new_epoch(pool, epoch_options(2, 3, workers, items), 39);
                for (uint64_t n = 0; n < 20; n++)
                    take(epoch, n, false);
                end(epoch);
            }
            end_pool(pool);
        }
    }
    atomic_store(&wakes_by_itself, false);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    tally_init(&freed);
    RUN(test_pool_is_not_made_where_forks_would_go_unnoticed); /* first: before the process has a pool */
    RUN(test_ring_is_made_whole_or_not_at_all);
    RUN(test_ring_that_cannot_grow_goes_on_with_what_it_has);
    RUN(test_batch_without_memory_for_its_results_is_lost);
    RUN(test_refused_size_is_lost_too);
    RUN(test_first_pool_prepares_the_process_or_the_next_one_does);
    RUN(test_pool_is_made_whole_or_not_at_all);
    RUN(test_impossible_stack_is_told);
    RUN(test_failed_pool_leaves_others_alone);
    RUN(test_epoch_is_made_whole_or_not_at_all);
    RUN(test_whole_epochs_survive_every_refusal);
    RUN(test_epochs_end_early_after_every_refusal);
    RUN(test_epochs_of_every_kind_survive_every_refusal);
    RUN(test_last_one_out_frees_everything);
    RUN(test_offer_wakes_a_parked_worker);
    RUN(test_take_wakes_a_parked_worker);
    RUN(test_as_many_workers_are_woken_as_there_is_work_for);
    RUN(test_time_between_epochs_does_not_count_as_work);
    RUN(test_finished_head_wakes_the_waiting_consumer);
    RUN(test_lost_head_wakes_the_waiting_consumer);
    RUN(test_stop_wakes_all_who_wait);
    RUN(test_wakes_without_a_reason_change_nothing);
    if (CHECK_CAN_FORK)
        RUN(test_child_does_not_inherit_a_lock_that_is_held);
    return check_end();
}
