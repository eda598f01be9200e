/* Exported memory: whether any descriptor of it is still open, in any process.
 *
 * The kernel removes a file from an epoll instance when its last descriptor is closed, including descriptors that were
 * sent to other processes or inherited. So the hook adds each descriptor that the driver exports to an epoll instance
 * of its own, and reads the remaining ones in /proc/thread-self/fdinfo. An importing process keeps a copy of the
 * descriptor while it has the memory. So the memory is charged to the exporting process while any importer has it.
 *
 * Guarantees:
 * - A descriptor of the program is never closed. It keeps the number that it would get without the hook, while higher
 *   numbers are free (descriptors.h).
 * - Where descriptors cannot be watched (a file that does not poll), memory counts as if it had not been exported.
 */
#ifndef SHAREPOD_EXPORTS_H
#define SHAREPOD_EXPORTS_H

#include <stdbool.h>
#include <stdint.h>

/* Watch a descriptor that the driver has exported, and count it in `open` until it is closed. False: this process can
 * open no file more. */
bool exports_watch(uint32_t *open, int descriptor);
/* Take the descriptors that are closed from their counts. With the lock. */
void exports_count(void);
/* The same, but with more than a few descriptors not in each call. With the lock. */
void exports_count_seldom(void);
/* Keep a copy of an imported descriptor; return it, or -1: this importer is not seen, for the program would have too
 * few files left to open (descriptor_room). */
int exports_keep(int descriptor);
/* Close a kept copy, unless the program has closed it. */
void exports_let_go(int copy);
/* Close the descriptors that a child of fork inherited. */
void exports_after_fork(void);

#endif
