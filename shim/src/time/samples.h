/* Samples of the process's progress: at random moments, whether its launched work is in flight.
 *
 * Guarantees:
 * - SP1 a sample disturbs no stream capture (R3), records no event and orders nothing.
 * - SP2 a sample never waits: it skips a lock that is taken. It makes no call about a stream that a thread's running
 *   launch may go into, because the launch may wait for room in the driver. Such a sample is dropped, unless that
 *   launch has not returned since the last sample: then its stream is full, and has work.
 * - SP3 the moments do not depend on the work: intervals are uniform between 0.5 and 1.5 SAMPLES_MEAN, so that samples
 *   do not keep step with a period of the program.
 * - SP4 samples take at most SAMPLES_SHARE of the hook thread's time: if they take longer, they become rarer.
 */
#ifndef SHAREPOD_SAMPLES_H
#define SHAREPOD_SAMPLES_H

#include <stdint.h>

#include "base/sys.h"
#include "time/gate/gate.h"
#include "time/streams.h"

/* In ns. MEAN: 50 samples in the 25 ms after which the agent decides, without more wake-ups of the hook thread than the
 * checks of a contended token cause. MOST: longest interval after samples that a busy processor has delayed. */
#define SAMPLES_MEAN (SYS_MS / 2)
#define SAMPLES_MOST (10 * SYS_MS)
#define SAMPLES_SHARE 200 /* one part in so many */

struct samples {
    uint64_t taken, in_flight; /* since samples_begin */
    uint64_t several;          /* of these with work in several streams */
    uint64_t launches;         /* likewise, as of the last sample or end of a hold */
    uint64_t launched_before;  /* launches before samples_begin */
    uint64_t next;             /* when the next one is due; 0: none is */
    uint64_t took;             /* the last one, ns */
    uint64_t random;           /* state of the generator; 0: to be seeded */
};

/* Count from zero: the connection is a new one. */
void samples_begin(struct samples *samples, const struct gate *gate);
/* Count the launches so far. */
void samples_count(struct samples *samples, const struct gate *gate);
/* Take a sample if one is due. Return when the next one is. For the hook thread. */
uint64_t samples_step(struct samples *samples, struct streams *streams, const struct gate *gate, uint64_t now);
/* Take no more of them until the next samples_step. */
void samples_pause(struct samples *samples);

#endif
