/* The pool, whole epochs of it, in every order in which its threads can come by, up to a bound; see schedule.h. This
 * file contains the parts it tests, with every lock, wait, atomic, clock and thread replaced by one that the scheduler
 * knows. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* as _platform.h wants it, which comes too late to say so */
#endif

#include "check.h"

#ifndef __linux__
int main(void)
{
    printf("0 passed: the scheduler is for Linux alone\n");
    return 0;
}
#else

#include "schedule.h"

#include <assert.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/wait.h>

#include "_platform.h"

/* ---- the parts, on the scheduler ---- */

static unsigned usable_processors; /* as the pool believes */
static long blocks;         /* of memory, not freed yet */
static long allowance;      /* the allocation that finds 1 here is refused */
static bool was_refused;

static void *counting(void *block)
{
    blocks += block != NULL;
    return block;
}

static bool is_refused(void)
{
    bool refused = allowance-- == 1;
    was_refused = was_refused || refused;
    return refused;
}

static void *refusing_malloc(size_t size)
{
    return is_refused() ? NULL : counting(malloc(size));
}

static void *refusing_calloc(size_t count, size_t size)
{
    return is_refused() ? NULL : counting(calloc(count, size));
}

static void counting_free(void *block)
{
    blocks -= block != NULL;
    free(block);
}

static bool workers_compute;

static int no_sigmask(sigset_t *before)
{
    if (before != NULL)
        sigemptyset(before);
    return 0;
}

static uint64_t deadline_after(uint64_t timeout_ns)
{
    return timeout_ns == UINT64_MAX ? SCHEDULE_FOREVER : schedule_now() + timeout_ns;
}

#define malloc refusing_malloc
#define calloc refusing_calloc
#define free counting_free
#define dlrs_now_ns schedule_now
#define dlrs_deadline_after deadline_after
#define dlrs_thread_busy_ns() clock_ns
#define dlrs_process_busy_ns() (workers_compute ? clock_ns : 0)
#define dlrs_busy_of_thread_ns(thread) ((void)(thread), workers_compute ? clock_ns : 0)
#define dlrs_cond_init(cond) schedule_init_cond(cond)
#define dlrs_cond_wait_until(cond, lock, until_ns) schedule_wait_until(cond, lock, until_ns, __func__)
#define dlrs_mutex_init(lock) schedule_init_mutex(lock)
#define dlrs_sleep(duration_ns) schedule_sleep(duration_ns, __func__)
#define dlrs_name_thread(name) ((void)(name))
#define dlrs_usable_processors() usable_processors
#define dlrs_relax() schedule_relax(__func__)
#define pthread_mutex_lock(lock) schedule_lock(lock, __func__)
#define pthread_mutex_unlock(lock) schedule_unlock(lock, __func__)
#define pthread_mutex_destroy schedule_destroy_mutex
#define pthread_cond_signal(cond) schedule_signal(cond, false, __func__)
#define pthread_cond_broadcast(cond) schedule_signal(cond, true, __func__)
#define pthread_cond_wait(cond, lock) schedule_wait_until(cond, lock, SCHEDULE_FOREVER, __func__)
#define pthread_cond_destroy schedule_destroy_cond
#define pthread_create(made, attributes, body, argument) schedule_create(made, body, argument)
#define pthread_atfork(before, in_parent, in_child) ((void)(in_child), 0)
#define pthread_sigmask(how, set, before) no_sigmask(before)

#include "_process.c" /* its atomic changes in forks alone */

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_fetch_add
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub
#define atomic_load(object) (schedule_look(__func__), *(object))
#define atomic_load_explicit(object, order) atomic_load(object)
#define atomic_store(object, value) (schedule_change(__func__), (void)(*(object) = (value)))
#define atomic_store_explicit(object, value, order) atomic_store(object, value)
#define atomic_fetch_add(object, value) (schedule_change(__func__), (void)(*(object) += (value)))
#define atomic_fetch_add_explicit(object, value, order) atomic_fetch_add(object, value)
#define atomic_fetch_sub(object, value) (schedule_change(__func__), (void)(*(object) -= (value)))

#include "_gate.c"
#include "_pace.c"
#include "_turns.c"
#include "_reorder.c"
#include "_stopwatch.c"

#include "_claim.c"
#include "_epoch.c"
#include "_pool.c"
#include "_worker.c"

#undef malloc
#undef calloc
#undef free

/* ---- scenarios ---- */

enum { MOST_BATCHES = 8, MOST_ITEMS = 4, MOST_LANES = 2, ALL = 1000, EACH };

