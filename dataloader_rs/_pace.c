/* The pace. See _pace.h for what it promises.
 *
 * What a trial costs. Where more workers are faster, the two segments with fewer of them lose a few milliseconds. So
 * the next trial of that kind is put off for twice as long, and for longer where runs are long. Runs that are too long
 * for that are left alone: what they wait for is rarely another worker. More workers are not tried while those who are
 * awake leave no processor idle. */
#include "_pace.h"

#include <stddef.h>

#include "_numbers.h"

#define MS 1000000ull

enum {
    SEGMENTS = 4,
    DISTURBANCES = 3, /* of one segment */
    ENOUGH_REPORTS = 8,
    ENOUGH_TELLS = 2, /* a worker */
    LOOKS_UNTOLD = 4, /* for how busy workers are, before the first of them told it */
    WORTH = 30,       /* a trial with fewer workers, of so many times as long without one */
    WORTH_FIRST = 10, /* and the first */
};

static const uint64_t SEGMENT_NS = 8 * MS;
static const uint64_t SEGMENT_MOST_NS = 200 * MS; /* a segment or a settling that takes longer says nothing */
static const uint64_t COMING_NS = 2 * MS;         /* by then a worker that was woken is there */
static const uint64_t TOLD_NS = 20000;            /* how busy a worker is, of runs that take so long or longer */
static const uint64_t FIRST_TRIAL_NS = 15 * MS;   /* of steady work, before the first trial */
static const uint64_t FIRST_MOST_NS = 1000 * MS;  /* nor does the first with fewer workers wait longer */
static const uint64_t PERIOD_NS = 400 * MS;       /* from one trial to the next, which goes the other way */
static const uint64_t PERIOD_MOST_NS = 700 * MS;  /* the same after the second in a row with more workers in vain */
static const uint64_t SOON_NS = 40 * MS;          /* the same after a success */
static const uint64_t STALL_HOLD_NS = 1000 * MS;
static const uint64_t STALL_HOLD_MOST_NS = 64000 * MS;
/* How fast a candidate must be, compared with `best`. Fewer workers that get about as much done are better: the
 * processors are free for others, and a step on the way to fewer still may be level ground. */
static const double ENOUGH_MORE = 1.03;
static const double ENOUGH_FEWER = 0.985;
/* A candidate that looks so bad after half of its trial is not tried on. More workers would have to make up for it. */
static const double MUCH_SLOWER_MORE = 0.9;
static const double MUCH_SLOWER_FEWER = 0.75;
static const double WAITING = 0.5;   /* processors: workers that keep less than that busy all together mostly wait */
static const double WORKING = 0.8;   /* and only if they keep as much busy is it tried whether fewer are faster */
static const double SATURATED = 0.8; /* of the processors that there are */
static const double SIDE_BY_SIDE = 0.8; /* of the processors that the workers could use */
static const double CHANGED = 1.5;      /* times as long, a run */
static const double FULL = 0.9;         /* of the processors that there are: more workers have nothing to run on */
static const double AS_BUSY = 0.85;     /* as the crowd was, are those who are left when it was thinned */

void dlrs_pace_init(dlrs_pace *pace, unsigned most, unsigned num_processors, bool exclusive)
{
    unsigned first = most < num_processors ? most : num_processors;
    *pace = (dlrs_pace){.limit = first,
                        .most = most,
                        .num_processors = num_processors,
                        .exclusive = exclusive,
                        .best = first,
                        .step = -1,
                        .more_period_ns = PERIOD_NS,
                        .stall_hold_ns = STALL_HOLD_NS};
}

void dlrs_pace_begin_with_all(dlrs_pace *pace)
{
    if (pace->trial_due_ns == 0)
        pace->best = pace->limit = pace->most;
}

static void end_trial(dlrs_pace *pace, uint64_t trial_due_ns)
{
    if (pace->step >= 0)
        pace->reports = pace->reported_ns = 0; /* of the last segment, not of what comes now */
    pace->step = -1;
    pace->limit = pace->best;
    pace->trial_due_ns = trial_due_ns;
}

static void begin_segment(dlrs_pace *pace, uint64_t now_ns)
{
    pace->settling = false;
    pace->since_ns = now_ns;
    pace->segment++;
    pace->reporting = NULL;
    pace->reports = pace->items = 0;
}

static void begin_step(dlrs_pace *pace, uint64_t now_ns)
{
    unsigned before = pace->limit;
    pace->limit = pace->step % 2 == 0 ? pace->best : pace->candidate;
    pace->disturbances = 0;
    pace->settling = pace->limit != before;
    pace->since_ns = now_ns;
    if (!pace->settling)
        begin_segment(pace, now_ns);
}

