/* Output variable of a call that the hook refuses: it is set to 0, as when the driver refuses. */
#ifndef SHAREPOD_REFUSED_H
#define SHAREPOD_REFUSED_H

#include <stddef.h>

/* Set `*out` to 0 if `out` is not NULL. The value of the expression is `result`. */
#define REFUSED(result, out) ((out) != NULL ? (*(out) = 0, (result)) : (result))

#endif