typedef enum ending {
    RELEASE_AT_ONCE, /* give the pool up, wherever the workers are */
    STOP_AND_WAIT,
} ending;

typedef struct scenario {
    const char *name;
    unsigned bound;         /* see schedule.h */
    timeouts timeouts;
    unsigned workers;
    unsigned processors;    /* more of them than workers: those who wait look around for a while first */
    dlrs_epoch_options options;
    uint64_t num_items;     /* of an epoch; with lanes, of each of them */
    uint64_t run_ns;        /* what a run takes */
    unsigned takes;         /* then the epoch is cancelled; or ALL */
    unsigned consumers;     /* each on a thread and with an epoch of its own */
    ending ending;
    uint64_t failing;       /* this item fails, and no more of its batch are begun; with lanes, all of them end */
    int starts;             /* threads that can be started; less than 0: all */
    long allocates;         /* allocations before one is refused; 0: none is */
    bool offers_in_pieces;
    bool own_sizes;         /* batches of 0, 1, 2, 3, 1 .. items */
    bool has_later;         /* the first epoch has one that comes after it, and is cancelled when it is done */
    bool later_first;       /* or it is taken before the first */
    bool stopped;           /* a thread stops the pool */
    bool exits;             /* or the process */
    bool exclusive;
    bool adaptive;
    bool computes;          /* workers are run all the time, also while nothing gets finished */
} scenario;

typedef struct job {
    dlrs_epoch *epoch;
    dlrs_epoch_options options;
    uint64_t num_batches;             /* UINT64_MAX with lanes */
    uint64_t sizes[MOST_BATCHES];
    uint64_t offered;
    unsigned started[MOST_BATCHES][MOST_ITEMS];
    unsigned char items[MOST_BATCHES][MOST_ITEMS];
    unsigned char outcomes[MOST_BATCHES]; /* 1 when it is made, 2 when it has come back */
    unsigned char taken[MOST_BATCHES];
    unsigned lost;
    uint64_t begun, takes;            /* batches */
    uint64_t read[MOST_LANES];
    bool is_read[MOST_LANES];
    bool fails;
    bool is_freed;
} job;

static const scenario *now;
static job jobs[3];
static unsigned num_jobs, consumers_left;
static pthread_mutex_t consumer_lock, gil;
static pthread_cond_t consumer_left;
static dlrs_pool *pool; /* while its owner has it */
static unsigned entered, left;

static void attach(void *context)
{
    (void)context;
    schedule_lock(&gil, "attach");
}

static void detach(void *context)
{
    (void)context;
    schedule_unlock(&gil, "detach");
}

static void *make(unsigned char *thing)
{
    SCHEDULE_CHECK(*thing == 0);
    *thing = 1;
    return thing;
}

static void come_back(void *thing)
{
    SCHEDULE_CHECK(*(unsigned char *)thing == 1);
    *(unsigned char *)thing = 2;
}

/* ---- what holds whenever the lock of the pool is free ---- */

static void check_epoch(const dlrs_epoch *epoch)
{
    const dlrs_ring *ring = &epoch->ring;
    uint64_t open = 0;
    SCHEDULE_CHECK(ring->taken <= ring->claimed && ring->claimed - ring->taken <= ring->capacity);
    SCHEDULE_CHECK(ring->claimed <= epoch->batches_offered);
    SCHEDULE_CHECK(is_ready(epoch) == dlrs_ring_head_ready(ring));
    /* A consumer whose batch is ready has been told, and not only once a worker is idle. */
    SCHEDULE_CHECK(now->adaptive || !is_ready(epoch) || !schedule_is_waited_for(&epoch->head_ready));
    for (uint64_t n = ring->taken; n < ring->claimed; n++) {
        const dlrs_slot *slot = ring->slots[n % ring->size], *listed = epoch->first_unstarted;
        SCHEDULE_CHECK(slot->state != DLRS_SLOT_FREE && slot->place == n);
        SCHEDULE_CHECK(epoch->unordered || slot->batch == n);
        if (slot->state != DLRS_SLOT_OPEN) {
            SCHEDULE_CHECK(!epoch->unordered || is_ready(epoch));
            continue;
        }
        open += !dlrs_slot_is_ending(slot);
        while (listed != NULL && listed != slot)
            listed = listed->next_unstarted;
        SCHEDULE_CHECK((listed != NULL) == (slot->started < slot->num_items && !slot->closed));
        SCHEDULE_CHECK(epoch->items_in_parallel == 1 || slot->started - slot->finished <= epoch->items_in_parallel);
    }
    SCHEDULE_CHECK(open == epoch->in_progress && open <= epoch->batches_in_parallel);
    const dlrs_epoch *earlier = epoch->after;
    if (earlier != NULL) {
        SCHEDULE_CHECK(earlier->before == epoch);
        SCHEDULE_CHECK(ring->claimed == 0 || earlier->ring.claimed == earlier->batches_offered);
        SCHEDULE_CHECK(ring->claimed - ring->taken + earlier->ring.claimed - earlier->ring.taken <= ring->capacity);
        SCHEDULE_CHECK(open + earlier->in_progress <= epoch->batches_in_parallel);
    }
}

