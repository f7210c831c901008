/* A scheduler that runs one thread at a time and tries every order in which threads can come by, up to a bound.
 *
 * Threads are contexts of one system thread. A thread runs until it waits, ends, or comes to a point where another one
 * could come between: before it takes a lock, and before it looks at or changes an atomic. At each such point the
 * scheduler chooses who goes on; a signal that several threads wait for is a choice, too. The choices of a run are
 * noted down, the next run repeats all of them but the last, which it makes differently, until there is no other way
 * to choose. What is bounded is how often in a run a thread that could have gone on is made to stop
 * (`schedule_bound`); how often it stops since it has to wait is not.
 *
 * Time stands still, but for what a thread spends, and jumps when nobody can run: then the first deadline passes. A run
 * in which that is not allowed (`timeouts`) shows that each wake-up comes from a thread, and none from a clock.
 *
 * What it does not try: writes that become visible late, or in another order. All threads see one memory, as if every
 * atomic were sequentially consistent; what is wrong with the others is for ThreadSanitizer to say.
 *
 * Linux alone: it writes into pthread_mutex_t as it sees fit. */
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include "check.h"

#if defined(__SANITIZE_ADDRESS__) || CHECK_HAS_FEATURE(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define SCHEDULE_JUMPS 0
#define SCHEDULE_UNPOISON(memory, size) __asan_unpoison_memory_region(memory, size)
#else
#define SCHEDULE_JUMPS 1
#define SCHEDULE_UNPOISON(memory, size) ((void)(memory), (void)(size))
#endif

enum { MOST_THREADS = 8, MOST_CHOICES = 4096, THREAD_STACK = 128 << 10, NOTES = 128 };

static const uint64_t LOOKING_NS = 110000; /* more than the code under test looks for anything */

#define SCHEDULE_FOREVER UINT64_MAX

typedef enum timeouts {
    TIMEOUTS_NEVER = 0, /* a run that needs one fails */
    TIMEOUTS_LAST,      /* when nobody can run */
    TIMEOUTS_ANYTIME,   /* and also before, and waits end without a reason; each counts against the bound */
} timeouts;

typedef enum thread_state { ABSENT, RUNS, WANTS_LOCK, WAITS, LOOKS, ENDED } thread_state;

typedef struct fiber {
    ucontext_t context;
    jmp_buf resume;
    bool has_begun;
    thread_state state;
    void *(*body)(void *);
    void *argument;
    const char *place;      /* where it is, for the report */
    pthread_mutex_t *lock;  /* WANTS_LOCK, WAITS: the one that it takes next */
    pthread_cond_t *cond;   /* WAITS */
    uint64_t until_ns;      /* WAITS, LOOKS: or until then */
    uint64_t seen;          /* LOOKS: until `version` is another */
    bool has_looked_enough; /* its time to look is over; until it reads the clock */
    unsigned locks;         /* that it holds */
} fiber;

static unsigned schedule_bound;
static timeouts schedule_timeouts;

static fiber threads[MOST_THREADS];
static char stacks[MOST_THREADS][THREAD_STACK] __attribute__((aligned(64)));
static unsigned num_threads, self;
static ucontext_t explorer;
static uint64_t clock_ns, version /* changes with whatever a thread may look at */;
static unsigned preemptions;
static unsigned timeouts_used;

static struct choice {
    unsigned char taken, options;
} choices[MOST_CHOICES];
static unsigned num_choices, choices_made;

static struct note {
    unsigned thread;
    const char *what, *place;
} notes[NOTES];
static uint64_t num_notes;

static void note_down(const char *what, const char *place)
{
    notes[num_notes++ % NOTES] = (struct note){.thread = self, .what = what, .place = place};
    threads[self].place = place;
}

/* What the threads did last, where each of them is, and the end of the program. */
static _Noreturn void schedule_failed(const char *what)
{
    for (uint64_t n = num_notes < NOTES ? 0 : num_notes - NOTES; n < num_notes; n++)
        fprintf(stderr, "    thread %u %s in %s\n", notes[n % NOTES].thread, notes[n % NOTES].what,
                notes[n % NOTES].place);
    static const char *const states[] = {"absent", "runs", "wants a lock", "waits", "looks", "ended"};
    for (unsigned i = 0; i < num_threads; i++)
        fprintf(stderr, "thread %u: %s, %s\n", i, states[threads[i].state], threads[i].place);
    fprintf(stderr, "%s: %s\n", check_running, what);
    _exit(1);
}

