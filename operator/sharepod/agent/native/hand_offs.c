/* Prepared hand-offs: the next grant is decided before the holder drains, so no Python runs between the holder's
 * DRAINED frame and the next tenant's GRANT.
 *
 * Guarantees:
 * - A grant is sent only for a DRAINED of the holder's current grant that the codec of sharepod.protocol would accept,
 *   and only within the window of its order.
 * - A DRAINED is removed from its socket only if its grant was sent, and each grant is sent at most once.
 */
#include "hand_offs.h"

#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "sharepod/protocol.h"

_Static_assert(sizeof(struct shp_grant) <= SHP_ORDER_BYTES, "an order holds a grant");

static int64_t monotonic(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Return whether the next packet of a socket is a DRAINED of this grant. The packet stays in the socket. */
static bool has_drained(int socket, uint64_t grant_id, struct shp_drained *drained) {
    const struct shp_header *header = &drained->header;
    ssize_t size = recv(socket, drained, sizeof *drained, MSG_PEEK | MSG_DONTWAIT | MSG_TRUNC);
    return size == (ssize_t)sizeof *drained && header->magic == SHP_MAGIC && header->size == sizeof *drained &&
           header->version >= SHP_VERSION_MIN && header->version <= SHP_VERSION_MAX && header->type == SHP_DRAINED &&
           !(drained->flags & ~(uint32_t)(SHP_DRAINED_WANT | SHP_DRAINED_IDLE)) && drained->grant_id == grant_id;
}

/* Send an order's grant. As in sockets/peers.py, it names the effective user as its sender: tenants must not know the
 * real user. */
static bool send_order(const shp_order *order) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
    } ancillary = {0};
    struct iovec packet = {.iov_base = (void *)order->grant, .iov_len = order->size};
    struct msghdr message = {
        .msg_iov = &packet, .msg_iovlen = 1, .msg_control = ancillary.bytes, .msg_controllen = sizeof ancillary.bytes};
    ancillary.header = (struct cmsghdr){
        .cmsg_len = CMSG_LEN(sizeof(struct ucred)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_CREDENTIALS};
    struct ucred sender = {.pid = getpid(), .uid = geteuid(), .gid = getegid()};
    memcpy(CMSG_DATA(&ancillary.header), &sender, sizeof sender);
    return sendmsg(order->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)order->size;
}

static bool hand_on(shp_hand_off *place, int64_t until) {
    struct shp_drained drained;
    if (!has_drained(place->socket, place->grant_id, &drained))
        return false;
    int which = drained.flags & SHP_DRAINED_WANT ? SHP_WANTS : SHP_WANTS_NOT;
    const shp_order *order = &place->orders[which];
    int64_t now = monotonic();
    if (order->size == 0 || now < order->since || now > order->until || now > until)
        return false;
    if (!send_order(order))
        return false;
    place->sent_at = monotonic();
    place->seen_at = now;
    recv(place->socket, &drained, sizeof drained, MSG_DONTWAIT);
    place->socket = -1;
    place->order = which;
    place->made = 1;
    return true;
}

int shp_next_made(shp_hand_offs *all) {
    int first = -1;
    for (int i = 0; i < all->count; i++)
        if (all->places[i].made && (first < 0 || all->places[i].seen_at < all->places[first].seen_at))
            first = i;
    if (first >= 0) {
        all->places[first].made = 0;
        all->made--;
    }
    return first;
}

int shp_hand_on(shp_hand_offs *all) {
    struct pollfd ready[SHP_HAND_OFFS_MOST];
    int places[SHP_HAND_OFFS_MOST], count = 0, made = 0;
    for (int i = 0; i < all->count; i++)
        if (all->places[i].socket >= 0) {
            ready[count] = (struct pollfd){.fd = all->places[i].socket, .events = POLLIN, .revents = POLLIN};
            places[count++] = i;
        }
    if (count > 1 && poll(ready, (nfds_t)count, 0) <= 0)
        return 0;
    for (int i = 0; i < count; i++)
        if (ready[i].revents & POLLIN)
            made += hand_on(&all->places[places[i]], all->until);
    all->made += made;
    return made;
}