static void schedule_unlocks(const pthread_mutex_t *lock, const char *place)
{
    if (pool == NULL || lock != &pool->lock)
        return;
    SCHEDULE_CHECK(pool->waking <= pool->parked && pool->parked + pool->awake <= pool->num_threads);
    const dlrs_epoch *epoch = pool->asked_first;
    if (epoch != NULL) {
        do {
            check_epoch(epoch);
            epoch = epoch->next;
        } while (epoch != pool->asked_first);
    }
    /* Nobody is left parked who could claim something. The worker that finished an item claims next, and one that found
     * no memory for a slot of the ring tries again. */
    bool goes_on = strcmp(place, "dlrs_worker_finish_item") == 0
                   || (now->allocates > 0 && allowance <= 0
                       && (strcmp(place, "worker_claim") == 0 || strcmp(place, "dlrs_worker_next") == 0));
    if (!now->adaptive && pool->parked > pool->waking && !goes_on)
        SCHEDULE_CHECK(pool->coming > 0 || pool->waking > 0 || pool->spinning || !dlrs_claimable_locked(pool));
}

/* `num_finished` says that something goes on, `failed` is set before `stopping` is, and the gate has no lock. */
static bool schedule_needs_no_lock(const char *place)
{
    static const char *const places[] = {"dlrs_worker_next", "dlrs_worker_piece", "worker_main",
                                         "dlrs_gate_ask",    "dlrs_gate_passed",  "dlrs_gate_stand_aside"};
    for (unsigned i = 0; i < sizeof places / sizeof places[0]; i++) {
        if (strcmp(place, places[i]) == 0)
            return true;
    }
    return false;
}

/* ---- hooks ---- */

static void *enter(void *context, dlrs_worker *worker)
{
    (void)worker;
    entered++;
    return context;
}

static void leave(void *context, dlrs_worker *worker)
{
    (void)context;
    (void)worker;
    left++;
}

static void begin_item(job *j, const dlrs_run *run, uint64_t position)
{
    SCHEDULE_CHECK(run->batch < MOST_BATCHES && position < MOST_ITEMS);
    SCHEDULE_CHECK(j->started[run->batch][position]++ == 0);
}

/* Is there a batch? */
static bool read_lane(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    uint64_t lane = run->batch % j->options.num_lanes;
    point("comes to", "read_lane");
    SCHEDULE_CHECK(!j->is_read[lane]);
    j->is_read[lane] = true;
    point("is in", "read_lane");
    uint64_t number = j->read[lane]++;
    SCHEDULE_CHECK(number == run->batch / j->options.num_lanes);
    j->is_read[lane] = false;
    bool fails = j->fails && run->batch == now->failing;
    dlrs_worker_leave_lane(worker, run, number == now->num_items, fails);
    return number < now->num_items;
}

static void *outcome_of(job *j, dlrs_worker *worker, const dlrs_run *run)
{
    static unsigned char no_batch;
    if (run->position == 0) {
        SCHEDULE_CHECK(j->begun++ < j->takes + j->options.capacity);
        if (j->options.batch_size == 0)
            SCHEDULE_CHECK(run->batch_items == j->sizes[run->batch]);
    }
    schedule_spend(now->run_ns);
    if (run->singly) {
        begin_item(j, run, run->position);
        bool fails = j->fails && run->batch * j->options.batch_size + run->position == now->failing;
        if (!dlrs_worker_finish_item(run, make(&j->items[run->batch][run->position]), fails))
            return NULL;
        for (uint64_t p = 0; p < run->slot->started; p++)
            come_back(run->slot->results[p]);
        SCHEDULE_CHECK(run->slot->failed_at == DLRS_NO_ITEM || j->fails);
    } else if (j->options.num_lanes > 0) {
        SCHEDULE_CHECK(run->batch < MOST_BATCHES);
        if (!read_lane(j, worker, run))
            return &no_batch;
    } else {
        for (uint64_t p = 0; p < run->num_items; p++)
            begin_item(j, run, p);
    }
    return make(&j->outcomes[run->batch]);
}

