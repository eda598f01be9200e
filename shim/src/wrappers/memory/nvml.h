/* NVML's view of device memory: that of the tenant, as CUDA's.
 *
 * Guarantees: a program that never asks NVML for memory notices nothing; one that never calls CUDA, nvidia-smi say,
 * does not become a process that uses the GPU by asking. GPUs that are not the tenant's, or whose memory is not
 * enforced, are shown as the driver does.
 */
#ifndef SHAREPOD_NVML_H
#define SHAREPOD_NVML_H

#include <stdbool.h>

#define NVML_FILE "libnvidia-ml.so" /* how the name of NVML's file begins */

/* The hook's function in place of NVML's of this name; NULL if it has none. */
void *nvml_wrapper(const char *name);
/* NVML's own; NULL where NVML is not loaded. */
void *nvml_real(const char *name);

#endif
