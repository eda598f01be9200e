/* Mappings of physical memory into sparse arrays end with the array. */
#ifndef SHAREPOD_VIRTUAL_H
#define SHAREPOD_VIRTUAL_H

#include <cuda.h>

/* The array is gone, and what was mapped into it. */
void virtual_array_gone(CUarray array);

#endif
