/* Storage of the pointer behind books(). */
#include "memory/lock.h"

struct memory *_Atomic the_memory;
