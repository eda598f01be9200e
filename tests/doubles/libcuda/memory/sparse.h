/* Memory mapped to arrays. With fake_lock. */
#ifndef FAKECUDA_SPARSE_H
#define FAKECUDA_SPARSE_H

#include "device/fake.h"

/* Free the mappings to an array that ends. */
void fake_tiles_of_array_gone(const void *array);

#endif
