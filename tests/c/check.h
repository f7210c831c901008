/* What the C tests share: checks that hold in every build, a watchdog, random numbers, and the loop of a program.
 *
 *     int main(int argc, char **argv)
 *     {
 *         check_begin(argc, argv);
 *         RUN(test_something_promised);
 *         return check_end();
 *     }
 *
 * A failed check prints its place and ends the process with 1, on whatever thread. So does a test that hangs. The
 * optional argument of a program is how many percent of the usual rounds it does: few under valgrind, many if there is
 * time. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the sanitizers cannot do. gcc has the first name, clang the second. valgrind is no matter of the compiler, so
 * its build says CHECK_NO_FORK: it would take the pools that a child leaves as its parent made them for lost. */
#ifdef __has_feature
#define CHECK_HAS_FEATURE(name) __has_feature(name)
#else
#define CHECK_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || CHECK_HAS_FEATURE(thread_sanitizer) || defined(CHECK_NO_FORK)
#define CHECK_CAN_FORK 0 /* TSan does not follow a process of several threads through fork() */
#define CHECK_CAN_ALLOCATE_AFTER_FORK 0
#elif defined(__SANITIZE_ADDRESS__) || CHECK_HAS_FEATURE(address_sanitizer)
#define CHECK_CAN_FORK 1
#define CHECK_CAN_ALLOCATE_AFTER_FORK 0 /* a child may inherit its allocator locked */
#else
#define CHECK_CAN_FORK 1
#define CHECK_CAN_ALLOCATE_AFTER_FORK 1
#endif

enum { CHECK_WATCHDOG_S = 60 };

/* A wait that is not supposed to end by time ends after this, with the line of a check rather than the watchdog. */
#ifndef CHECK_PLENTY_NS
#define CHECK_PLENTY_NS 30000000000u
#endif

static const char *volatile check_running = "check_begin";
static unsigned check_passed;
static unsigned check_percent = 100;

#define CHECK(condition) ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition))

#define CHECK_EQUAL(actual, expected) \
    check_equal(__FILE__, __LINE__, #actual " == " #expected, (uint64_t)(actual), (uint64_t)(expected))

#define RUN(test) check_run(#test, test)

static inline _Noreturn void check_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: %s: not true: %s\n", file, line, check_running, what);
    _exit(1);
}

static inline void check_equal(const char *file, int line, const char *what, uint64_t actual, uint64_t expected)
{
    if (actual == expected)
        return;
    fprintf(stderr, "%s:%d: %s: not true: %s, it is %" PRIu64 " == %" PRIu64 "\n", file, line, check_running, what,
            actual, expected);
    _exit(1);
}

static inline void check_hung(int signal_number)
{
    (void)signal_number;
    static const char tail[] = ": hangs\n";
    const char *name = check_running;
    if (write(STDERR_FILENO, name, strlen(name)) < 0 || write(STDERR_FILENO, tail, sizeof tail - 1) < 0)
        _exit(2);
    _exit(1);
}

static inline void check_begin(int argc, char **argv)
{
    if (argc > 1)
        check_percent = (unsigned)strtoul(argv[1], NULL, 10);
    signal(SIGALRM, check_hung);
}

/* What comes next is called so, and takes less time than the watchdog waits. */
static inline void check_next(const char *name)
{
    check_running = name;
    alarm(CHECK_WATCHDOG_S * (check_percent > 100 ? check_percent / 100 : 1));
}

static inline void check_run(const char *name, void (*test)(void))
{
    check_next(name);
    test();
    alarm(0);
    check_passed++;
}

static inline int check_end(void)
{
    printf("%u passed, 0 failed\n", check_passed);
    return 0;
}

/* How many rounds to do where the usual number is `usual`; at least 1. */
static inline unsigned check_rounds(unsigned usual)
{
    unsigned rounds = usual * check_percent / 100;
    return rounds > 0 ? rounds : 1;
}

/* The next of a sequence of random numbers below `bound`, the same in every run (splitmix64). */
static inline uint64_t check_random(uint64_t *state, uint64_t bound)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % bound;
}

#endif
