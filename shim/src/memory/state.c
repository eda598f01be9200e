/* Storage of the pointer behind memory_state(). */
#include "memory/state.h"

struct memory *_Atomic the_memory;
