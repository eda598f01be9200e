/* Exported memory: something that stays until the last descriptor of it is closed, in whatever process. */
#ifndef FAKECUDA_EXPORTED_H
#define FAKECUDA_EXPORTED_H

#include <stdbool.h>
#include <stddef.h>

/* Return a descriptor from which `content` can be read any number of times; -1: none is to be had. `over(of)` is called
 * with fake_lock, on a thread of the double's, once the last copy of the descriptor and the last lease are closed. */
int fake_export_open(const void *content, size_t bytes, void (*over)(void *), void *of);
/* Do at once what is due for descriptors that are closed. With fake_lock. */
void fake_exports_settle(void);
/* Return a lease: a descriptor that keeps what another is of, but is no copy of that. -1: none is to be had. */
int fake_export_lease(int descriptor);
/* Read the content of a descriptor made by any process. False: it is none of that size. */
bool fake_export_read(int descriptor, void *content, size_t bytes);

#endif
