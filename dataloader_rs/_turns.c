/* The turns. See _turns.h for what they promise. */
#include "_turns.h"

#include "_numbers.h"

#define MS 1000000ull

enum {
    TURNS_RECENT_RUNS = 256,
    STEPS = 4,
    STEP_REPORTS = 8, /* of a step */
};

static const uint64_t COUNTED_MOST_NS = 4 * MS; /* a report counts as no more among the recent ones */
static const uint64_t FIRST_NS = 15 * MS;       /* of a few long runs, before a trial */
static const uint64_t SETTLE_NS = 5 * MS;       /* workers that should come or go have done so, or are at a long run */
static const uint64_t STEP_NS = 20 * MS;
static const uint64_t IN_VAIN_NS = 400 * MS; /* from a trial in vain to the next, and twice as long after the second */
static const uint64_t BETTER_NS = 2000 * MS; /* how long it holds that side by side is better */
static const double ENOUGH = 1.05;           /* times as much must workers get done side by side */
static const double CLEARLY = 1.5;           /* that much or little after half of the trial is enough to end it */
static const double HOPELESS = 0.9;

void dlrs_turns_init(dlrs_turns *turns)
{
    *turns = (dlrs_turns){.step = -1, .in_vain_ns = IN_VAIN_NS};
}

static void begin_comparing(dlrs_turns *turns, uint64_t now_ns)
{
    turns->settled_ns = now_ns + SETTLE_NS;
    turns->since_ns = turns->reports = turns->items = 0;
}

static void decide_turns(dlrs_turns *turns, uint64_t now_ns)
{
    turns->step = -1;
    turns->is_better = turns->rates[1] > turns->rates[0] * ENOUGH;
    turns->due_ns = now_ns + (turns->is_better ? BETTER_NS : turns->in_vain_ns);
    turns->in_vain_ns = turns->is_better ? IN_VAIN_NS : 2 * IN_VAIN_NS;
}

static void end_comparing(dlrs_turns *turns, uint64_t now_ns)
{
    turns->rates[turns->step % 2] += (double)turns->items / (double)(now_ns - turns->since_ns);
    turns->step++;
    bool is_clear = turns->step == 2
                    && (turns->rates[1] > turns->rates[0] * CLEARLY || turns->rates[1] < turns->rates[0] * HOPELESS);
    if (turns->step == STEPS || is_clear)
        decide_turns(turns, now_ns);
    else
        begin_comparing(turns, now_ns);
}

static void look_for_long_runs(dlrs_turns *turns, uint64_t run_ns, uint64_t cheap_ns, uint64_t now_ns)
{
    uint64_t average_ns = turns->recent_ns / TURNS_RECENT_RUNS;
    bool took_long = turns->takes_long;
    bool are_alike = run_ns < cheap_ns && average_ns < 2 * run_ns;
    turns->takes_long = !are_alike && average_ns >= (took_long ? cheap_ns / 2 : cheap_ns);
    if (turns->takes_long == took_long)
        return;
    turns->step = -1;
    turns->due_ns = dlrs_max_u64(turns->due_ns, now_ns + FIRST_NS);
}

void dlrs_turns_report(dlrs_turns *turns, uint64_t runs, uint64_t items, uint64_t spent_ns, uint64_t run_ns,
                       uint64_t cheap_ns, uint64_t now_ns)
{
    turns->recent_ns -= turns->recent_ns / TURNS_RECENT_RUNS * runs;
    turns->recent_ns += dlrs_min_u64(spent_ns, COUNTED_MOST_NS);
    look_for_long_runs(turns, run_ns, cheap_ns, now_ns);
    if (turns->step >= 0) {
        if (turns->since_ns == 0) {
            turns->since_ns = now_ns >= turns->settled_ns ? now_ns : 0;
        } else {
            turns->reports++;
            turns->items += items;
            if (turns->reports >= STEP_REPORTS && now_ns >= turns->since_ns + STEP_NS)
                end_comparing(turns, now_ns);
        }
    } else if (turns->takes_long && now_ns >= turns->due_ns) {
        turns->step = 0;
        turns->rates[0] = turns->rates[1] = 0;
        begin_comparing(turns, now_ns);
    }
    turns->side_by_side = turns->takes_long && (turns->step >= 0 ? turns->step % 2 == 1 : turns->is_better);
}