static void forget_tells(dlrs_pace *pace)
{
    pace->timed_ns = pace->tells = 0;
    pace->all_busy_ns = 0;
}

/* Do the workers, all together, keep so many processors busy? True if that is not known. */
static bool are_busy(const dlrs_pace *pace, double processors)
{
    return pace->all_busy_ns >= (double)pace->timed_ns * processors;
}

/* Workers with a processor each that lose less than a fifth of their time to waiting for one lock get more done than
 * fewer of them would. Without such a lock they may be run all the time and still hinder each other. True if that is
 * not known. */
static bool run_side_by_side(const dlrs_pace *pace)
{
    return pace->exclusive && pace->best > 1 && pace->best <= pace->num_processors
           && are_busy(pace, SIDE_BY_SIDE * pace->best);
}

/* How many reports a segment takes, beside the first of each worker. */
static uint64_t enough_reports(unsigned awake)
{
    return awake == 1 ? ENOUGH_REPORTS / 2 : awake > ENOUGH_REPORTS ? awake : ENOUGH_REPORTS;
}

/* Are reports so far apart that a segment would take too long? */
static bool are_rare(const dlrs_pace *pace, unsigned awake)
{
    double periods = 1 + (double)enough_reports(awake) / awake;
    return (double)pace->reported_ns * periods >= (double)SEGMENT_MOST_NS * (double)pace->reports;
}

/* Without a lock that they share workers are seldom faster when they are fewer, so to try that waits until it costs
 * little of what was done. */
static uint64_t first_trial_with_fewer(const dlrs_pace *pace, uint64_t now_ns)
{
    uint64_t run_ns = pace->reported_ns / pace->reports;
    return pace->exclusive ? now_ns : now_ns + dlrs_min_u64(run_ns * ENOUGH_REPORTS * WORTH_FIRST, FIRST_MOST_NS);
}

static bool are_runs_cheap(const dlrs_pace *pace)
{
    return pace->reported_ns < pace->reports * TOLD_NS;
}

/* Are workers who may be a crowd about to tell how busy they are? They do if their runs are not cheap, and if they do
 * several before they are out of work. */
static bool tells_will_come(const dlrs_pace *pace)
{
    return pace->timed_ns == 0 && pace->best > pace->num_processors && !are_runs_cheap(pace)
           && pace->looks_untold < LOOKS_UNTOLD;
}

/* Are there more workers than processors, and busy enough to use up what they can? */
static bool are_crowd(const dlrs_pace *pace)
{
    unsigned usable = pace->exclusive ? 1 : pace->num_processors; /* by workers that do not wait */
    return pace->best > pace->num_processors && pace->timed_ns > 0 && are_busy(pace, SATURATED * usable);
}

/* Fewer workers were tried for so long, and in vain. */
static void put_off_fewer(dlrs_pace *pace, uint64_t spent_ns, uint64_t now_ns)
{
    pace->fewer_due_ns = pace->thinning_due_ns = now_ns + dlrs_max_u64(2 * PERIOD_NS, spent_ns * WORTH);
    pace->put_off_run_ns = 0;
}

/* What was found out about fewer workers is of no use once runs take much longer than then, or less long. */
static void forget_if_changed(dlrs_pace *pace, uint64_t now_ns)
{
    double run_ns = (double)pace->reported_ns / (double)pace->reports;
    if (now_ns >= pace->fewer_due_ns)
        return;
    if (pace->put_off_run_ns == 0) {
        pace->put_off_run_ns = run_ns;
    } else if (run_ns > pace->put_off_run_ns * CHANGED || run_ns * CHANGED < pace->put_off_run_ns) {
        pace->fewer_due_ns = pace->thinning_due_ns = now_ns;
        pace->thinned_in_vain = false;
    }
}

static void begin_thinning(dlrs_pace *pace, uint64_t now_ns)
{
    double busy = pace->all_busy_ns / (double)pace->timed_ns;
    pace->crowd = pace->best;
    pace->crowd_busy = busy < pace->num_processors ? busy : pace->num_processors;
    pace->best = pace->limit = pace->num_processors;
    pace->since_ns = now_ns;
}

static void end_thinning(dlrs_pace *pace, bool stays_thin, uint64_t now_ns)
{
    if (!stays_thin)
        pace->best = pace->crowd;
    pace->thinned_in_vain = !stays_thin; /* trials will tell more */
    pace->crowd = 0;
    forget_tells(pace);
    end_trial(pace, now_ns + PERIOD_NS);
}

