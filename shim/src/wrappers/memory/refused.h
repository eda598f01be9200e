/* Value of the program's variable after a call that the limit refused: 0, as after a refusal by the driver. */
#ifndef SHAREPOD_REFUSED_H
#define SHAREPOD_REFUSED_H

#include <stddef.h>

/* Set `*out` to 0 if `out` is not NULL. The value of the expression is `result`. */
#define REFUSED(result, out) ((out) != NULL ? (*(out) = 0, (result)) : (result))

#endif
