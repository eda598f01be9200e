/* NVML's figures of device memory: the tenant's view, as in CUDA.
 *
 * Guarantees:
 * - A program that does not ask NVML for memory is not affected.
 * - A program that does not call CUDA, such as nvidia-smi, does not count as a user of the GPU because it asks.
 * - GPUs that are not the tenant's, or whose limit is not enforced, are shown as the driver shows them.
 */
#ifndef SHAREPOD_NVML_H
#define SHAREPOD_NVML_H

#include <stdbool.h>

#define NVML_FILE "libnvidia-ml.so" /* how the name of NVML's file begins */

/* Return the hook's function instead of NVML's function of this name; NULL if it has none. */
void *nvml_wrapper(const char *name);
/* Return NVML's own function; NULL if NVML is not loaded. */
void *nvml_real(const char *name);

#endif
