/* Mappings into sparse arrays that have ended, for the wrappers that destroy arrays and contexts. */
#ifndef SHAREPOD_VIRTUAL_H
#define SHAREPOD_VIRTUAL_H

#include <cuda.h>

/* Free the mappings of physical memory into a destroyed array. */
void virtual_array_gone(CUarray array);

#endif
