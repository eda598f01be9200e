/* NVML's byte counts of device memory: they show the tenant's share, as CUDA's byte counts do.
 *
 * Guarantees:
 * - The hook does not affect a program that does not query NVML for memory.
 * - A program that does not call CUDA, such as nvidia-smi, does not count as a user of the GPU because of its queries.
 * - For GPUs that are not the tenant's, and GPUs without an enforced limit, the program gets the driver's byte counts.
 */
#ifndef SHAREPOD_NVML_H
#define SHAREPOD_NVML_H

#include <stdbool.h>

#define NVML_FILE "libnvidia-ml.so" /* beginning of NVML's file name */

/* Return the hook's function that replaces NVML's function of this name; NULL: the hook does not replace it. */
void *nvml_wrapper(const char *name);
/* Return NVML's own function; NULL if NVML is not loaded. */
void *nvml_real(const char *name);

#endif