#define SCHEDULE_CHECK(condition) ((condition) ? (void)0 : schedule_failed("not true: " #condition))

/* ---- choices ---- */

static unsigned choose(unsigned options)
{
    if (options == 1)
        return 0;
    if (choices_made == num_choices) {
        SCHEDULE_CHECK(num_choices < MOST_CHOICES);
        choices[num_choices++] = (struct choice){.options = (unsigned char)options};
    }
    const struct choice *c = &choices[choices_made++];
    SCHEDULE_CHECK(c->options == options); /* else a run depends on something else than on the choices */
    return c->taken;
}

/* Go on to the next way to choose. False if there is none left. */
static bool choose_differently(void)
{
    for (; num_choices > 0; num_choices--) {
        struct choice *last = &choices[num_choices - 1];
        if (++last->taken < last->options)
            return true;
    }
    return false;
}

/* ---- who runs ---- */

static unsigned char *owner_of(pthread_mutex_t *lock)
{
    return (unsigned char *)lock; /* 0 is nobody, thread i is i + 1 */
}

static bool can_run(const fiber *t)
{
    switch (t->state) {
    case RUNS:
        return true;
    case WANTS_LOCK:
        return *owner_of(t->lock) == 0;
    case LOOKS:
        return version != t->seen;
    default:
        return false;
    }
}

/* swapcontext asks the system to keep a mask of signals that is always the same; a jump does without, but sanitizers
 * take it for one out of functions that never return. */
static void switch_to(unsigned next)
{
    fiber *from = &threads[self], *to = &threads[next];
    if (from == to)
        return;
    self = next;
#if SCHEDULE_JUMPS
    if (_setjmp(from->resume) != 0)
        return;
    if (to->has_begun)
        _longjmp(to->resume, 1);
    to->has_begun = true;
    setcontext(&to->context);
    schedule_failed("setcontext");
#else
    if (swapcontext(&from->context, &to->context) != 0)
        schedule_failed("swapcontext");
#endif
}

static bool may_time_out(const fiber *t)
{
    return (t->state == WAITS || t->state == LOOKS) && t->until_ns != SCHEDULE_FOREVER;
}

/* The deadline of a thread passes. */
static void time_out(fiber *t)
{
    if (clock_ns < t->until_ns)
        clock_ns = t->until_ns;
    if (t->state == LOOKS)
        t->has_looked_enough = true;
    else
        timeouts_used++;
    t->state = t->state == LOOKS ? RUNS : WANTS_LOCK;
}

/* Nobody can run, before a deadline passes. */
static void nobody_runs(void)
{
    fiber *first = NULL;
    bool all_ended = true;
    for (unsigned i = 0; i < num_threads; i++) {
        all_ended = all_ended && threads[i].state == ENDED;
        if (may_time_out(&threads[i]) && (first == NULL || threads[i].until_ns < first->until_ns))
            first = &threads[i];
    }
    if (all_ended) {
        setcontext(&explorer);
        schedule_failed("setcontext");
    }
    if (first == NULL)
        schedule_failed("no thread can run");
    if (first->state == WAITS && schedule_timeouts == TIMEOUTS_NEVER)
        schedule_failed("nobody wakes a thread before its time is up");
    time_out(first);
}

