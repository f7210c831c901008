/* Contract of the part that knows about all pools of the process: who is there, how many threads run, that the process
 * is about to exit, and that it was forked. */
#ifndef DLRS_PROCESS_H
#define DLRS_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "_pool.h"

/* What a pool has in it to be known here. */
typedef struct dlrs_member dlrs_member;
struct dlrs_member {
    void (*stop)(dlrs_member *member); /* set before it is registered; called when the process exits */

    /* Set once by dlrs_member_register; any thread may read these. */
    uint64_t id;
    uint64_t generation;

    /* The process's. */
    uint64_t live;                /* threads that run, or are about to */
    uint64_t references;          /* the owner and the live threads */
    dlrs_member *next, *previous; /* list of those with live threads */
};

/* Give the member a number and its owner's reference. DLRS_STOPPED if the process is about to exit, or DLRS_NO_MEMORY.
 */
dlrs_status dlrs_member_register(dlrs_member *member);

/* Count a thread that is about to start. False if the process is about to exit: then stop the member. */
bool dlrs_member_add_thread(dlrs_member *member);

/* Drop the reference of a thread, or of the owner. True if it was the last one: the caller frees the member. */
bool dlrs_member_drop(dlrs_member *member, bool is_thread);

/* Wait until no thread of the member is left, or for `timeout_ns`. True if none is. */
bool dlrs_member_wait(dlrs_member *member, uint64_t timeout_ns);

#endif
