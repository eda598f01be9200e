/* Exported memory: finds out whether any descriptor of it is still open, in any process.
 *
 * The hook adds each descriptor that the driver exports to an epoll instance of its own. Linux removes a file from the
 * instance when the file's last descriptor is closed, also counting descriptors that were inherited or sent to other
 * processes. The hook reads the remaining files in /proc/thread-self/fdinfo. In a process that imports the memory, the
 * hook keeps a copy of the descriptor as long as the process has the memory. So the exporting process is charged until
 * the last importer has freed it.
 *
 * Guarantees:
 * - The hook closes no descriptor of the program. The program's descriptor keeps the number that it would have without
 *   the hook, while higher numbers are free (descriptors.h).
 * - If epoll cannot watch the kind of file behind a descriptor, its memory counts as if it had not been exported.
 */
#ifndef SHAREPOD_EXPORTS_H
#define SHAREPOD_EXPORTS_H

#include <stdbool.h>
#include <stdint.h>

/* Watch a descriptor that the driver has exported, and count it in `*open` until it is closed. Return false if this
 * process cannot open another file. */
bool exports_watch(uint32_t *open, int descriptor);
/* Find the watched descriptors that are closed now, and decrement the count `*open` of each. The caller holds the
 * lock. */
void exports_count(void);
/* As exports_count, but with many descriptors only some calls count, so that a call is cheap on average. The caller
 * holds the lock. */
void exports_count_seldom(void);
/* Keep a copy of an imported descriptor, and return it. Return -1 if the program could then open too few files
 * (descriptor_room). The exporting process then does not see this importer. */
int exports_keep(int descriptor);
/* Close a kept copy, unless the program has already closed it. */
void exports_let_go(int copy);
/* Close the descriptors that a child of fork inherited. */
void exports_after_fork(void);

#endif
