/* Exported memory: whether any descriptor of it is still open, in whatever process.
 *
 * The kernel takes a file out of an epoll instance when its last descriptor is closed, also one that was sent to
 * another process or inherited. So the hook puts each descriptor that the driver exports into an instance of its own,
 * and reads in /proc/thread-self/fdinfo which are left. The importing process keeps a copy of the descriptor for as
 * long as it has the memory; so the memory counts, with the process that made it, as long as any importer has it.
 *
 * Guarantees:
 * - a descriptor of the program's is never closed, nor does one get another number than without the hook, as long as
 *   that has free numbers beyond (descriptors.h);
 * - where descriptors cannot be watched (a file that does not poll), memory counts as if it had not been exported.
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
/* Close what a child of fork inherited. */
void exports_after_fork(void);

#endif
