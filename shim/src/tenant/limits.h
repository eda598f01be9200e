/* The file `limits` beside the hook: what the tenant was granted, for the time without an agent. */
#ifndef SHAREPOD_LIMITS_H
#define SHAREPOD_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "sharepod/protocol.h"

struct limits {
    unsigned count;
    struct shp_gpu gpus[SHP_MAX_GPUS];
    uint64_t phase; /* ns; the same for all processes of a tenant, another for most others */
};

/* Reads the file of that directory; false if there is none or no line of it can be understood. */
bool limits_read(const char *directory, struct limits *limits);
/* Whether the agent's setting fail_open is on: programs go on ungated where there is no such file. */
bool limits_fail_open(const char *directory);
/* Parses its text. */
bool limits_parse(const char *text, struct limits *limits);
/* Reads a GPU's UUID as NVML prints it, and moves `at` behind it. */
bool limits_take_uuid(const char **at, uint8_t *uuid);

#endif
