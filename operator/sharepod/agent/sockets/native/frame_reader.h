/* Interface of `sharepod.agent.sockets.inbox` to C: reading a tenant's clients.
 *
 * cffi reads this file unprocessed: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_FRAME_READER_H
#define SHAREPOD_FRAME_READER_H

#include <stdint.h>

/* One packet from a client, or the end of its connection.
 *
 * - `size`: bytes of the packet; 0: the client has closed, or its connection failed.
 * - `type`: enum shp_type of a valid frame about time, whose values follow; 0: the codec parses `packet`.
 * - `packet`: the packet's first bytes, enough to detect that a longer packet is no frame of a client.
 * - `emptied`: the socket was found empty after it.
 */
typedef struct {
    int32_t socket;
    int32_t size;
    uint16_t type;
    uint16_t emptied;
    uint32_t flags; /* of shp_drained */
    uint64_t grant_id;
    uint64_t value; /* shp_want.gpu_mask, shp_draining.expected_ns, shp_drained.launches */
    unsigned char packet[96];
} shp_received;

/* Read the readable connections in `poller`, an epoll instance, at most `most` of them. Each one may have an equal part
 * of `most` packets read, and at least two, so that an empty socket is detected. `into` has room for twice `most`.
 * Never waits. Return how many packets and ends were read. */
int shp_receive(int poller, shp_received *into, int most);

#endif
