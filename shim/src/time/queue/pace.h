/* The pace of one thread on one stream: a model of the queue of unfinished launches, updated by fences. It decides how
 * many launches pass until the next fence, when to wait for a fence, and when to hold launches back. Values in, values
 * out: no CUDA, no clock, no memory of its own; tested by tests/property/test_pace.py.
 *
 * Guarantees, with Q1 and Q2 of meter.h:
 * - PC1 at most PACE_FENCES fences are pending, with at most PACE_WINDOW_MOST launches before each (PACE_WIDE_MOST in a
 *   wide queue), except for launches that pass after an unsuccessful wait.
 * - PC2 a launch that is expected to begin after the end of the quantum is held back.
 * - PC3 after an unsuccessful wait launches pass: one (a window in a wide queue), after another twice as many, at most
 *   PACE_FREE_MOST.
 * - PC4 in a queue that is kept short a window is due PACE_LEAD before the expected end of the one before, and takes no
 *   longer than PACE_LEAD unless it is one launch.
 * - PC5 a window of a wide queue, whose tenant holds alone, takes at most PACE_WIDE_LONG once the duration of launches
 *   is known, unless it is one launch. A queue that is no longer wide has narrow windows from the next launch on.
 * - PC6 an opening before the earlier launches have drained adds nothing to them; a second such opening in a row counts
 *   as an unsuccessful wait.
 * - PC7 the time for which the thread stood still does not count as time of the GPU: a late observation gives only
 *   bounds for the duration of a launch.
 * - PC8 durations measured while other tenants co-run, even briefly, do not change those of launches that run alone,
 *   and vice versa.
 * - PC9 while the older fence is behind a wait of the program, PACE_WINDOW_MOST launches pass before each fence.
 *
 * Points in time are ns of one clock; they never run backwards.
 */
#ifndef SHAREPOD_PACE_H
#define SHAREPOD_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* PACE_FENCES: windows of launches that may be unfinished. PACE_WINDOW_MOST: launches that share the cost of a fence.
 * PACE_WIDE_MOST: the same in a wide queue; a driver queues two such windows before a launch waits by itself.
 * PACE_FREE_MOST: launches between two unsuccessful waits. */
enum { PACE_FENCES = 2, PACE_WINDOW_MOST = 64, PACE_WIDE_MOST = 512, PACE_FREE_MOST = 1 << 14 };

#define PACE_NEVER UINT64_MAX      /* a deadline that is not known */
#define PACE_LEAD 500000ull        /* ns: a launch into a short queue is so early that a late wake-up leaves no gap */
#define PACE_WIDE_LONG 50000000ull /* ns: two such windows end before a newcomer's share is checked */

/* Launches since the last fence, and before fences that are not known to have passed. */
struct pace_queue {
    uint64_t begun_at[PACE_FENCES]; /* when the fence before each was recorded: its launches began after that */
    uint64_t fenced_at;             /* when the last fence was recorded, or the opening began */
    uint32_t unfinished;            /* launches behind the last fence that was waited for */
    uint16_t sizes[PACE_FENCES];    /* launches before each of the fences, since the one before it */
    uint16_t count;                 /* launches since the last fence */
    uint8_t fences;                 /* unseen, 0 to PACE_FENCES */
    bool put_off;                   /* the wait for the older of two fences is due with the next launch */
    bool carried;                   /* from an earlier opening, which has not drained */
};

/* How many launches pass. */
struct pace_window {
    uint16_t size;          /* between two fences, at most; grows and shrinks with how long they take */
    uint16_t quota;         /* until the next fence */
    uint16_t free_launches; /* without a wait, after the last wait in vain */
    uint16_t free_left;     /* the unused part of free_launches */
    bool full;              /* the launched work is expected to last until the quantum ends */
    bool keeps_short;       /* windows of half a millisecond, launched just in time */
    bool wide;              /* windows of 20 to 50 ms: the tenant is alone */
};

