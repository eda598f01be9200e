/* Tables of function names and errors, which generate.py generates from the headers. */
#ifndef FAKECUDA_NAMES_H
#define FAKECUDA_NAMES_H

#include <stdbool.h>

struct fake_name {
    const char *name;
    int since; /* the version of CUDA in which this form appeared */
    bool per_thread;
    void *symbol;
};

extern const struct fake_name fake_names[];
extern const unsigned fake_name_count;

struct fake_error {
    int value;
    const char *name, *text;
};

extern const struct fake_error fake_errors[];
extern const unsigned fake_error_count;

#endif
