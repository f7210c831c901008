/* Contract of the worker pool: C threads that claim items of batches, in order, and leave what each batch came to
 * in the reorder buffer of its epoch. Nothing here knows Python; whoever makes a pool says what work is.
 *
 * Three parties call in:
 *   - the owner makes a pool, stops it, and gives it up;
 *   - a consumer makes an epoch on a pool, offers it items, takes its batches in order, and cancels it. One thread
 *     at a time for one epoch;
 *   - a worker, from inside the `work` hook, finishes runs and asks for the next one.
 *
 * Rules that hold everywhere:
 *   - No hook is called, and nothing a result points to is touched, while a lock of the pool or of the
 *     process is held; but for dlrs_epoch_visit, which says so.
 *   - A call waits only where its name says so (`wait`), and in dlrs_worker_let_consumers_pass, which detaches for
 *     it; the others hold a lock for a bounded number of steps.
 *   - Nothing ever joins a thread. The memory of a pool is counted, by its owner and by its workers, and the last
 *     one out frees it; so giving a pool up never waits, and may be done on a worker.
 *   - After fork() the pools of the parent must not be used in the child: their threads are not there. Every call
 *     below finds that out first and says DLRS_FORKED (or does nothing) without touching a lock. The memory of such
 *     a pool stays where it is. */
#ifndef DLRS_POOL_H
#define DLRS_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_reorder.h"

typedef struct dlrs_pool dlrs_pool;
typedef struct dlrs_epoch dlrs_epoch;
typedef struct dlrs_worker dlrs_worker;

typedef enum dlrs_status {
    DLRS_OK = 0,
    DLRS_NOT_READY, /* the batch is not there yet */
    DLRS_LOST,      /* the batch is lost: there was no memory for the results of its items; it counts as taken */
    DLRS_END,       /* no further batch comes */
    DLRS_STOPPED,   /* the pool was stopped, or the process is exiting */
    DLRS_NO_WORKER, /* a worker could not start its work (the `enter` hook failed) */
    DLRS_FORKED,    /* the pool belongs to the parent of this process */
    DLRS_NO_MEMORY,
    DLRS_NO_THREAD, /* the system would not start another thread */
} dlrs_status;

/* A piece of work: consecutive items of one batch. All of the batch, or one item of it where several items of a
 * batch are fetched at once. */
typedef struct dlrs_run {
    dlrs_epoch *epoch;
    void *user;          /* what the epoch was made with */
    dlrs_slot *slot;     /* for dlrs_worker_* calls; its results are the last worker's, see there */
    uint64_t batch;      /* number of the batch in its epoch, from 0 */
    uint64_t position;   /* of the run's first item in the batch */
    uint64_t num_items;  /* of the run; 0 for an empty batch */
    uint64_t batch_items; /* of the batch */
    bool singly;         /* the run is one item of the batch, and other workers may have others */
} dlrs_run;

typedef struct dlrs_hooks {
    /* On a new thread, before any work, when there is some for it. What it returns is handed to the others; NULL means
     * that this worker cannot work, which fails the whole pool. */
    void *(*enter)(void *context, dlrs_worker *worker);
    /* Around each stretch of work: a run is claimed, done and finished after `attach` and before `detach`, so that
     * whatever keeps the user's objects alive on this thread can be in force before the pool names them. Either both
     * or none (NULL). */
    void (*attach)(void *thread_context);
    void (*detach)(void *thread_context);
    /* Do `run`, and go on with further runs for as long as dlrs_worker_next gives one. */
    void (*work)(void *thread_context, dlrs_worker *worker, const dlrs_run *run);
    /* On the thread, after all work, exactly once if `enter` succeeded. */
    void (*leave)(void *thread_context, dlrs_worker *worker);
    /* On a thread that ends without having been asked to enter. May be NULL. */
    void (*skip)(void *context, dlrs_worker *worker);
    void *context;
} dlrs_hooks;

typedef struct dlrs_pool_options {
    dlrs_hooks hooks;
    unsigned num_threads; /* at least 1 */
    size_t stack_size;    /* of a worker, in bytes */
    bool exclusive;       /* there is an `attach`, and it waits until no other thread of the process is attached, as
                           * for a GIL; if that becomes so later, it costs some speed only */
    bool enters_at_once;  /* `enter` is called also if there is no work yet */
    bool adaptive;        /* keep workers parked that only get in each other's way, see _pace.h, and if exclusive let
                           * them take long turns while runs are cheap, see _pool_parts.h */
} dlrs_pool_options;