static void drop(job *j, void *outcome)
{
    for (unsigned n = 0; n < MOST_BATCHES; n++) {
        if (outcome == &j->outcomes[n])
            come_back(outcome);
    }
}

static void free_epoch(job *j, dlrs_epoch *epoch)
{
    SCHEDULE_CHECK(epoch == j->epoch && !j->is_freed);
    j->is_freed = true;
    dlrs_epoch_free(epoch);
}

static void work(void *context, dlrs_worker *worker, const dlrs_run *first)
{
    (void)context;
    dlrs_run run = *first;
    bool more;
    do {
        dlrs_worker_let_consumers_pass(worker);
        job *j = run.user;
        void *unwanted;
        dlrs_epoch *orphan;
        void *outcome = outcome_of(j, worker, &run);
        more = dlrs_worker_next(worker, &run, outcome, &unwanted, &orphan);
        SCHEDULE_CHECK(unwanted == NULL || unwanted == outcome);
        drop(j, unwanted);
        if (orphan != NULL)
            free_epoch(j, orphan);
    } while (more);
}

/* ---- consumers ---- */

static void make_epoch(job *j, dlrs_epoch *after)
{
    j->options = now->options;
    j->options.after = after;
    j->fails = now->failing != UINT64_MAX;
    j->num_batches = now->options.num_lanes > 0 ? UINT64_MAX : now->num_items;
    if (now->options.batch_size > 0 && now->options.num_lanes == 0)
        j->num_batches = (now->num_items + now->options.batch_size - 1) / now->options.batch_size;
    for (uint64_t n = 0; n < MOST_BATCHES; n++)
        j->sizes[n] = n % MOST_ITEMS;
    if (dlrs_epoch_new(pool, &j->options, j, &j->epoch) != DLRS_OK)
        SCHEDULE_CHECK(now->allocates > 0 && j->epoch == NULL);
}

/* Offer what comes next, all of it or a piece. */
static void offer(job *j)
{
    if (j->options.num_lanes > 0) {
        if (j->offered++ == 0)
            dlrs_epoch_offer(j->epoch, UINT64_MAX, true);
        return;
    }
    bool some = true;
    while (some && j->offered < now->num_items) {
        if (j->options.batch_size == 0) {
            if (dlrs_epoch_offer_batch(j->epoch, j->sizes[j->offered]) != DLRS_OK) {
                SCHEDULE_CHECK(now->allocates > 0);
                j->num_batches = j->offered;
                return;
            }
            if (++j->offered == now->num_items)
                dlrs_epoch_offer(j->epoch, 0, true);
        } else {
            uint64_t piece = now->offers_in_pieces ? 1 : now->num_items;
            j->offered += piece;
            dlrs_epoch_offer(j->epoch, piece, j->offered == now->num_items);
        }
        some = !now->offers_in_pieces;
    }
}

static dlrs_status wait_for_batch(job *j)
{
    if (now->exclusive)
        detach(NULL);
    dlrs_status status = dlrs_epoch_wait(j->epoch, now->timeouts == TIMEOUTS_ANYTIME ? 50000000 : UINT64_MAX);
    if (now->exclusive)
        attach(NULL);
    dlrs_epoch_attached(j->epoch);
    return status;
}

static void note_taken(job *j, dlrs_status status, void *outcome, uint64_t batch)
{
    SCHEDULE_CHECK(batch < MOST_BATCHES && j->taken[batch]++ == 0);
    SCHEDULE_CHECK(j->options.unordered || batch == j->takes - 1);
    if (status == DLRS_LOST) {
        SCHEDULE_CHECK(now->allocates > 0 && j->options.items_in_parallel > 1);
        j->lost++;
    } else if (j->options.num_lanes == 0) {
        SCHEDULE_CHECK(outcome == &j->outcomes[batch]);
    }
    drop(j, outcome);
}

