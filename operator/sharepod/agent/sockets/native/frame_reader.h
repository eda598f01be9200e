/* Interface of `sharepod.agent.sockets.inbox` to C: reading a tenant's clients.
 *
 * cffi reads this file unprocessed: its only preprocessor lines are the guard and the include.
 */
#ifndef SHAREPOD_FRAME_READER_H
#define SHAREPOD_FRAME_READER_H

#include <stdint.h>

/* One packet from a client, or the end of its connection.
 *
 * - `size`: bytes of the packet; 0: the client has closed, or its connection failed.
 * - `type`: enum shp_type of a recognised frame, whose values are in the following fields; 0: Python's codec has to
 *   parse `packet`.
 * - `packet`: the packet's first bytes, enough to detect that a longer packet is no frame of a client.
 * - `emptied`: 1 if the socket was found empty after this packet.
 */
typedef struct {
    int32_t socket;
    int32_t size;
    uint16_t type;
    uint16_t emptied;
    uint32_t flags; /* flags of shp_drained */
    uint64_t grant_id;
    uint64_t value; /* shp_want.gpu_mask, shp_draining.expected_ns, shp_drained.launches */
    unsigned char packet[96];
} shp_received;

/* Read the connections in `poller`, an epoll instance, that are readable, at most `most` of them. All have the same
 * share of `most` packets, but at least two reads each, so that an empty socket is detected. `into` has room for twice
 * `most` entries. Never waits. Return the number of entries written: packets, and ends of connections. */
int shp_receive(int poller, shp_received *into, int most);

#endif
