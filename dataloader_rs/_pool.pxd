# _pool.h as Cython sees it. The contract is there; nothing is added here.

from libc.stdint cimport uint64_t


cdef extern from "_reorder.h" nogil:
    ctypedef struct dlrs_slot:
        uint64_t started
        uint64_t failed_at
        void **results

    uint64_t DLRS_NO_ITEM


cdef extern from "_pool.h" nogil:
    ctypedef struct dlrs_pool:
        pass

    ctypedef struct dlrs_epoch:
        pass

    ctypedef struct dlrs_worker:
        pass

    ctypedef enum dlrs_status:
        DLRS_OK
        DLRS_NOT_READY
        DLRS_LOST
        DLRS_END
        DLRS_STOPPED
        DLRS_NO_WORKER
        DLRS_FORKED
        DLRS_NO_MEMORY
        DLRS_NO_THREAD

    ctypedef struct dlrs_run:
        dlrs_epoch *epoch
        void *user
        dlrs_slot *slot
        uint64_t batch
        uint64_t position
        uint64_t num_items
        uint64_t batch_items
        bint singly

    ctypedef struct dlrs_hooks:
        pass

    ctypedef struct dlrs_pool_options:
        dlrs_hooks hooks
        unsigned num_threads
        size_t stack_size
        bint exclusive
        bint enters_at_once
        bint adaptive

    ctypedef struct dlrs_epoch_options:
        uint64_t batch_size
        uint64_t capacity
        uint64_t batches_in_parallel
        uint64_t items_in_parallel
        uint64_t num_lanes
        bint unordered
        dlrs_epoch *after

    dlrs_status dlrs_pool_new(const dlrs_pool_options *options, dlrs_pool **pool, int *os_error)
    uint64_t dlrs_pool_id(const dlrs_pool *pool)
    bint dlrs_pool_is_usable(dlrs_pool *pool)
    void dlrs_pool_stop(dlrs_pool *pool)
    bint dlrs_pool_wait(dlrs_pool *pool, uint64_t timeout_ns)
    void dlrs_pool_release(dlrs_pool *pool)

    dlrs_status dlrs_epoch_new(dlrs_pool *pool, const dlrs_epoch_options *options, void *user, dlrs_epoch **epoch)
    void dlrs_epoch_offer(dlrs_epoch *epoch, uint64_t num_items, bint last)
    dlrs_status dlrs_epoch_offer_batch(dlrs_epoch *epoch, uint64_t num_items)
    dlrs_status dlrs_epoch_take(dlrs_epoch *epoch, void **outcome, uint64_t *batch)
    dlrs_status dlrs_epoch_wait(dlrs_epoch *epoch, uint64_t timeout_ns)
    void dlrs_epoch_attached(dlrs_epoch *epoch)
    bint dlrs_epoch_find_worker(dlrs_epoch *epoch, unsigned *worker, dlrs_run *run)
    void dlrs_epoch_cancel(dlrs_epoch *epoch)
    void *dlrs_epoch_reclaim(dlrs_epoch *epoch)
    bint dlrs_epoch_leave(dlrs_epoch *epoch)
    void dlrs_epoch_free(dlrs_epoch *epoch)

    unsigned dlrs_worker_index(const dlrs_worker *worker)
    const char *dlrs_worker_name(const dlrs_worker *worker)
    void dlrs_worker_let_consumers_pass(dlrs_worker *worker)
    uint64_t dlrs_worker_piece(dlrs_worker *worker, uint64_t finished, uint64_t left)
    void dlrs_worker_leave_lane(dlrs_worker *worker, const dlrs_run *run, bint ended, bint all_ended)
    bint dlrs_worker_finish_item(const dlrs_run *run, void *result, bint failed)
    bint dlrs_run_is_wanted(const dlrs_run *run)
    bint dlrs_worker_next(dlrs_worker *worker, dlrs_run *run, void *outcome, void **unwanted, dlrs_epoch **orphan)

    dlrs_status dlrs_process_prepare()
    void dlrs_process_stop()
    bint dlrs_process_wait(uint64_t timeout_ns)
    uint64_t dlrs_process_generation()