/* Take the next batch. False if none comes any more. */
static bool take(job *j)
{
    bool may_stop = now->stopped || now->exits;
    offer(j);
    if (j->takes == j->num_batches)
        return false;
    for (;;) {
        void *outcome = NULL;
        uint64_t batch;
        j->takes++; /* while it is taken its room may be given to another */
        dlrs_status status = dlrs_epoch_take(j->epoch, &outcome, &batch);
        if (status == DLRS_OK || status == DLRS_LOST) {
            note_taken(j, status, outcome, batch);
            return true;
        }
        j->takes--;
        if (status == DLRS_NOT_READY) {
            offer(j); /* as the real consumer does, one piece before each wait */
            status = wait_for_batch(j);
        }
        if (status == DLRS_STOPPED && may_stop)
            return false;
        if (status == DLRS_END) {
            SCHEDULE_CHECK(j->options.num_lanes > 0);
            return false;
        }
        SCHEDULE_CHECK(status == DLRS_OK || (status == DLRS_NOT_READY && now->timeouts == TIMEOUTS_ANYTIME));
    }
}

static void end_epoch(job *j)
{
    dlrs_epoch_cancel(j->epoch);
    for (void *found; (found = dlrs_epoch_reclaim(j->epoch)) != NULL;) {
        if (found >= (void *)j->items && found < (void *)(j->items + MOST_BATCHES))
            come_back(found);
        else
            drop(j, found);
    }
    if (dlrs_epoch_leave(j->epoch))
        free_epoch(j, j->epoch);
}

static void *consume(void *argument)
{
    job *j = argument;
    job *later = now->has_later ? &jobs[num_jobs - 1] : NULL;
    if (now->exclusive)
        attach(NULL);
    make_epoch(j, NULL);
    if (later != NULL && j->epoch != NULL) {
        make_epoch(later, j->epoch);
        if (later->epoch != NULL)
            offer(later);
    }
    if (now->later_first) {
        while (take(later))
            ;
    }
    if (j->epoch != NULL) {
        for (unsigned n = 0; n < now->takes && take(j); n++)
            ;
        end_epoch(j);
    }
    if (later != NULL && later->epoch != NULL) {
        while (take(later))
            ;
        end_epoch(later);
    }
    if (now->exclusive)
        detach(NULL);
    schedule_lock(&consumer_lock, "consume");
    consumers_left++;
    schedule_signal(&consumer_left, true, "consume");
    schedule_unlock(&consumer_lock, "consume");
    return NULL;
}

static void *stop(void *argument)
{
    (void)argument;
    if (now->exits) {
        dlrs_process_stop();
        SCHEDULE_CHECK(dlrs_process_wait(UINT64_MAX));
        SCHEDULE_CHECK(entered == left);
    } else {
        dlrs_pool_stop(pool);
    }
    schedule_lock(&consumer_lock, "stop");
    consumers_left++;
    schedule_signal(&consumer_left, true, "stop");
    schedule_unlock(&consumer_lock, "stop");
    return NULL;
}

/* Make a pool, let consumers use it, and give it up. */
static void *own(void *argument)
{
    (void)argument;
    static int context;
    dlrs_pool_options options = {.hooks = {.enter = enter, .work = work, .leave = leave, .context = &context},
                                 .num_threads = now->workers,
                                 .stack_size = 1 << 18,
                                 .exclusive = now->exclusive,
                                 .adaptive = now->adaptive};
    if (now->exclusive) {
        options.hooks.attach = attach;
        options.hooks.detach = detach;
    }
    dlrs_pool *made = NULL;
    int os_error = 0;
    dlrs_status status = dlrs_pool_new(&options, &made, &os_error);
    if (status != DLRS_OK) {
        SCHEDULE_CHECK(status == DLRS_NO_THREAD ? now->starts >= 0 && os_error == EAGAIN
                                                : status == DLRS_NO_MEMORY && now->allocates > 0);
        SCHEDULE_CHECK((made != NULL) == (status == DLRS_NO_THREAD));
        if (made != NULL)
            SCHEDULE_CHECK(dlrs_pool_wait(made, UINT64_MAX));
        SCHEDULE_CHECK(entered == left && process.live == 0);
        if (made != NULL)
            dlrs_pool_release(made);
        return NULL;
    }
    pool = made;
    unsigned others = now->consumers > 1 ? now->consumers - 1 : 0;
    for (unsigned i = 0; i < others; i++)
        schedule_start(consume, &jobs[i + 1]);
    bool is_stopped = now->stopped || now->exits;
    if (is_stopped)
        schedule_start(stop, NULL);
    consume(&jobs[0]);
    schedule_lock(&consumer_lock, "own");
    while (consumers_left < 1 + others + is_stopped)
        schedule_wait_until(&consumer_left, &consumer_lock, SCHEDULE_FOREVER, "own");
    schedule_unlock(&consumer_lock, "own");
    pool = NULL;
    if (now->ending == STOP_AND_WAIT) {
        dlrs_pool_stop(made);
        SCHEDULE_CHECK(dlrs_pool_wait(made, UINT64_MAX));
        SCHEDULE_CHECK(entered == left && process.live == 0);
    }
    dlrs_pool_release(made);
    return NULL;
}

