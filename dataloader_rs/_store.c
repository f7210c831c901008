/* The store of buffers: see _store.h for what it promises.
 *
 * Sizes are rounded up to classes, four to each doubling, so that batches of nearly the same size share buffers. What
 * is rounded up costs address space only, as long as nobody touches it. A free buffer holds its own links: it is in
 * the list of its class, of which the newest is taken, since its bytes are most likely in a cache, and in the list of
 * all, of which the oldest goes first. Large buffers are mapped one by one, because what `free` gets does not always
 * go back to the system, and because freeing a large piece makes malloc keep more of all others.
 *
 * NOTE [ fork and the store ] fork() waits for the lock, so the child finds the lists whole and the lock free. */
#include "_platform.h"

#include "_store.h"

#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    SMALLEST_SHIFT = 12, /* the smallest class is a page, which has room for the links */
    LARGEST_SHIFT = 47,
    CLASSES_PER_DOUBLING = 4,
    NUM_CLASSES = (LARGEST_SHIFT - SMALLEST_SHIFT) * CLASSES_PER_DOUBLING + 1,
};

/* Buffers from this size on are mapped. Malloc's own threshold when a process starts. */
#define LEAST_MAPPED ((size_t)128 << 10)

/* Buffers from this size on begin at a multiple of HUGE_PAGE and ask for huge pages: fewer faults when they are new,
 * and fewer misses in the tables of addresses whenever they are copied into. Smaller ones would waste too much. */
#define LEAST_HUGE ((size_t)4 << 20)
#define HUGE_PAGE ((size_t)2 << 20)

#define WINDOW_NS (DLRS_BUFFER_MAX_AGE_NS / 2)

typedef struct free_buffer free_buffer;
struct free_buffer {
    size_t capacity;
    uint64_t freed_ns;
    free_buffer *newer, *older;                   /* of all */
    free_buffer *newer_of_class, *older_of_class;
};

static struct {
    pthread_mutex_t lock;

    /* Guarded by `lock`. */
    free_buffer *newest, *oldest;
    free_buffer *newest_of_class[NUM_CLASSES];
    dlrs_buffers_usage usage;
    size_t most_in_use;        /* bytes, since window_ns */
    size_t most_in_use_before; /* bytes, in the window before that one */
    uint64_t window_ns;        /* when the window began */
    uint64_t skipped_ns;       /* by dlrs_buffers_skip_time */
} store = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void lock_store(void)
{
    pthread_mutex_lock(&store.lock);
}

static void unlock_store(void)
{
    pthread_mutex_unlock(&store.lock);
}

static pthread_once_t prepare_once = PTHREAD_ONCE_INIT;

static void prepare(void)
{
    long pages = sysconf(_SC_PHYS_PAGES);
    long page_size = sysconf(_SC_PAGESIZE);
    store.usage.limit = pages > 0 && page_size > 0 ? (size_t)pages / 8 * (size_t)page_size : SIZE_MAX;
    /* Without memory for the handlers, a fork at a bad moment may find the lock taken. There is no better answer. */
    (void)pthread_atfork(lock_store, unlock_store, unlock_store);
}

/* ---- classes ---- */

static unsigned class_of(size_t size)
{
    if (size <= (size_t)1 << SMALLEST_SHIFT)
        return 0;
    unsigned shift = 63 - (unsigned)__builtin_clzll((unsigned long long)size - 1);
    unsigned step = (unsigned)((size - 1) >> (shift - 2)) % CLASSES_PER_DOUBLING;
    return (shift - SMALLEST_SHIFT) * CLASSES_PER_DOUBLING + step + 1;
}

static size_t capacity_of(unsigned class)
{
    if (class == 0)
        return (size_t)1 << SMALLEST_SHIFT;
    unsigned shift = SMALLEST_SHIFT + (class - 1) / CLASSES_PER_DOUBLING;
    return (size_t)(CLASSES_PER_DOUBLING + 1 + (class - 1) % CLASSES_PER_DOUBLING) << (shift - 2);
}

/* ---- the system ---- */

static void *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory != MAP_FAILED ? memory : NULL;
}

