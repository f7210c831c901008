/* Contract of the store of buffers: the memory of stacked batches, which is used again and again. There is one store
 * for the process. Knows no Python, and nothing of what lies in a buffer.
 *
 * Any thread may call anything here. No call waits for more than a few steps of another thread, and none holds the
 * lock while it asks the system for memory or gives some back. A forked child has a copy of the store and of all
 * buffers, and may go on using both.
 *
 * NOTE [ what is kept ] A buffer that is given back stays in the store for the next one who wants that size, as long
 * as
 *   - no more bytes are kept than twice as many as were in use at once, at some moment of the last 10 to 20 seconds.
 *     Once would do for a loop with batches of one size, which finds all it needs when it begins a new epoch; the rest
 *     is for sizes that take turns;
 *   - no more bytes are kept than the limit says: unless it is set, an eighth of the machine's memory, for programs
 *     that held a whole epoch and let go of it;
 *   - it was wanted within the last 20 seconds: what a change of sizes leaves behind goes.
 * What breaks a rule goes back to the system, the longest unused first. The rules are looked at whenever a buffer is
 * taken or given back, so a process that does neither keeps what it has, until dlrs_buffers_release. */
#ifndef DLRS_STORE_H
#define DLRS_STORE_H

#include <stddef.h>
#include <stdint.h>

enum { DLRS_BUFFER_ALIGNMENT = 64 };

/* How long a buffer may lie unused; the most that was in use is known for half of that at least. */
#define DLRS_BUFFER_MAX_AGE_NS 20000000000ull

typedef struct dlrs_buffers_usage {
    size_t in_use;    /* bytes */
    size_t kept;      /* bytes, free for the next one who wants that size */
    size_t limit;     /* of `kept` */
    uint64_t taken;   /* buffers, since the process began */
    uint64_t reused;  /* those of them that had been given back by somebody before */
} dlrs_buffers_usage;

/* A buffer of at least `size` bytes, with anything in it, aligned to DLRS_BUFFER_ALIGNMENT; NULL if there is no memory.
 * The caller owns it, and keeps `capacity` for giving it back. */
void *dlrs_buffer_take(size_t size, size_t *capacity);

/* Give a buffer back. Nobody looks into it any more. */
void dlrs_buffer_give(void *memory, size_t capacity);

/* Give all that is kept back to the system; how many bytes that was. */
size_t dlrs_buffers_release(void);

void dlrs_buffers_set_limit(size_t limit);

dlrs_buffers_usage dlrs_buffers_get_usage(void);

/* For tests: let the store believe that so much more time has passed. */
void dlrs_buffers_skip_time(uint64_t duration_ns);

#endif
