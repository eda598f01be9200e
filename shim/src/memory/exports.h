/* Exported memory: finds out whether any descriptor of it is still open, in any process.
 *
 * The hook adds each descriptor that the driver exports to an epoll instance of its own. The kernel removes a file from
 * the instance when the file's last descriptor is closed; descriptors sent to other processes or inherited also count.
 * The hook reads the remaining files in /proc/thread-self/fdinfo. In an importing process, the hook keeps a copy of the
 * descriptor while the process has the memory. So the exporting process is charged for the memory while any importer
 * has it.
 *
 * Guarantees:
 * - The hook closes no descriptor of the program. The program's descriptor keeps the number that it would have without
 *   the hook, while higher numbers are free (descriptors.h).
 * - If a descriptor cannot be watched (a file that does not poll), its memory counts as if it had not been exported.
 */
#ifndef SHAREPOD_EXPORTS_H
#define SHAREPOD_EXPORTS_H

#include <stdbool.h>
#include <stdint.h>

/* Watch a descriptor that the driver has exported, and count it in `*open` until it is closed. Return false if this
 * process cannot open another file. */
bool exports_watch(uint32_t *open, int descriptor);
/* Subtract the descriptors that are closed from their counts. With the lock. */
void exports_count(void);
/* As exports_count, but with many descriptors not every call counts. With the lock. */
void exports_count_seldom(void);
/* Keep a copy of an imported descriptor, and return it. Return -1 if the program would have too few files left to open
 * (descriptor_room): the exporter then does not see this importer. */
int exports_keep(int descriptor);
/* Close a kept copy, unless the program has already closed it. */
void exports_let_go(int copy);
/* Close the descriptors that a child of fork inherited. */
void exports_after_fork(void);

#endif
