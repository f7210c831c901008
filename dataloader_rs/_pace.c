/* The pace. See _pace.h for what it promises.
 *
 * What a trial costs. Where more workers are faster, the two segments with fewer of them lose a few milliseconds. So the
 * next trial of that kind is put off for twice as long, and for longer where runs are long. Items beyond SLOW_ITEM_NS are left alone:
 * what they wait for is rarely another worker. */
#include "_pace.h"

#define MS 1000000ull

enum { SEGMENTS = 4, ENOUGH_ITEMS = 8, ENOUGH_REPORTS = 3 /* of each worker */, WORTH = 40 };

static const uint64_t SEGMENT_NS = 4 * MS;
static const uint64_t SEGMENT_MOST_NS = 100 * MS; /* a segment or a settling that takes longer says nothing */
static const uint64_t FIRST_TRIAL_NS = 15 * MS;   /* of steady work, before the first trial */
static const uint64_t PERIOD_NS = 400 * MS;       /* from one trial to the next, which goes the other way */
static const uint64_t SOON_NS = 40 * MS;          /* the same after a success */
static const uint64_t SLOW_ITEM_NS = 2 * MS;
static const uint64_t STALL_HOLD_NS = 1000 * MS;
static const uint64_t STALL_HOLD_MOST_NS = 64000 * MS;
/* How fast a candidate must be, compared with `best`. Fewer workers that get about as much done are better: the processors are
 * free for others, and a step on the way to fewer still may be level ground. */
static const double ENOUGH_MORE = 1.03;
static const double ENOUGH_FEWER = 0.985;

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

void dlrs_pace_init(dlrs_pace *pace, unsigned most)
{
    *pace = (dlrs_pace){.limit = most, .most = most, .best = most, .step = -1, .stall_hold_ns = STALL_HOLD_NS};
}

static void end_trial(dlrs_pace *pace, uint64_t trial_due_ns)
{
    pace->step = -1;
    pace->limit = pace->best;
    pace->trial_due_ns = trial_due_ns;
}

static void begin_step(dlrs_pace *pace, uint64_t now_ns)
{
    pace->limit = pace->step % 2 == 0 ? pace->best : pace->candidate;
    pace->settling = true;
    pace->since_ns = now_ns;
}

static void begin_trial(dlrs_pace *pace, uint64_t now_ns)
{
    bool up = pace->best == 1 || (pace->upwards && pace->best < pace->most);
    if (!up)
        pace->candidate = pace->best / 2;
    else
        pace->candidate = pace->best > pace->most / 2 ? pace->most : pace->best * 2;
    pace->rates[0] = pace->rates[1] = 0;
    pace->candidate_ns = 0;
    pace->step = 0;
    begin_step(pace, now_ns);
}

static void begin_segment(dlrs_pace *pace, uint64_t now_ns)
{
    pace->settling = false;
    pace->since_ns = now_ns;
    pace->segment++;
    pace->segment_reports = pace->segment_items = 0;
    pace->segment_rate = 0;
}

static void decide(dlrs_pace *pace, uint64_t now_ns)
{
    bool was_up = pace->candidate > pace->best;
    if (pace->rates[1] > pace->rates[0] * (was_up ? ENOUGH_MORE : ENOUGH_FEWER)) {
        pace->upwards = was_up;
        pace->best = pace->candidate;
        end_trial(pace, now_ns + SOON_NS);
        return;
    }
    uint64_t wait_ns = PERIOD_NS;
    if (!was_up && pace->best == pace->most) {
        wait_ns = max_u64(2 * PERIOD_NS, pace->candidate_ns * WORTH);
    }
    pace->upwards = !was_up;
    end_trial(pace, now_ns + wait_ns);
}

static void end_segment(dlrs_pace *pace, uint64_t now_ns)
{
    pace->rates[pace->step % 2] += pace->segment_rate;
    if (pace->step % 2 == 1)
        pace->candidate_ns += now_ns - pace->since_ns;
    if (++pace->step == SEGMENTS)
        decide(pace, now_ns);
    else
        begin_step(pace, now_ns);
}

static double rate_of(const dlrs_pace_reports *reports)
{
    return reports->last_ns > reports->first_ns
               ? (double)reports->items / (double)(reports->last_ns - reports->first_ns) : 0;
}

static void add_report(dlrs_pace *pace, dlrs_pace_reports *own, uint64_t items, uint64_t now_ns)
{
    if (own->segment != pace->segment) {
        *own = (dlrs_pace_reports){.segment = pace->segment, .first_ns = now_ns, .last_ns = now_ns};
        return;
    }
    pace->segment_rate -= rate_of(own);
    own->items += items;
    own->last_ns = now_ns;
    pace->segment_items += items;
    pace->segment_reports++;
    pace->segment_rate += rate_of(own);
}

void dlrs_pace_report(dlrs_pace *pace, dlrs_pace_reports *own, uint64_t items, uint64_t elapsed_ns, uint64_t now_ns,
                      unsigned awake)
{
    if (pace->most == 1)
        return;
    if (pace->trial_due_ns == 0)
        pace->trial_due_ns = now_ns + FIRST_TRIAL_NS;
    if (items > 0 && elapsed_ns / items >= SLOW_ITEM_NS) {
        end_trial(pace, now_ns + PERIOD_NS);
        return;
    }
    if (pace->step < 0) {
        if (now_ns >= pace->trial_due_ns && !dlrs_pace_is_stalled(pace, now_ns))
            begin_trial(pace, now_ns);
        return;
    }
    uint64_t spent_ns = now_ns > pace->since_ns ? now_ns - pace->since_ns : 0;
    if (pace->settling) {
        if (awake == pace->limit)
            begin_segment(pace, now_ns);
        else if (spent_ns >= SEGMENT_MOST_NS)
            end_trial(pace, now_ns + PERIOD_NS);
        return;
    }
    add_report(pace, own, items, now_ns);
    if (spent_ns >= SEGMENT_NS && pace->segment_items >= ENOUGH_ITEMS
        && pace->segment_reports >= (uint64_t)pace->limit * ENOUGH_REPORTS)
        end_segment(pace, now_ns);
    else if (spent_ns >= SEGMENT_MOST_NS)
        end_trial(pace, now_ns + PERIOD_NS);
}

void dlrs_pace_disturb(dlrs_pace *pace)
{
    if (pace->step >= 0)
        end_trial(pace, 0);
}

void dlrs_pace_stall(dlrs_pace *pace, uint64_t now_ns)
{
    pace->best = pace->most;
    pace->stalled_until_ns = now_ns + pace->stall_hold_ns;
    end_trial(pace, pace->stalled_until_ns);
    if (pace->stall_hold_ns < STALL_HOLD_MOST_NS)
        pace->stall_hold_ns *= 2;
}

bool dlrs_pace_is_stalled(const dlrs_pace *pace, uint64_t now_ns)
{
    return now_ns < pace->stalled_until_ns;
}