/* Those who are left of a crowd are as busy as it was, or not, or it is too early to say. */
static void look_at_thinned(dlrs_pace *pace, uint64_t now_ns, unsigned awake)
{
    if (awake > pace->limit) {
        forget_tells(pace); /* the others have not all gone yet */
        pace->since_ns = now_ns;
    } else if (pace->tells >= ENOUGH_TELLS * pace->limit) {
        uint64_t spent_ns = now_ns > pace->since_ns ? now_ns - pace->since_ns : 0;
        bool stays_thin = are_busy(pace, AS_BUSY * pace->crowd_busy);
        if (!stays_thin)
            put_off_fewer(pace, spent_ns, now_ns);
        end_thinning(pace, stays_thin, now_ns);
    } else if (now_ns > pace->since_ns + SEGMENT_MOST_NS) {
        end_thinning(pace, false, now_ns); /* runs are too long for that, or too cheap to be told about now */
    }
}

/* How many workers the next trial is with, or 0 if none can tell anything at this time. */
static unsigned next_candidate(const dlrs_pace *pace, uint64_t now_ns)
{
    bool is_full = pace->timed_ns > 0 && are_busy(pace, FULL * pace->num_processors);
    bool may_go_up = pace->best < pace->most && !is_full;
    bool may_go_down = pace->best > 1 && now_ns >= pace->fewer_due_ns;
    if (may_go_up && (pace->upwards || !may_go_down))
        return pace->best > pace->most / 2 ? pace->most : pace->best * 2;
    if (!may_go_down)
        return 0;
    return are_crowd(pace) ? pace->num_processors : pace->best / 2;
}

/* When there may be a candidate where there is none now. */
static uint64_t next_look(const dlrs_pace *pace, uint64_t now_ns)
{
    uint64_t look_ns = now_ns + PERIOD_NS;
    return now_ns < pace->fewer_due_ns ? dlrs_min_u64(look_ns, pace->fewer_due_ns) : look_ns;
}

static void begin_trial(dlrs_pace *pace, unsigned candidate, uint64_t now_ns)
{
    pace->candidate = candidate;
    if (candidate < pace->best)
        pace->thinned_in_vain = false;
    pace->rates[0] = pace->rates[1] = 0;
    pace->candidate_ns = 0;
    pace->step = 0;
    begin_step(pace, now_ns);
}

static void decide(dlrs_pace *pace, uint64_t now_ns)
{
    bool was_up = pace->candidate > pace->best;
    uint64_t period_ns = PERIOD_NS;
    if (pace->rates[1] > pace->rates[0] * (was_up ? ENOUGH_MORE : ENOUGH_FEWER)) {
        pace->upwards = was_up;
        pace->best = pace->candidate;
        pace->more_period_ns = PERIOD_NS;
        end_trial(pace, now_ns + SOON_NS);
        return;
    }
    if (was_up) {
        period_ns = pace->more_period_ns;
        pace->more_period_ns = dlrs_min_u64(2 * period_ns, PERIOD_MOST_NS);
    } else {
        put_off_fewer(pace, pace->candidate_ns, now_ns);
    }
    pace->upwards = !was_up;
    end_trial(pace, now_ns + period_ns);
}

static void add_report(dlrs_pace *pace, dlrs_pace_worker *worker, uint64_t items, uint64_t now_ns)
{
    if (worker->segment != pace->segment) {
        *worker = (dlrs_pace_worker){.segment = pace->segment, .first_ns = now_ns, .next = pace->reporting};
        pace->reporting = worker;
        return;
    }
    pace->reports++;
    pace->items += items;
}

/* Items per ns of all workers in this segment. Each is, on average, half done with what it will report next. Times are
 * added up before they divide: a worker whose first report has just come would say anything by itself. */
static double segment_rate(const dlrs_pace *pace, uint64_t now_ns)
{
    double workers = 0, spent_ns = 0, items_per_report = (double)pace->items / (double)pace->reports;
    for (const dlrs_pace_worker *worker = pace->reporting; worker != NULL; worker = worker->next) {
        workers++;
        spent_ns += now_ns > worker->first_ns ? (double)(now_ns - worker->first_ns) : 0;
    }
    return spent_ns > 0 ? workers * ((double)pace->items + workers * items_per_report / 2) / spent_ns : 0;
}

static void end_segment(dlrs_pace *pace, uint64_t now_ns)
{
    pace->rates[pace->step % 2] += segment_rate(pace, now_ns);
    if (pace->step % 2 == 1)
        pace->candidate_ns += now_ns - pace->since_ns;
    double much_slower = pace->candidate > pace->best ? MUCH_SLOWER_MORE : MUCH_SLOWER_FEWER;
    bool is_hopeless = pace->step == 1 && pace->rates[1] < pace->rates[0] * much_slower;
    if (++pace->step == SEGMENTS || is_hopeless)
        decide(pace, now_ns);
    else
        begin_step(pace, now_ns);
}

