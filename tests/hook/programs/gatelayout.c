/* NOCUDA: prints the offsets in the hook's `struct process` of the members of the gate that tests read, as one JSON
 * object in bytes. */
#include <stddef.h>
#include <stdio.h>

#include "process/process.h"

int main(void) {
    printf("{\"count\": %zu, \"slots\": %zu, \"slot\": %zu, \"sequence\": %zu, \"thread\": %zu}\n",
           offsetof(struct process, gate.slot_count), offsetof(struct process, gate.slots), sizeof(struct slot),
           offsetof(struct slot, sequence), offsetof(struct slot, thread));
    return 0;
}
