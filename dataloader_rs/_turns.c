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
/* How much more workers must get done side by side, in both halves of a trial: a step is some ten runs of 2 ms, which is
 * a quarter more or less if they come at random. And how much in one of them is enough. */
static const double ENOUGH = 1.2;
static const double CLEARLY = 2;

void dlrs_turns_init(dlrs_turns *turns)
{
    *turns = (dlrs_turns){.step = -1, .in_vain_ns = IN_VAIN_NS};
}

static void begin_comparing(dlrs_turns *turns, uint64_t now_ns)
{
    turns->settled_ns = now_ns + SETTLE_NS;
    turns->since_ns = turns->reports = turns->turns_taken = turns->items = 0;
}

static void decide_turns(dlrs_turns *turns, bool is_better, uint64_t now_ns)
{
    turns->step = -1;
    turns->is_better = is_better;
    turns->due_ns = turns->better_until_ns = now_ns + (turns->is_better ? BETTER_NS : turns->in_vain_ns);
    turns->in_vain_ns = turns->is_better ? IN_VAIN_NS : 2 * IN_VAIN_NS;
}

static void end_comparing(dlrs_turns *turns, uint64_t now_ns)
{
    if (turns->step % 2 == 0 && turns->turns_taken < turns->reports / 2) {
        turns->step = -1; /* most are long: there are no turns to compare with */
        turns->due_ns = now_ns + FIRST_NS;
        return;
    }
    turns->rates[turns->step % 2] = (double)turns->items / (double)(now_ns - turns->since_ns);
    turns->step++;
    if (turns->step % 2 == 0 && turns->rates[1] <= turns->rates[0] * ENOUGH)
        decide_turns(turns, false, now_ns);
    else if (turns->step == STEPS || (turns->step % 2 == 0 && turns->rates[1] > turns->rates[0] * CLEARLY))
        decide_turns(turns, true, now_ns);
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
    if (now_ns >= turns->better_until_ns)
        turns->is_better = false; /* or each alarm would bring it back, whose trial ends with the alarm */
}

void dlrs_turns_report(dlrs_turns *turns, uint64_t runs, uint64_t items, uint64_t spent_ns, uint64_t run_ns,
                       uint64_t cheap_ns, bool took_turns, uint64_t now_ns)
{
    turns->recent_ns -= turns->recent_ns / TURNS_RECENT_RUNS * runs;
    turns->recent_ns += dlrs_min_u64(spent_ns, COUNTED_MOST_NS);
    look_for_long_runs(turns, run_ns, cheap_ns, now_ns);
    if (turns->step >= 0) {
        if (turns->since_ns == 0) {
            turns->since_ns = now_ns >= turns->settled_ns ? now_ns : 0;
        } else {
            turns->reports++;
            turns->turns_taken += took_turns;
            turns->items += items;
            if (turns->reports >= STEP_REPORTS && now_ns >= turns->since_ns + STEP_NS)
                end_comparing(turns, now_ns);
        }
    } else if (turns->takes_long && now_ns >= turns->due_ns) {
        turns->step = 0;
        begin_comparing(turns, now_ns);
    }
    turns->side_by_side = turns->takes_long && (turns->step >= 0 ? turns->step % 2 == 1 : turns->is_better);
}