/* ---- every interleaving of a scenario ---- */

static void check_job(const job *j)
{
    SCHEDULE_CHECK(j->is_freed == (j->epoch != NULL));
    bool whole = j->epoch != NULL && now->takes == ALL && !now->stopped && !now->exits;
    for (uint64_t n = 0; n < MOST_BATCHES; n++) {
        SCHEDULE_CHECK(j->outcomes[n] != 1 && j->taken[n] <= 1);
        bool is_there = n < j->num_batches;
        if (j->options.num_lanes > 0)
            is_there = n / j->options.num_lanes < now->num_items && !j->fails;
        if (whole && j->options.num_lanes == 0)
            SCHEDULE_CHECK(j->taken[n] == is_there);
        if (whole && is_there && j->lost == 0)
            SCHEDULE_CHECK(j->outcomes[n] == 2);
        for (uint64_t p = 0; p < MOST_ITEMS; p++)
            SCHEDULE_CHECK(j->items[n][p] != 1);
    }
    SCHEDULE_CHECK(!whole || j->lost <= 1);
}

static void run_once(const scenario *s)
{
    memset(jobs, 0, sizeof jobs);
    num_jobs = (s->consumers > 1 ? s->consumers : 1) + s->has_later;
    consumers_left = entered = left = 0;
    memset(&consumer_lock, 0, sizeof consumer_lock);
    memset(&gil, 0, sizeof gil);
    memset(&consumer_left, 0, sizeof consumer_left);
    pool = NULL;
    process.ids = 0;
    process.exiting = false;
    threads_to_start = s->starts;
    allowance = s->allocates;
    schedule_run(own, NULL);
    for (unsigned i = 0; i < num_jobs; i++)
        check_job(&jobs[i]);
    SCHEDULE_CHECK(blocks == 0 && entered == left);
    SCHEDULE_CHECK(process.live == 0 && process.members == NULL && asking == 0 && aside == 0);
}

static uint64_t explore(const scenario *s)
{
    uint64_t runs = 0;
    now = s;
    usable_processors = s->processors > 0 ? s->processors : 1;
    workers_compute = s->computes;
    schedule_timeouts = s->timeouts;
    schedule_bound = 0;
    num_choices = 0;
    run_once(s); /* the first pool prepares the process, which is not to be part of the choices */
    num_choices = 0;
    schedule_bound = s->bound;
    do {
        run_once(s);
        runs++;
    } while (choose_differently());
    return runs;
}

#define EPOCH(size, most, batches, items) \
    .options = {.batch_size = (size), .capacity = (most), .batches_in_parallel = (batches), .items_in_parallel = (items)}
#define LANES(most, batches, lanes) \
    .options = {.batch_size = 1, \
                .capacity = (most), \
                .batches_in_parallel = (batches), \
                .items_in_parallel = 1, \
                .num_lanes = (lanes)}
#define UNORDERED(size, most, batches, items) \
    .options = {.batch_size = (size), \
                .capacity = (most), \
                .batches_in_parallel = (batches), \
                .items_in_parallel = (items), \
                .unordered = true}
#define USUAL .takes = ALL, .failing = UINT64_MAX, .starts = -1