/* Memory that begins at a multiple of HUGE_PAGE: too much is mapped, and both ends are cut off. */
static void *map_huge(size_t size)
{
    char *mapped = map(size + HUGE_PAGE);
    if (mapped == NULL)
        return NULL;
    size_t before = -(uintptr_t)mapped % HUGE_PAGE;
    if (before > 0)
        munmap(mapped, before);
    if (before < HUGE_PAGE)
        munmap(mapped + before + size, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(mapped + before, size, MADV_HUGEPAGE); /* a kernel without them says no, and all is well */
#endif
    return mapped + before;
}

static void *from_system(size_t capacity)
{
    if (capacity >= LEAST_HUGE)
        return map_huge(capacity);
    if (capacity >= LEAST_MAPPED)
        return map(capacity);
    void *memory;
    return posix_memalign(&memory, DLRS_BUFFER_ALIGNMENT, capacity) == 0 ? memory : NULL;
}

/* Give back a chain of buffers, linked by `older`; how many bytes that was. */
static size_t to_system(free_buffer *chain)
{
    size_t total = 0;
    while (chain != NULL) {
        free_buffer *buffer = chain;
        size_t capacity = buffer->capacity;
        chain = buffer->older;
        total += capacity;
        if (capacity < LEAST_MAPPED)
            free(buffer);
        else
            munmap(buffer, capacity);
    }
    return total;
}

/* ---- the lists; the caller holds the lock ---- */

static void keep_locked(free_buffer *buffer)
{
    free_buffer **newest_of_class = &store.newest_of_class[class_of(buffer->capacity)];
    buffer->newer = NULL;
    buffer->older = store.newest;
    if (store.newest != NULL)
        store.newest->newer = buffer;
    else
        store.oldest = buffer;
    store.newest = buffer;
    buffer->newer_of_class = NULL;
    buffer->older_of_class = *newest_of_class;
    if (*newest_of_class != NULL)
        (*newest_of_class)->newer_of_class = buffer;
    *newest_of_class = buffer;
    store.usage.kept += buffer->capacity;
}

static void remove_locked(free_buffer *buffer)
{
    if (buffer->newer != NULL)
        buffer->newer->older = buffer->older;
    else
        store.newest = buffer->older;
    if (buffer->older != NULL)
        buffer->older->newer = buffer->newer;
    else
        store.oldest = buffer->newer;
    if (buffer->newer_of_class != NULL)
        buffer->newer_of_class->older_of_class = buffer->older_of_class;
    else
        store.newest_of_class[class_of(buffer->capacity)] = buffer->older_of_class;
    if (buffer->older_of_class != NULL)
        buffer->older_of_class->newer_of_class = buffer->newer_of_class;
    store.usage.kept -= buffer->capacity;
}

/* Remember the most that was in use, for two windows. */
static void count_use_locked(uint64_t now)
{
    uint64_t passed = now - store.window_ns;
    if (passed >= WINDOW_NS) {
        store.most_in_use_before = passed < 2 * WINDOW_NS ? store.most_in_use : store.usage.in_use;
        store.most_in_use = 0;
        store.window_ns = now;
    }
    if (store.usage.in_use > store.most_in_use)
        store.most_in_use = store.usage.in_use;
}

/* Remove what breaks a rule of NOTE [ what is kept ]; a chain for to_system, once the lock is free. */
static free_buffer *remove_surplus_locked(uint64_t now)
{
    size_t bound = 2 * (store.most_in_use > store.most_in_use_before ? store.most_in_use : store.most_in_use_before);
    if (bound > store.usage.limit)
        bound = store.usage.limit;
    free_buffer *surplus = NULL;
    while (store.oldest != NULL
           && (store.usage.kept > bound || now - store.oldest->freed_ns >= DLRS_BUFFER_MAX_AGE_NS)) {
        free_buffer *buffer = store.oldest;
        remove_locked(buffer);
        buffer->older = surplus;
        surplus = buffer;
    }
    return surplus;
}

/* ---- the contract ---- */

void *dlrs_buffer_take(size_t size, size_t *capacity)
{
    if (size > (size_t)1 << LARGEST_SHIFT)
        return NULL;
    pthread_once(&prepare_once, prepare);
    unsigned class = class_of(size);
    *capacity = capacity_of(class);

    lock_store();
    uint64_t now = dlrs_now_ns() + store.skipped_ns;
    free_buffer *buffer = store.newest_of_class[class];
    if (buffer != NULL) {
        remove_locked(buffer);
        store.usage.reused++;
    }
    store.usage.taken++;
    store.usage.in_use += *capacity;
    count_use_locked(now);
    free_buffer *surplus = remove_surplus_locked(now);
    unlock_store();

    to_system(surplus);
    if (buffer != NULL)
        return buffer;
    void *memory = from_system(*capacity);
    if (memory == NULL && dlrs_buffers_release() > 0)
        memory = from_system(*capacity);
    if (memory == NULL) {
        lock_store();
        store.usage.taken--;
        store.usage.in_use -= *capacity;
        unlock_store();
    }
    return memory;
}

void dlrs_buffer_give(void *memory, size_t capacity)
{
    free_buffer *buffer = memory;
    buffer->capacity = capacity;
    lock_store();
    uint64_t now = dlrs_now_ns() + store.skipped_ns;
    buffer->freed_ns = now;
    count_use_locked(now);
    store.usage.in_use -= capacity;
    keep_locked(buffer);
    free_buffer *surplus = remove_surplus_locked(now);
    unlock_store();
    to_system(surplus);
}

size_t dlrs_buffers_release(void)
{
    lock_store();
    free_buffer *chain = store.newest;
    store.newest = store.oldest = NULL;
    for (unsigned class = 0; class < NUM_CLASSES; class++)
        store.newest_of_class[class] = NULL;
    store.usage.kept = 0;
    unlock_store();
    return to_system(chain);
}

void dlrs_buffers_set_limit(size_t limit)
{
    pthread_once(&prepare_once, prepare); /* or it would be overwritten */
    lock_store();
    store.usage.limit = limit;
    free_buffer *surplus = remove_surplus_locked(dlrs_now_ns() + store.skipped_ns);
    unlock_store();
    to_system(surplus);
}

dlrs_buffers_usage dlrs_buffers_get_usage(void)
{
    pthread_once(&prepare_once, prepare);
    lock_store();
    dlrs_buffers_usage usage = store.usage;
    unlock_store();
    return usage;
}

void dlrs_buffers_skip_time(uint64_t duration_ns)
{
    lock_store();
    store.skipped_ns += duration_ns;
    unlock_store();
}
