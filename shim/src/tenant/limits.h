/* Parser of the file `limits` next to the hook: the tenant's shares, which apply while there is no agent.
 *
 * Guarantees:
 * - Invalid lines are skipped. A file without a valid line counts as missing.
 * - All processes of a tenant read the same `phase`.
 */
#ifndef SHAREPOD_LIMITS_H
#define SHAREPOD_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "sharepod/protocol.h"

struct limits {
    unsigned count;
    struct shp_gpu gpus[SHP_MAX_GPUS];
    uint64_t phase; /* ns, below 135 ms: start of the tenant's turn within a period while there is no agent. Most
                       tenants have different phases, so their turns seldom coincide */
};

/* Read the file in this directory. Return false if there is no file, or no valid line. */
bool limits_read(const char *directory, struct limits *limits);
/* Return true if the agent's setting fail_open is on: programs then run without share and limit if there is no file
 * `limits`. */
bool limits_fail_open(const char *directory);
/* Parse the text of the file. Return false if it has no valid line. */
bool limits_parse(const char *text, struct limits *limits);
/* Parse a GPU's UUID in NVML's format, and move `at` to the character after it. Return false if there is no UUID. */
bool limits_take_uuid(const char **at, uint8_t *uuid);

#endif
