/* Reads the connections of a tenant's clients: finds the readable ones, reads their packets, and recognises the
 * frames about time (WANT, DRAINING, DRAINED), so that Python need not parse these.
 *
 * Guarantees:
 * - The codec of sharepod.protocol accepts each recognised frame, with the same values.
 * - Whatever a client sends, nothing is read or written beyond the structs.
 * - Descriptors that a client sends are closed by Linux, because recv has no buffer for them.
 */
#include "frame_reader.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "sharepod/protocol.h"

enum { EVENTS_MOST = 64 };

_Static_assert(sizeof(struct shp_hello) < sizeof(((shp_received *)0)->packet), "a longer packet is no client's frame");

static int header_is(const struct shp_header *header, size_t size) {
    return header->magic == SHP_MAGIC && header->size == size && header->version >= SHP_VERSION_MIN &&
           header->version <= SHP_VERSION_MAX;
}

static void recognise(shp_received *got) {
    union {
        struct shp_header header;
        struct shp_want want;
        struct shp_drained drained;
        struct shp_draining draining;
    } frame;
    if (got->size < (int32_t)sizeof frame.header || got->size > (int32_t)sizeof frame)
        return;
    memcpy(&frame, got->packet, (size_t)got->size);
    if (!header_is(&frame.header, (size_t)got->size))
        return;
    if (frame.header.type == SHP_DRAINED && got->size == sizeof frame.drained &&
        !(frame.drained.flags & ~(uint32_t)(SHP_DRAINED_WANT | SHP_DRAINED_IDLE))) {
        got->flags = frame.drained.flags;
        got->grant_id = frame.drained.grant_id;
        got->value = frame.drained.launches;
    } else if (frame.header.type == SHP_DRAINING && got->size == sizeof frame.draining) {
        got->grant_id = frame.draining.grant_id;
        got->value = frame.draining.expected_ns;
    } else if (frame.header.type == SHP_WANT && got->size == sizeof frame.want && frame.want.gpu_mask > 0 &&
               frame.want.gpu_mask < 1u << SHP_MAX_GPUS) {
        got->value = frame.want.gpu_mask;
    } else {
        return;
    }
    got->type = frame.header.type;
}

int shp_receive(int poller, shp_received *into, int most) {
    struct epoll_event events[EVENTS_MOST];
    int ready = epoll_wait(poller, events, most < EVENTS_MOST ? most : EVENTS_MOST, 0), count = 0;
    if (ready <= 0)
        return 0;
    int each = most / ready > 2 ? most / ready : 2;
    for (int i = 0; i < ready; i++) {
        for (int k = 0; k < each; k++) {
            shp_received *got = &into[count];
            ssize_t size = recv(events[i].data.fd, got->packet, sizeof got->packet, MSG_DONTWAIT | MSG_TRUNC);
            if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
                if (k > 0)
                    into[count - 1].emptied = 1;
                break;
            }
            got->socket = events[i].data.fd;
            got->size = size > 0 ? (int32_t)size : 0;
            got->type = got->emptied = 0;
            got->flags = 0;
            got->grant_id = got->value = 0;
            count++;
            if (size <= 0)
                break;
            recognise(got);
        }
    }
    return count;
}
