/* Stream captures of the program that are open, and events behind work whose stream cannot be queried any more (R3, R5,
 * streams.h). */
#ifndef SHAREPOD_CAPTURES_H
#define SHAREPOD_CAPTURES_H

#include <stdbool.h>

#include "time/streams.h"

/* Record that the stream with this name may join a capture in the call that follows, and record an event behind its
 * unfinished work (R5). Call captures_joined after that call. Return false if there is no memory (R6). */
bool captures_join(struct streams *streams, struct gate *gate, CUstream stream);
void captures_joined(struct streams *streams, struct gate *gate, CUstream stream);

/* Callers of the following functions hold the lock of struct streams. */

/* Record a capture, or a stream that may join a capture. Call this before the driver's call. Return false if there is
 * no memory (R6). */
bool captures_note(struct streams *streams, struct gate *gate, const struct open_capture *capture);
/* Remove the entry of a capture that is over. `index`: its index in `captures`. */
void captures_forget(struct streams *streams, struct gate *gate, unsigned index);
/* Record an event behind the unfinished work of the row, and give the event a row of its own, which shows the end of
 * that work without the stream. The stream may be full, and perhaps only this thread can end what it waits for. So the
 * event is recorded behind all work of the context. It is recorded in the stream itself if the context has ORPHANS_MOST
 * such rows, or if another stream waits for the program and this one cannot be full of launches. `leaves`: the stream
 * is about to be destroyed. If a capture forbids that event, a row with a wait is `blind`; if it leaves, a drain
 * records the event after the capture. Before CUDA 12.5 such a row gets no event.
 */
void captures_fence(struct streams *streams, struct known_stream *row, bool leaves);

#endif