/* The bounds are what takes about half a second; in a long test they are one more, in a short one one less. */
static const scenario scenarios[] = {
    {"one worker, one batch, no bound", 100, .workers = 1, EPOCH(1, 1, 1, 1), .num_items = 1, USUAL},
    {"one worker", 4, .workers = 1, EPOCH(1, 2, 1, 1), .num_items = 3, USUAL},
    {"one worker, a ring of one", 4, .workers = 1, EPOCH(1, 1, 1, 1), .num_items = 3, USUAL},
    {"two workers", 3, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 2, USUAL},
    {"two workers, a ring of two", 2, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 3, USUAL},
    {"three workers", 1, .workers = 3, EPOCH(1, 4, 3, 1), .num_items = 3, USUAL},
    {"two workers, one batch at a time", 2, .workers = 2, EPOCH(1, 2, 1, 1), .num_items = 2, USUAL},
    {"two workers, an epoch without items", 3, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 0, USUAL},
    {"two items of a batch", 2, .workers = 2, EPOCH(2, 2, 1, 2), .num_items = 3, USUAL},
    {"two items of two batches", 1, .workers = 3, EPOCH(2, 2, 2, 2), .num_items = 4, USUAL},
    {"an item fails", 2, .workers = 2, EPOCH(3, 2, 1, 2), .num_items = 3, .takes = ALL, .starts = -1, .failing = 0},
    {"items in pieces", 2, .workers = 2, EPOCH(2, 2, 2, 1), .num_items = 3, .offers_in_pieces = true, USUAL},
    {"batches with sizes of their own", 1, .workers = 2, EPOCH(0, 2, 2, 1), .num_items = 3, .offers_in_pieces = true,
     USUAL},
    {"the same, item by item", 1, .workers = 2, EPOCH(0, 3, 2, 2), .num_items = 4, USUAL},
    {"unordered", 2, .workers = 2, UNORDERED(1, 3, 2, 1), .num_items = 3, USUAL},
    {"unordered, two items of a batch", 1, .workers = 3, UNORDERED(2, 3, 2, 2), .num_items = 4, USUAL},
    {"one lane", 1, .workers = 2, LANES(2, 2, 1), .num_items = 2, USUAL},
    {"two lanes", 1, .workers = 2, LANES(3, 2, 2), .num_items = 1, USUAL},
    {"a lane fails", 2, .workers = 2, LANES(3, 2, 2), .num_items = 2, .takes = ALL, .starts = -1, .failing = 1},
    {"a consumer that stops taking", 2, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 3, .takes = EACH,
     .failing = UINT64_MAX, .starts = -1},
    {"the same, item by item", 2, .workers = 2, EPOCH(2, 3, 2, 2), .num_items = 4, .takes = EACH, .failing = UINT64_MAX,
     .starts = -1},
    {"the same, unordered", 2, .workers = 2, UNORDERED(2, 3, 2, 2), .num_items = 4, .takes = EACH, .failing = UINT64_MAX,
     .starts = -1},
    {"the same, lanes", 2, .workers = 2, LANES(3, 2, 2), .num_items = 1, .takes = EACH, .failing = UINT64_MAX,
     .starts = -1},
    {"the same, and the owner waits", 2, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 2, .takes = EACH,
     .ending = STOP_AND_WAIT, .failing = UINT64_MAX, .starts = -1},
    {"two consumers", 2, .workers = 1, EPOCH(1, 2, 1, 1), .num_items = 2, .consumers = 2, USUAL},
    {"two consumers, two workers", 1, .workers = 2, EPOCH(1, 2, 1, 1), .num_items = 1, .consumers = 2, USUAL},
    {"two consumers that stop taking", 1, .workers = 2, EPOCH(1, 2, 1, 1), .num_items = 1, .consumers = 2, .takes = EACH,
     .failing = UINT64_MAX, .starts = -1},
    {"one epoch after another", 1, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 2, .has_later = true, USUAL},
    {"one epoch after another that is cancelled", 1, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, .has_later = true,
     .takes = EACH, .failing = UINT64_MAX, .starts = -1},
    {"one epoch after another that is waited for", 1, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, .has_later = true,
     .later_first = true, USUAL},
    {"a pool that is stopped", 1, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 1, .stopped = true, USUAL},
    {"a process that ends", 1, .workers = 2, EPOCH(1, 3, 2, 1), .num_items = 1, .exits = true, USUAL},
    {"no first thread", 3, .workers = 2, EPOCH(1, 3, 2, 1), .takes = ALL, .starts = 0},
    {"no second thread", 4, .workers = 2, EPOCH(1, 3, 2, 1), .takes = ALL, .starts = 1},
    {"no third thread", 3, .workers = 3, EPOCH(1, 3, 2, 1), .takes = ALL, .starts = 2},
    {"no memory", 1, .workers = 2, EPOCH(2, 5, 4, 2), .num_items = 4, .allocates = EACH, USUAL},
    {"no memory for sizes", 1, .workers = 2, EPOCH(0, 5, 2, 1), .num_items = 5, .allocates = EACH, USUAL},
    {"no memory for lanes", 1, .workers = 2, LANES(5, 2, 2), .num_items = 1, .allocates = EACH, USUAL},
    {"no memory, unordered", 1, .workers = 2, UNORDERED(2, 5, 4, 2), .num_items = 4, .allocates = EACH, USUAL},
    {"no memory, one epoch after another", 1, .workers = 2, EPOCH(2, 5, 4, 2), .num_items = 2, .has_later = true,
     .allocates = EACH, USUAL},
    {"waits that end by themselves", 2, TIMEOUTS_ANYTIME, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, USUAL},
    {"the same, item by item", 2, TIMEOUTS_ANYTIME, .workers = 2, EPOCH(2, 2, 1, 2), .num_items = 2, USUAL},
    {"those who wait look around", 2, .processors = 8, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, .run_ns = 100000,
     USUAL},
    {"the same, cheap runs", 1, .processors = 8, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, .run_ns = 100, USUAL},
    {"one at a time", 2, TIMEOUTS_LAST, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 2, .run_ns = 100000,
     .exclusive = true, .adaptive = true, USUAL},
    {"one at a time, in turns", 1, TIMEOUTS_LAST, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 3, .run_ns = 100,
     .exclusive = true, .adaptive = true, USUAL},
    {"the same, looking around", 2, TIMEOUTS_LAST, .workers = 1, .processors = 8, EPOCH(1, 2, 2, 1), .num_items = 3,
     .run_ns = 100, .exclusive = true, .adaptive = true, USUAL},
    {"in turns, and computing", 2, TIMEOUTS_ANYTIME, .workers = 2, EPOCH(1, 2, 2, 1), .num_items = 3, .run_ns = 100,
     .exclusive = true, .adaptive = true, .computes = true, USUAL},
    {"item by item, each takes long", 1, .workers = 3, EPOCH(3, 2, 1, 3), .num_items = 6, .run_ns = 100000, USUAL},
};