typedef struct dlrs_epoch_options {
    uint64_t batch_size;        /* items of a batch, the last of which may be smaller; or 0: each batch is offered with
                                 * a size of its own */
    uint64_t capacity;          /* most batches in progress or waiting, at least 1 */
    uint64_t batches_in_parallel; /* most batches in progress, at least 1. One whose items are fetched singly, are all
                                 * started and at least half of them finished does not count: those who have nothing
                                 * left to do in it need not wait for its slowest item. So outcomes of up to `capacity`
                                 * batches may be made at once. */
    uint64_t items_in_parallel; /* most items of one batch under way, at least 1; 1 makes a run a whole batch */
    uint64_t num_lanes;         /* batch n belongs to lane n % num_lanes, and is claimed only once whoever has one
                                 * before it in that lane has left it; the epoch ends when all lanes have. 0: no lanes.
                                 * For what can be read by one worker at a time, to an end that is not known before. */
    bool unordered;             /* batches are taken in the order in which they get ready */
    dlrs_epoch *after;          /* not cancelled, of the same pool, with the same limits, and no other comes after it:
                                 * the new epoch is not begun before all batches of that one are claimed, and the limits
                                 * are for both together, until that one is cancelled or somebody waits for a batch of
                                 * the new one. NULL: none. */
} dlrs_epoch_options;

/* ---- the owner: _pool.c ---- */

/* Make a pool and start its threads. On DLRS_NO_THREAD *os_error holds the system's error number, and *pool is a
 * stopped pool whose threads are those that did start: the caller waits for them, where it may wait, and releases it.
 * On any other failure nothing is left running, and *pool is untouched. Waits for no thread. */
dlrs_status dlrs_pool_new(const dlrs_pool_options *options, dlrs_pool **pool, int *os_error);

/* Number of the pool, unique in the process and never 0. */
uint64_t dlrs_pool_id(const dlrs_pool *pool);

/* Can epochs be made on it: not stopped, not failed, and not the parent's? */
bool dlrs_pool_is_usable(dlrs_pool *pool);

/* Let each worker end after the run it is in; consumers that wait are woken. May be called twice, from anywhere. */
void dlrs_pool_stop(dlrs_pool *pool);

/* Wait until all workers of a stopped pool have ended, or for `timeout_ns`. True if they have. Not for a worker of the
 * pool, which would wait for itself. */
bool dlrs_pool_wait(dlrs_pool *pool, uint64_t timeout_ns);

/* Stop the pool and give up the owner's share of it. */
void dlrs_pool_release(dlrs_pool *pool);

/* ---- the consumer: _epoch.c ---- */

/* Make an epoch without items. `user` comes back in every run. The owner must keep the pool until the consumer
 * has left the epoch. On a stopped pool it can be made, and says so when it is taken from. */
dlrs_status dlrs_epoch_new(dlrs_pool *pool, const dlrs_epoch_options *options, void *user, dlrs_epoch **epoch);

/* Offer `num_items` more items, of an epoch with a batch_size, UINT64_MAX with lanes; or 0 items, only to say that no
 * more come. Batches are cut from the items in order; one that could still grow is held back
 * until `last` says that no more items come. */
void dlrs_epoch_offer(dlrs_epoch *epoch, uint64_t num_items, bool last);

/* Offer one more batch, of an epoch without a batch_size. DLRS_OK, DLRS_NO_MEMORY or DLRS_FORKED. */
dlrs_status dlrs_epoch_offer_batch(dlrs_epoch *epoch, uint64_t num_items);

/* Take the next batch if it is ready: DLRS_OK and its outcome, DLRS_LOST, or DLRS_NOT_READY; and which batch it is. A
 * pool that stopped says DLRS_STOPPED or DLRS_NO_WORKER instead. */
dlrs_status dlrs_epoch_take(dlrs_epoch *epoch, void **outcome, uint64_t *batch);

/* Wait until the next batch is ready, or for `timeout_ns`. DLRS_OK, DLRS_NOT_READY, DLRS_END (with lanes; otherwise
 * whether a batch is still to come is the caller's to know), DLRS_STOPPED, DLRS_NO_WORKER or DLRS_FORKED. */
dlrs_status dlrs_epoch_wait(dlrs_epoch *epoch, uint64_t timeout_ns);

/* To be called after each dlrs_epoch_wait, attached: workers of an exclusive pool stand aside from when the batch was
 * ready until then, see _gate.h. */
void dlrs_epoch_attached(dlrs_epoch *epoch);

/* Which worker is at the batch that the consumer waits for, or, if batches are unordered, at the oldest: its number,
 * and the run. False if no worker is. Only `batch`, `position`, `num_items` and `singly` of the run are set. */
