/* Model of one thread's queue of unfinished launches on one stream. A fence is an event behind launches; the launches
 * between two fences are a window. The model decides how many launches pass until the next fence, when the thread waits
 * for a fence, and when launches are held back until the next quantum. No function makes a CUDA call, reads a clock or
 * allocates memory. tests/property/test_pace.py tests it.
 *
 * A wait is unsuccessful if it ends before its fence has passed, while the gate is still open.
 *
 * Guarantees, with Q1 and Q2 of meter.h:
 * - PC1 At most PACE_FENCES fences are pending. At most PACE_WINDOW_MOST launches pass before each fence, or
 *   PACE_WIDE_MOST in a wide queue, that of a tenant that holds the GPU alone. Exception: launches after an
 *   unsuccessful wait.
 * - PC2 A launch that is expected to begin after the end of the quantum is held back.
 * - PC3 After an unsuccessful wait some launches pass without a fence: one launch, in a wide queue one window. After
 *   each further unsuccessful wait the number doubles, to at most PACE_FREE_MOST.
 * - PC4 In a queue that is kept short (next to an interactive tenant), a window is due PACE_LEAD before the expected
 *   end of the window before it. A window of more than one launch takes no longer than PACE_LEAD.
 * - PC5 Once the duration of launches is known, a window of more than one launch takes at most PACE_WIDE_LONG in a wide
 *   queue. After a queue stops being wide, its windows are narrow from the next launch on.
 * - PC6 If an opening of the gate begins before the launches of the last one have drained, these launches still count,
 *   but only once. A second such opening in a row counts as an unsuccessful wait.
 * - PC7 Time for which the thread did not run does not count as GPU time: a check that comes late gives only bounds for
 *   the duration of a launch.
 * - PC8 Durations measured while other tenants co-run, even briefly, do not change the durations of launches that run
 *   alone, and vice versa.
 * - PC9 While the older fence is behind a wait that the program has put into the stream, PACE_WINDOW_MOST launches pass
 *   before each fence.
 *
 * Points in time are in ns of one clock that never runs backwards.
 */
#ifndef SHAREPOD_PACE_H
#define SHAREPOD_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* Largest numbers. PACE_FENCES: unfinished windows. PACE_WINDOW_MOST: launches in a window, which share the cost of one
 * fence. PACE_WIDE_MOST: launches in a window of a wide queue; the driver queues two such windows before a launch call
 * blocks. PACE_FREE_MOST: launches between two unsuccessful waits. */
enum { PACE_FENCES = 2, PACE_WINDOW_MOST = 64, PACE_WIDE_MOST = 512, PACE_FREE_MOST = 1 << 14 };

/* A deadline that is not known. */
#define PACE_NEVER UINT64_MAX
/* ns before the end of earlier work at which a launch into a short queue passes, so that a late wake-up of the thread
 * leaves no gap on the GPU. */
#define PACE_LEAD 500000ull
/* ns, longest window of a wide queue: two such windows end before the agent checks the share of a new tenant. */
#define PACE_WIDE_LONG 50000000ull

/* Launches since the last fence, and launches before fences that are not known to have passed. */
struct pace_queue {
    uint64_t begun_at[PACE_FENCES]; /* for each pending fence: time at which the fence before it was recorded. Its
                                       launches began after that time */
    uint64_t fenced_at;             /* time at which the last fence was recorded, or the opening began */
    uint32_t unfinished;            /* number of launches before recorded fences that are not known to have finished */
    uint16_t sizes[PACE_FENCES];    /* for each pending fence: number of launches between it and the fence before it */
    uint16_t count;                 /* number of launches since the last fence */
    uint8_t fences;                 /* number of fences not seen to have passed, 0 to PACE_FENCES */
    bool put_off;                   /* the wait for the older of two fences is postponed until the next launch */
    bool carried;                   /* the launches come from an earlier opening that has not drained */
};

/* How many launches may pass before the thread must record the next fence. */
struct pace_window {
    uint16_t size;          /* most launches between two fences; grows and shrinks with the time that they take */
    uint16_t quota;         /* launches between the last fence and the next one */
    uint16_t free_launches; /* launches that pass without a fence after the last unsuccessful wait */
    uint16_t free_left;     /* number of free_launches that have not passed yet */
    bool full;              /* the launched work is expected to last until the quantum ends */
    bool keeps_short;       /* windows take PACE_LEAD at most, and each begins shortly before the window before it ends
                             */
    bool wide;              /* windows take 20 to 50 ms, because the tenant holds the GPU alone */
};