/* Choose who runs. `goes_on`: this thread can. */
static void reschedule(bool goes_on)
{
    bool may_preempt = preemptions < schedule_bound;
    if (goes_on && !may_preempt)
        return;
    while (true) {
        unsigned options[3 * MOST_THREADS], num_options = 0, num_free = goes_on;
        if (goes_on)
            options[num_options++] = self;
        for (unsigned n = 1; n <= num_threads; n++) {
            unsigned i = (self + n) % num_threads;
            if (can_run(&threads[i]) && !(goes_on && i == self)) {
                options[num_options++] = i;
                num_free += !goes_on;
            }
        }
        if (schedule_timeouts == TIMEOUTS_ANYTIME && may_preempt && num_options > 0) {
            for (unsigned i = 0; i < num_threads; i++) {
                if (may_time_out(&threads[i]))
                    options[num_options++] = i + MOST_THREADS;
                if (threads[i].state == WAITS)
                    options[num_options++] = i + 2 * MOST_THREADS;
            }
        }
        if (num_options == 0) {
            nobody_runs();
            continue;
        }
        unsigned taken = choose(num_options);
        preemptions += taken >= num_free;
        fiber *next = &threads[options[taken] % MOST_THREADS];
        if (options[taken] >= 2 * MOST_THREADS)
            next->state = WANTS_LOCK;
        else if (options[taken] >= MOST_THREADS)
            time_out(next);
        may_preempt = preemptions < schedule_bound;
        if (options[taken] < MOST_THREADS) {
            switch_to(options[taken]);
            return;
        }
        if (goes_on && !may_preempt)
            return;
    }
}

/* Somebody else may come between. */
static void point(const char *what, const char *place)
{
    note_down(what, place);
    reschedule(true);
}

static void thread_main(void)
{
    fiber *t = &threads[self];
    t->body(t->argument);
    SCHEDULE_CHECK(t->locks == 0);
    note_down("ends", t->place);
    t->state = ENDED;
    version++;
    reschedule(false);
    schedule_failed("a thread goes on after its end");
}

static void schedule_start(void *(*body)(void *), void *argument)
{
    SCHEDULE_CHECK(num_threads < MOST_THREADS);
    fiber *t = &threads[num_threads];
    char *stack = stacks[num_threads++];
    *t = (fiber){.state = RUNS, .body = body, .argument = argument, .place = "its beginning"};
    SCHEDULE_UNPOISON(stack, THREAD_STACK);
    CHECK(getcontext(&t->context) == 0);
    t->context.uc_stack.ss_sp = stack;
    t->context.uc_stack.ss_size = THREAD_STACK;
    t->context.uc_link = NULL;
    makecontext(&t->context, thread_main, 0);
}

/* One run, of a thread that may start others, to the end of all. */
static void schedule_run(void *(*body)(void *), void *argument)
{
    num_threads = preemptions = choices_made = timeouts_used = 0;
    num_notes = 0;
    version = 1;
    clock_ns = 1000000000;
    schedule_start(body, argument);
    self = 0;
    volatile bool has_run = false;
    CHECK(getcontext(&explorer) == 0);
    if (!has_run) {
        has_run = true;
        threads[0].has_begun = true;
        setcontext(&threads[0].context);
    }
}

/* ---- what the calls of the system become ---- */

/* The program's: a lock is about to be released, so what it guards should be in order. */
static void schedule_unlocks(const pthread_mutex_t *lock, const char *place);

/* The program's: may an atomic be changed there without a lock? */
static bool schedule_needs_no_lock(const char *place);

enum { DESTROYED = 0xdd };

static int schedule_init_mutex(pthread_mutex_t *lock)
{
    memset(lock, 0, sizeof *lock);
    return 0;
}

static int schedule_destroy_mutex(pthread_mutex_t *lock)
{
    SCHEDULE_CHECK(*owner_of(lock) == 0);
    memset(lock, DESTROYED, sizeof *lock);
    return 0;
}

static void take_lock(pthread_mutex_t *lock)
{
    fiber *t = &threads[self];
    while (*owner_of(lock) != 0) {
        SCHEDULE_CHECK(*owner_of(lock) <= num_threads); /* it is not destroyed */
        SCHEDULE_CHECK(*owner_of(lock) != self + 1);
        t->state = WANTS_LOCK;
        t->lock = lock;
        reschedule(false);
    }
    t->state = RUNS;
    *owner_of(lock) = (unsigned char)(self + 1);
    t->locks++;
}

static void release_lock(pthread_mutex_t *lock, const char *place)
{
    SCHEDULE_CHECK(*owner_of(lock) == self + 1);
    schedule_unlocks(lock, place);
    *owner_of(lock) = 0;
    threads[self].locks--;
    version++;
}

