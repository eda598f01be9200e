/* Value of the program's variable after a call that the limit refused: 0, as after the driver's own refusal. */
#ifndef SHAREPOD_REFUSED_H
#define SHAREPOD_REFUSED_H

#include <stddef.h>

/* Set the target of `out`, if any, to 0; the value is `result`. */
#define REFUSED(result, out) ((out) != NULL ? (*(out) = 0, (result)) : (result))

#endif