/* Estimates from the times of fences. */
struct pace_estimate {
    uint64_t launch_ns;     /* ns for which a launch occupies the GPU; 0: not known */
    uint64_t other_ns;      /* the same for the other case: without co-running tenants if `shared`, else with them */
    uint64_t co_runs;       /* value of gate_co_runs at the last check; odd: other tenants co-run */
    uint64_t ends_at;       /* expected end of the launched work */
    uint64_t waited_at;     /* time at which the last fence was seen to have passed, or the opening began */
    uint64_t graph_ns;      /* expected duration of the last graph */
    uint64_t graphs_end_at; /* expected end of the graphs launched in this opening */
    bool shared;            /* `launch_ns` is the duration while other tenants co-run */
    bool touched;           /* other tenants have co-run since `waited_at`, even if briefly */
    bool learned;           /* a duration was measured in this opening */
    bool start_known;       /* the last fence was seen to pass without delay, so the work behind it began at `waited_at`
                             */
    bool seen_late;         /* the last fence had passed some time before the thread checked it */
    bool blocked_at_close;  /* the thread waited for the GPU when the opening ended */
};

struct pace {
    struct pace_queue queue;
    struct pace_window window;
    struct pace_estimate estimate;
};

/* Time at which an event was seen to have passed. */
struct pace_look {
    uint64_t before; /* time of the last check that found it not passed; 0: no such check */
    uint64_t at;
};

/* Update whether other tenants co-run. `co_runs`: value of gate_co_runs. Call this before any other function of this
 * file, unless no time has passed since the last call. */
void pace_others(struct pace *pace, uint64_t co_runs);
/* Begin an opening of the gate that ends at `deadline`. `drained`: when all work of the last opening was seen to have
 * ended. */
void pace_open(struct pace *pace, uint64_t now, uint64_t deadline, struct pace_look drained);
/* Return true if launches of earlier openings may be unfinished. `drained`: last time at which all work was known to
 * have ended. */
bool pace_undrained(const struct pace *pace, uint64_t drained);
/* Begin an opening while launches of earlier openings are unfinished. Call this instead of pace_open. */
void pace_carry(struct pace *pace, uint64_t now, uint64_t deadline);
/* Set whether the queue is wide (PC1). Call pace_open or pace_plan afterwards. */
void pace_widen(struct pace *pace, bool wide);
/* Set whether the queue is kept short (PC4) from the next window on. */
void pace_keep_short(struct pace *pace, bool keeps_short);
/* Return the time at which the next launch is due. In a queue that is kept short: PACE_LEAD before the expected end of
 * the launched work. In other queues: `now`. */
uint64_t pace_next_launch(const struct pace *pace, uint64_t now);
/* Record that all launched work has ended. */
void pace_ran_dry(struct pace *pace, uint64_t now);
/* Return whether the next launch must wait, because it would begin after `deadline` (PC2). */
bool pace_holds_back(struct pace *pace, uint64_t now, uint64_t deadline);
/* Return the number of launches that pass until a fence is due. */
uint32_t pace_passing(const struct pace *pace);
/* Count launches. Return true if a fence must be recorded behind them. If `put_off` is set, the caller must first wait
 * for the older fence. */
bool pace_launched(struct pace *pace, uint32_t launches);
/* Record that a fence was recorded behind the counted launches. Return true if the caller must now wait for the older
 * fence. */
bool pace_fenced(struct pace *pace, uint64_t now, uint64_t deadline);
/* Record that the driver refused to record the fence: the count of launches starts again at 0. */
void pace_unfenced(struct pace *pace);
/* Return the time at which the older fence is expected to pass. */
uint64_t pace_due(const struct pace *pace, uint64_t now);
/* Record that the older of two fences has passed. */
void pace_passed(struct pace *pace, struct pace_look seen);
/* Record that a wait ended before its fence had passed. `closed`: the gate was closed; else the wait was unsuccessful.
 */
void pace_gave_up(struct pace *pace, bool closed);
/* Let PACE_WINDOW_MOST launches pass without a wait, because the older fence is behind a wait of the program (Q6,
 * meter.h). */
void pace_let_pass(struct pace *pace);
/* Set how many launches pass until the next fence. Return true if none would begin before the deadline. */
bool pace_plan(struct pace *pace, uint64_t now, uint64_t deadline);

/* Return whether a graph that takes `duration` ns would end before the quantum ends. */
bool pace_graph_fits(const struct pace *pace, uint64_t now, uint64_t deadline, uint64_t duration);
/* Record the launch of a graph that is expected to take `duration` ns. */
void pace_graph(struct pace *pace, uint64_t now, uint64_t duration);

#endif
