/* Samples of the process's progress: whether launched work is in flight at random moments.
 *
 * Guarantees:
 * - SP1 A sample invalidates no stream capture (R3, streams.h), records no event and orders no work.
 * - SP2 A sample never blocks. It is dropped if the registry's lock is taken. If a thread is inside a launch that may
 *   go into a stream, the sample does not query that stream, because the launch may be blocked in a full stream. The
 *   sample is then dropped, with one exception: if the thread was inside the same launch at the last sample, the stream
 *   is full, which counts as work in flight.
 * - SP3 The moments do not depend on the work. Intervals are uniformly distributed between 0.5 and 1.5 SAMPLES_MEAN, so
 *   that samples do not synchronize with a period of the program.
 * - SP4 Samples take at most 1 / SAMPLES_SHARE of the hook thread's time. If samples take longer, the intervals grow.
 */
#ifndef SHAREPOD_SAMPLES_H
#define SHAREPOD_SAMPLES_H

#include <stdint.h>

#include "base/sys.h"
#include "time/gate/gate.h"
#include "time/streams.h"

/* SAMPLES_MEAN: mean interval, ns. It gives 50 samples in the 25 ms after which the agent decides on co-running. The
 * hook thread wakes as often anyway while other tenants want the GPU. SAMPLES_MOST: longest mean interval, ns, after a
 * busy processor has delayed samples. */
#define SAMPLES_MEAN (SYS_MS / 2)
#define SAMPLES_MOST (10 * SYS_MS)
#define SAMPLES_SHARE 200 /* samples take at most one part in 200 of the time */

struct samples {
    uint64_t taken, in_flight; /* samples, and samples with work in flight, since samples_begin */
    uint64_t several;          /* samples with work in flight in several streams */
    uint64_t launches;         /* launches since samples_begin, as of the last sample, or of the end of a grant */
    uint64_t launched_before;  /* number of launches before samples_begin */
    uint64_t next;             /* time of the next sample; 0: no sample is planned */
    uint64_t took;             /* duration of the last sample, ns */
    uint64_t random;           /* state of the random number generator; 0: not seeded yet */
};

/* Reset all counts, for a new connection. */
void samples_begin(struct samples *samples, const struct gate *gate);
/* Update `launches`. */
void samples_count(struct samples *samples, const struct gate *gate);
/* Take a sample if one is due. Return the time of the next sample. Only the hook thread calls this. */
uint64_t samples_step(struct samples *samples, struct streams *streams, const struct gate *gate, uint64_t now);
/* Cancel the planned sample. The next samples_step only plans one again. */
void samples_pause(struct samples *samples);

#endif
