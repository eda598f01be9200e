/* The file `limits` next to the hook: the tenant's grants, for the time without an agent.
 *
 * Guarantees:
 * - invalid lines are skipped; a file without a valid line counts as no file;
 * - processes of one tenant read the same `phase`.
 */
#ifndef SHAREPOD_LIMITS_H
#define SHAREPOD_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "sharepod/protocol.h"

struct limits {
    unsigned count;
    struct shp_gpu gpus[SHP_MAX_GPUS];
    uint64_t phase; /* ns, below 135 ms: where the tenant's duty cycle begins; another for most other tenants */
};

/* Read the file of that directory. False: there is none, or no line of it can be understood. */
bool limits_read(const char *directory, struct limits *limits);
/* Return whether the agent's setting fail_open is on: programs go on ungated where there is no file `limits`. */
bool limits_fail_open(const char *directory);
/* Parse the text of the file. False: no line of it can be understood. */
bool limits_parse(const char *text, struct limits *limits);
/* Read a GPU's UUID as NVML prints it, and move `at` behind it. False: it is none. */
bool limits_take_uuid(const char **at, uint8_t *uuid);

#endif