static int schedule_lock(pthread_mutex_t *lock, const char *place)
{
    point("locks", place);
    take_lock(lock);
    return 0;
}

static int schedule_unlock(pthread_mutex_t *lock, const char *place)
{
    note_down("unlocks", place);
    release_lock(lock, place);
    return 0;
}

static int schedule_init_cond(pthread_cond_t *cond)
{
    memset(cond, 0, sizeof *cond);
    return 0;
}

static bool schedule_is_waited_for(const pthread_cond_t *cond)
{
    for (unsigned i = 0; i < num_threads; i++) {
        if (threads[i].state == WAITS && threads[i].cond == cond)
            return true;
    }
    return false;
}

static int schedule_destroy_cond(pthread_cond_t *cond)
{
    SCHEDULE_CHECK(!schedule_is_waited_for(cond));
    memset(cond, DESTROYED, sizeof *cond);
    return 0;
}

static void schedule_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns, const char *place)
{
    fiber *t = &threads[self];
    note_down("waits", place);
    SCHEDULE_CHECK(*(unsigned char *)cond != DESTROYED);
    release_lock(lock, place);
    t->state = WAITS;
    t->cond = cond;
    t->lock = lock;
    t->until_ns = deadline_ns;
    reschedule(false);
    take_lock(lock);
    note_down("is woken", place);
}

static const char *lost_signals = ""; /* those of this function do not arrive: to see that the scheduler notices */

static int schedule_signal(pthread_cond_t *cond, bool all, const char *place)
{
    unsigned waiting[MOST_THREADS], num_waiting = 0;
    note_down("signals", place);
    SCHEDULE_CHECK(*(unsigned char *)cond != DESTROYED);
    if (strcmp(place, lost_signals) == 0)
        return 0;
    for (unsigned i = 0; i < num_threads; i++) {
        if (threads[i].state == WAITS && threads[i].cond == cond)
            waiting[num_waiting++] = i;
    }
    if (num_waiting == 0)
        return 0;
    unsigned chosen = all ? 0 : choose(num_waiting);
    for (unsigned n = 0; n < num_waiting; n++) {
        if (all || n == chosen)
            threads[waiting[n]].state = WANTS_LOCK;
    }
    return 0;
}

static int threads_to_start; /* before one cannot be started; less than 0: all can */

static int schedule_create(pthread_t *made, void *(*body)(void *), void *argument)
{
    if (threads_to_start == 0)
        return EAGAIN;
    threads_to_start--;
    memset(made, 0, sizeof *made);
    schedule_start(body, argument);
    return 0;
}

/* A thread that holds a lock looks at what is changed under it alone, so nobody could come between. */
static void schedule_look(const char *place)
{
    if (threads[self].locks == 0)
        point("looks", place);
}

static void schedule_change(const char *place)
{
    SCHEDULE_CHECK(threads[self].locks > 0 || schedule_needs_no_lock(place));
    point("changes", place);
    version++;
}

static void schedule_spend(uint64_t duration_ns)
{
    clock_ns += duration_ns;
}

static uint64_t schedule_now(void)
{
    threads[self].has_looked_enough = false;
    return clock_ns += 10;
}

/* The thread does nothing before something changes, or for so long. */
static void await_change(uint64_t duration_ns, const char *what, const char *place)
{
    fiber *t = &threads[self];
    note_down(what, place);
    t->state = LOOKS;
    t->seen = version;
    t->until_ns = clock_ns + duration_ns;
    reschedule(false);
    t->state = RUNS;
}

/* In a loop that looks for something; it has looked once at what there is now. */
static void schedule_relax(const char *place)
{
    fiber *t = &threads[self];
    if (t->has_looked_enough)
        return;
    if (t->seen != version)
        t->seen = version;
    else
        await_change(LOOKING_NS, "looks again", place);
}

static void schedule_sleep(uint64_t duration_ns, const char *place)
{
    await_change(duration_ns, "sleeps", place);
    threads[self].has_looked_enough = false;
}

#endif