void dlrs_pace_report(dlrs_pace *pace, dlrs_pace_worker *worker, uint64_t items, uint64_t elapsed_ns, uint64_t now_ns,
                      unsigned awake)
{
    if (pace->most == 1)
        return;
    if (pace->trial_due_ns == 0)
        pace->trial_due_ns = now_ns + FIRST_TRIAL_NS;
    if (pace->crowd > 0) {
        look_at_thinned(pace, now_ns, awake);
        return;
    }
    if (pace->step < 0) {
        pace->reports++;
        pace->reported_ns += elapsed_ns;
        if (now_ns < pace->trial_due_ns || dlrs_pace_is_stalled(pace, now_ns))
            return;
        if (pace->timed_ns > 0)
            pace->is_waiting = !are_busy(pace, WAITING);
        else if (are_runs_cheap(pace))
            pace->is_waiting = false; /* nobody tells */
        pace->looks_untold = pace->timed_ns > 0 ? 0 : pace->looks_untold + (pace->looks_untold < LOOKS_UNTOLD);
        forget_if_changed(pace, now_ns);
        if (pace->is_waiting)
            pace->best = pace->most;
        if (pace->fewer_due_ns == 0)
            pace->fewer_due_ns = first_trial_with_fewer(pace, now_ns);
        unsigned candidate = next_candidate(pace, now_ns);
        if (tells_will_come(pace))
            end_trial(pace, now_ns + FIRST_TRIAL_NS);
        else if (are_crowd(pace) && !pace->thinned_in_vain && now_ns >= pace->thinning_due_ns)
            begin_thinning(pace, now_ns);
        else if (are_rare(pace, awake) || !are_busy(pace, WORKING) || run_side_by_side(pace))
            end_trial(pace, now_ns + (pace->timed_ns == 0 ? FIRST_TRIAL_NS : PERIOD_NS));
        else if (candidate == 0)
            end_trial(pace, next_look(pace, now_ns));
        else
            begin_trial(pace, candidate, now_ns);
        forget_tells(pace);
        pace->reported_ns = pace->reports = 0;
        return;
    }
    if (pace->since_ns == 0)
        pace->since_ns = now_ns;
    uint64_t spent_ns = now_ns > pace->since_ns ? now_ns - pace->since_ns : 0;
    if (pace->settling) {
        /* Some of those that may come find nothing to do, where the consumer is what holds things up. */
        if (awake == pace->limit || (awake < pace->limit && spent_ns >= COMING_NS))
            begin_segment(pace, now_ns);
        else if (spent_ns >= SEGMENT_MOST_NS)
            end_trial(pace, now_ns + PERIOD_NS);
        return;
    }
    add_report(pace, worker, items, now_ns);
    if (spent_ns >= SEGMENT_NS && pace->reports >= enough_reports(awake))
        end_segment(pace, now_ns);
    else if (spent_ns >= SEGMENT_MOST_NS)
        end_trial(pace, now_ns + PERIOD_NS);
}

void dlrs_pace_tell_busy(dlrs_pace *pace, uint64_t elapsed_ns, uint64_t busy_ns, uint64_t now_ns, unsigned awake)
{
    if (pace->crowd > 0 && now_ns - elapsed_ns < pace->since_ns)
        return; /* it began in the crowd */
    pace->tells++;
    pace->timed_ns += elapsed_ns;
    pace->all_busy_ns += (double)busy_ns * awake;
}

void dlrs_pace_disturb(dlrs_pace *pace, uint64_t now_ns)
{
    if (pace->crowd > 0 && now_ns > pace->since_ns + SEGMENT_MOST_NS)
        end_thinning(pace, false, now_ns);
    if (pace->step < 0)
        return;
    pace->settling = true;
    pace->since_ns = 0;
    if (++pace->disturbances > DISTURBANCES)
        end_trial(pace, now_ns + PERIOD_NS);
}

void dlrs_pace_stall(dlrs_pace *pace, uint64_t now_ns)
{
    bool is_soon = pace->stalled_until_ns != 0 && now_ns < pace->stalled_until_ns + pace->stall_hold_ns;
    if (!is_soon)
        pace->stall_hold_ns = STALL_HOLD_NS;
    else if (pace->stall_hold_ns < STALL_HOLD_MOST_NS)
        pace->stall_hold_ns *= 2;
    pace->best = pace->most;
    pace->crowd = 0;
    pace->stalled_until_ns = now_ns + pace->stall_hold_ns;
    end_trial(pace, pace->stalled_until_ns);
}

bool dlrs_pace_is_waiting(const dlrs_pace *pace)
{
    return pace->is_waiting;
}

bool dlrs_pace_is_stalled(const dlrs_pace *pace, uint64_t now_ns)
{
    return now_ns < pace->stalled_until_ns;
}
