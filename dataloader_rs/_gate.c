/* The gate. See _gate.h for what it promises. */
#include "_platform.h"

#include "_gate.h"

#include <stdatomic.h>
#include <stdint.h>

/* A consumer that is let in comes within AWAKE_NS if it is awake; a worker that sleeps in between saves the processor
 * for whoever holds things up. */
static const uint64_t AWAKE_NS = 20000;
static const uint64_t SLEEP_NS = 50000;
static const uint64_t ASIDE_MOST_NS = 2000000;

static atomic_uint asking;
static atomic_uint aside; /* workers that stand aside */

void dlrs_gate_ask(void)
{
    atomic_fetch_add(&asking, 1);
}

bool dlrs_gate_look(uint64_t most_ns)
{
    uint64_t deadline = dlrs_now_ns() + most_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&aside, memory_order_acquire) > 0)
                return true;
            dlrs_relax();
        }
    } while (dlrs_now_ns() < deadline);
    return false;
}

void dlrs_gate_passed(void)
{
    atomic_fetch_sub(&asking, 1);
}

bool dlrs_gate_is_asked(void)
{
    return atomic_load_explicit(&asking, memory_order_relaxed) > 0;
}

void dlrs_gate_stand_aside(bool looks)
{
    if (!dlrs_gate_is_asked())
        return;
    uint64_t start = dlrs_now_ns(), spent = 0;
    atomic_fetch_add(&aside, 1);
    while (dlrs_gate_is_asked() && spent < ASIDE_MOST_NS) {
        if (looks && spent < AWAKE_NS) {
            for (int i = 0; i < 32 && dlrs_gate_is_asked(); i++)
                dlrs_relax();
        } else {
            dlrs_sleep(SLEEP_NS);
        }
        spent = dlrs_now_ns() - start;
    }
    atomic_fetch_sub(&aside, 1);
}

void dlrs_gate_reset(void)
{
    atomic_store(&asking, 0);
    atomic_store(&aside, 0);
}
