/* What POSIX leaves to each system: a condition that waits on the monotonic clock, a thread's name, the number of
 * processors this process may use, locks that are held for moments. Linux (glibc) and macOS. Included by C files
 * alone, and before all else, since it says what the system's headers should declare. */
#ifndef DLRS_PLATFORM_H
#define DLRS_PLATFORM_H

#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* pthread_setname_np, sched_getaffinity, adaptive mutexes */
#endif

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define DLRS_NS_PER_S 1000000000ull

static inline uint64_t dlrs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * DLRS_NS_PER_S + (uint64_t)now.tv_nsec;
}

/* The moment `timeout_ns` from now; never wraps. */
static inline uint64_t dlrs_deadline_after(uint64_t timeout_ns)
{
    uint64_t now = dlrs_now_ns();
    uint64_t forever = (uint64_t)INT_MAX * DLRS_NS_PER_S; /* fits a 32-bit time_t */
    return timeout_ns < forever - now ? now + timeout_ns : forever;
}

/* How long processors have run the calling thread. */
static inline uint64_t dlrs_thread_busy_ns(void)
{
    struct timespec busy;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &busy);
    return (uint64_t)busy.tv_sec * DLRS_NS_PER_S + (uint64_t)busy.tv_nsec;
}

/* The same of all threads of the process. */
static inline uint64_t dlrs_process_busy_ns(void)
{
    struct timespec busy;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &busy);
    return (uint64_t)busy.tv_sec * DLRS_NS_PER_S + (uint64_t)busy.tv_nsec;
}

/* The same of another thread, which has not ended; 0 where the system does not tell. */
static inline uint64_t dlrs_busy_of_thread_ns(pthread_t thread)
{
#ifdef __APPLE__
    (void)thread;
    return 0;
#else
    clockid_t clock;
    struct timespec busy;
    if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &busy) != 0)
        return 0;
    return (uint64_t)busy.tv_sec * DLRS_NS_PER_S + (uint64_t)busy.tv_nsec;
#endif
}

static inline int dlrs_cond_init(pthread_cond_t *cond)
{
#ifdef __APPLE__
    return pthread_cond_init(cond, NULL); /* waits are relative there, so the clock does not matter */
#else
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error != 0)
        return error;
    error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (error == 0)
        error = pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
    return error;
#endif
}

/* Wait until signalled, or until the monotonic clock passes `deadline_ns`. */
static inline void dlrs_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
#ifdef __APPLE__
    uint64_t now = dlrs_now_ns();
    if (now >= deadline_ns)
        return;
    struct timespec left = {.tv_sec = (time_t)((deadline_ns - now) / DLRS_NS_PER_S),
                            .tv_nsec = (long)((deadline_ns - now) % DLRS_NS_PER_S)};
    pthread_cond_timedwait_relative_np(cond, lock, &left);
#else
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / DLRS_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % DLRS_NS_PER_S)};
    pthread_cond_timedwait(cond, lock, &deadline);
#endif
}

/* A lock whose holders keep it for less than it takes to sleep and be woken: who finds it taken looks again first. */
static inline int dlrs_mutex_init(pthread_mutex_t *lock)
{
    pthread_mutexattr_t attributes;
    int error = pthread_mutexattr_init(&attributes);
    if (error != 0)
        return error;
#ifdef __GLIBC__
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
    error = pthread_mutex_init(lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return error;
}

/* Sleep for less than a second. */
static inline void dlrs_sleep(uint64_t duration_ns)
{
    struct timespec duration = {.tv_nsec = (long)duration_ns};
    nanosleep(&duration, NULL);
}

/* Name the calling thread for `ps`, debuggers and profilers; at most 15 bytes are kept on Linux. */
static inline void dlrs_name_thread(const char *name)
{
#ifdef __APPLE__
    pthread_setname_np(name);
#else
    char kept[16]; /* a longer name is refused, not cut */
    snprintf(kept, sizeof kept, "%.15s", name);
    pthread_setname_np(pthread_self(), kept);
#endif
}

static inline unsigned dlrs_usable_processors(void)
{
#ifdef __linux__
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof usable, &usable) == 0)
        return (unsigned)CPU_COUNT(&usable);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}

/* Tell the processor that this is a loop that waits. */
static inline void dlrs_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