static unsigned bound_of(const scenario *s)
{
    if (check_percent < 100)
        return s->bound > 4 ? 3 : s->bound - 1;
    return s->bound + (check_percent > 100);
}

/* Explore a scenario, with each number of batches that are taken or of allocations that succeed. */
static uint64_t explore_each(const scenario *s)
{
    scenario one = *s;
    uint64_t runs = 0;
    one.bound = bound_of(s);
    if (s->allocates == EACH) {
        do {
            one.allocates = one.allocates == EACH ? 1 : one.allocates + 1;
            was_refused = false;
            runs += explore(&one);
        } while (was_refused);
    } else if (s->takes == EACH) {
        uint64_t most = s->options.batch_size == 0 ? s->num_items : s->num_items / s->options.batch_size;
        for (one.takes = 0; one.takes <= most; one.takes++)
            runs += explore(&one);
    } else {
        runs = explore(&one);
    }
    return runs;
}

static const char *only = ""; /* scenarios whose names have that in them; to look for something by hand */

static uint64_t explore_all(bool prints)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        const scenario *s = &scenarios[i];
        if (strstr(s->name, only) == NULL)
            continue;
        check_next(s->name);
        uint64_t runs = explore_each(s);
        sum += runs;
        if (prints)
            printf("%9" PRIu64 " interleavings: %s, bound %u\n", runs, s->name, bound_of(s));
    }
    return sum;
}

static void test_every_interleaving_keeps_all_promises(void)
{
    printf("%9" PRIu64 " interleavings in all\n", explore_all(true));
}

/* Explore, in a child process, a pool in which the signals that `function` sends do not arrive. What the child says
 * last. */
static void explore_without(const char *function, char *said, size_t size)
{
    int ends[2], status;
    fflush(NULL);
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        lost_signals = function;
        explore_all(false);
        _exit(0);
    }
    close(ends[1]);
    FILE *from_child = fdopen(ends[0], "r");
    CHECK(from_child != NULL);
    said[0] = '\0';
    while (fgets(said, (int)size, from_child) != NULL)
        ;
    fclose(from_child);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 1);
}

static void test_lost_signals_are_noticed(void)
{
    static const struct {
        const char *function, *said;
    } lost[] = {
        {"dlrs_signal_worker_locked", "no thread can run"},
        {"head_changed_locked", "!schedule_is_waited_for(&epoch->head_ready)"},
        {"stop_locked", "no thread can run"},
        {"dlrs_member_drop", "no thread can run"},
    };
    for (unsigned i = 0; i < sizeof lost / sizeof lost[0]; i++) {
        char said[400];
        explore_without(lost[i].function, said, sizeof said);
        printf("without the signals of %s: %s", lost[i].function, said);
        CHECK(strstr(said, lost[i].said) != NULL);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    if (argc > 2)
        only = argv[2];
    RUN(test_every_interleaving_keeps_all_promises);
    if (argc <= 2)
        RUN(test_lost_signals_are_noticed);
    return check_end();
}

#endif