/* Estimates from the fences. */
struct pace_estimate {
    uint64_t launch_ns;     /* how long a launch occupies the GPU; 0: not known */
    uint64_t other_ns;      /* the same, of launches alone if `shared`, else of launches that share the GPU */
    uint64_t co_runs;       /* number of starts and ends of co-running at the last check; odd: others run */
    uint64_t ends_at;       /* expected end of the launched work */
    uint64_t waited_at;     /* when the last fence was seen, or the opening began */
    uint64_t graph_ns;      /* how long the last graph is expected to take */
    uint64_t graphs_end_at; /* when the graphs launched in this opening are expected to end */
    bool shared;            /* `launch_ns` is of launches while other tenants run at the same time */
    bool touched;           /* others have run since `waited_at`, if only for a while */
    bool learned;           /* in this opening */
    bool start_known;       /* the last fence was seen when it passed: the work behind it began then */
    bool seen_late;         /* the last fence had passed some time before the thread looked */
    bool blocked_at_close;  /* the thread waited for the GPU when the opening ended */
};

struct pace {
    struct pace_queue queue;
    struct pace_window window;
    struct pace_estimate estimate;
};

/* When something was seen to have passed. */
struct pace_look {
    uint64_t before; /* the last check before it had passed; 0: no check before */
    uint64_t at;
};

/* Note how often other tenants have begun or ceased to run at the same time; odd: they do. Before each of the other
 * calls for which time has passed. */
void pace_others(struct pace *pace, uint64_t co_runs);
/* Begin an opening that ends at `deadline`. `drained`: the end of all work of an earlier one. */
void pace_open(struct pace *pace, uint64_t now, uint64_t deadline, struct pace_look drained);
/* Return whether launches of earlier openings are not known to have ended. */
bool pace_undrained(const struct pace *pace, uint64_t drained);
/* Begin an opening, in place of pace_open, while launches of earlier ones have not ended. */
void pace_carry(struct pace *pace, uint64_t now, uint64_t deadline);
/* Set whether the queue is wide; pace_open or pace_plan is to follow. */
void pace_widen(struct pace *pace, bool wide);
/* Set whether the queue is kept short from the next window on. */
void pace_keep_short(struct pace *pace, bool keeps_short);
/* Return when the next launch is due. In a queue that is kept short: PACE_LEAD before the expected end of the launched
 * work; else `now`. */
uint64_t pace_next_launch(const struct pace *pace, uint64_t now);
/* Note that all that was launched has ended. */
void pace_ran_dry(struct pace *pace, uint64_t now);
/* Return whether the next launch must be held back until the terms change. */
bool pace_holds_back(struct pace *pace, uint64_t now, uint64_t deadline);
/* Return how many launches pass until a fence is due. */
uint32_t pace_passing(const struct pace *pace);
/* Count launches. Return whether a fence must be recorded behind them, after a delayed wait. */
bool pace_launched(struct pace *pace, uint32_t launches);
/* Record a fence. Return whether to wait for the older one now. */
bool pace_fenced(struct pace *pace, uint64_t now, uint64_t deadline);
/* Record that no fence can be recorded: counting launches starts again. */
void pace_unfenced(struct pace *pace);
/* Return when the older fence is expected to pass. */
uint64_t pace_due(const struct pace *pace, uint64_t now);
/* Note that the older of two fences has passed. */
void pace_passed(struct pace *pace, struct pace_look seen);
/* Note that a wait ended before its fence: the gate was closed, or the wait was in vain. */
void pace_gave_up(struct pace *pace, bool closed);
/* Let a window of launches pass without a wait: the older fence is behind a wait of the program's (Q6 of meter.h). */
void pace_let_pass(struct pace *pace);
/* Plan the launches until the next fence. Return whether none fits. */
bool pace_plan(struct pace *pace, uint64_t now, uint64_t deadline);

/* Return whether a graph that takes `duration` would be over by the end of the quantum. */
bool pace_graph_fits(const struct pace *pace, uint64_t now, uint64_t deadline, uint64_t duration);
/* Note the launch of a graph that is expected to take `duration`. */
void pace_graph(struct pace *pace, uint64_t now, uint64_t duration);

#endif