bool dlrs_epoch_find_worker(dlrs_epoch *epoch, unsigned *worker, dlrs_run *run);

/* End the epoch: no further run of it is started, what workers still make for it comes back to them as unwanted, and
 * nothing is taken from it any more. May be called twice. */
void dlrs_epoch_cancel(dlrs_epoch *epoch);

/* Take one thing that a cancelled epoch still holds for nobody: an outcome nobody took, or the result of an item
 * of a batch that will not be finished. NULL when there is none left. */
void *dlrs_epoch_reclaim(dlrs_epoch *epoch);

/* Show `visit` everything that the epoch holds: outcomes nobody took, and results of items of unfinished batches that
 * no worker owns yet. Called with the lock of the pool held, so `visit` only looks. In a forked child: 0, and nothing
 * is shown. For a garbage collector, while no consumer or worker of the epoch is inside dlrs_epoch_take,
 * dlrs_epoch_reclaim, dlrs_worker_finish_item or dlrs_worker_next. */
int dlrs_epoch_visit(dlrs_epoch *epoch, dlrs_visit_fn *visit, void *context);

/* Give up the consumer's hold on a cancelled epoch. True if no worker holds it either: the caller frees it. Else
 * the last worker to leave it is told so (dlrs_worker_next), at any moment from now on. In a forked child: false,
 * and nobody ever frees it. */
bool dlrs_epoch_leave(dlrs_epoch *epoch);

/* Free an epoch that nobody holds. */
void dlrs_epoch_free(dlrs_epoch *epoch);

/* ---- a worker, inside its `work` hook: _worker.c ---- */

/* Number of the worker in its pool, from 0. */
unsigned dlrs_worker_index(const dlrs_worker *worker);

/* Pool that the worker belongs to, by number. */
uint64_t dlrs_worker_pool_id(const dlrs_worker *worker);

/* Name of the thread, "dlrs-<pool>-<worker>". The system keeps its first 15 bytes on Linux. */
const char *dlrs_worker_name(const dlrs_worker *worker);

/* To be called attached, between two items: on an exclusive pool, stand aside while a consumer wants to attach. */
void dlrs_worker_let_consumers_pass(dlrs_worker *worker);

/* How many of the `left` items of the run it is at the worker should fetch before it calls again, having finished
 * `finished` of them (0 the first time) since the last call. All of them where that does not take long. */
uint64_t dlrs_worker_piece(dlrs_worker *worker, uint64_t finished, uint64_t left);

/* Leave the lane of the run, once, before the next call of dlrs_worker_next: somebody else may go on in it. `ended`:
 * the lane has come to its end; `all_ended`: all lanes have, and no batch is begun after this one. */
void dlrs_worker_leave_lane(dlrs_worker *worker, const dlrs_run *run, bool ended, bool all_ended);

/* Leave `result` (not NULL) as what the item of a `singly` run came to; every such run is finished so, whether or not
 * anybody still wants it. True if it was the last item of its batch: then the caller alone owns slot->results[0 ..
 * slot->started - 1] and slot->failed_at, has to make the outcome of the batch from them (or drop them), and to hand
 * it to dlrs_worker_next. */
bool dlrs_worker_finish_item(const dlrs_run *run, void *result, bool failed);

/* Does anybody still want the batch of this run? If not, its outcome need not be made. */
bool dlrs_run_is_wanted(const dlrs_run *run);

/* Publish the outcome of the batch of `*run` (or nothing, if `outcome` is NULL: another worker finishes it), leave
 * it, and claim another run into `*run` if there is one, without waiting for it. True if there is.
 *
 * `*unwanted`: the outcome, if nobody wants it any more; the caller releases it. `*orphan`: the epoch that was left,
 * if nobody else holds it; the caller frees it. NULL otherwise, both. After true the epoch of the new run is held
 * until the next call, also if it is the same. */
bool dlrs_worker_next(dlrs_worker *worker, dlrs_run *run, void *outcome, void **unwanted, dlrs_epoch **orphan);

/* ---- the process: _process.c ---- */

/* Make forks count; to be called before there is a pool. May be called twice. */
dlrs_status dlrs_process_prepare(void);

/* Stop all pools and let no more be made, because the process is about to exit. */
void dlrs_process_stop(void);

/* Wait until no worker is left in user code or on its way out of a hook, or for `timeout_ns`. True if so. Workers
 * that are still there may be abandoned: nothing of theirs is ever freed under them. */
bool dlrs_process_wait(uint64_t timeout_ns);

/* Counts the forks that led to this process. An object made under another count is the parent's. */
uint64_t dlrs_process_generation(void);

#endif
