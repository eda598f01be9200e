/* Exported memory, which stays taken until its last descriptor is closed, in any process. */
#ifndef FAKECUDA_EXPORTED_H
#define FAKECUDA_EXPORTED_H

#include <stdbool.h>
#include <stddef.h>

/* Return a descriptor from which `content` can be read any number of times; -1: none can be created. After the last
 * copy of the descriptor and the last lease are closed, `over(of)` is called with fake_lock, in a thread of the double.
 */
int fake_export_open(const void *content, size_t bytes, void (*over)(void *), void *of);
/* Handle closed descriptors now. With fake_lock. */
void fake_exports_settle(void);
/* Return a lease: a descriptor that keeps the memory of another descriptor without being its copy. -1: none can be
 * created. */
int fake_export_lease(int descriptor);
/* Read the content of a descriptor that any process has made. Return false if it has no content of this size. */
bool fake_export_read(int descriptor, void *content, size_t bytes);

#endif
