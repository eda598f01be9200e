/* Interface of `sharepod.agent.on_time` to C: prepared hand-offs.
 *
 * cffi reads this file unprocessed: its only preprocessor lines are the guard and the include.
 */
#ifndef SHAREPOD_HAND_OFFS_H
#define SHAREPOD_HAND_OFFS_H

#include <stdint.h>

enum { SHP_HAND_OFFS_MOST = 16 }; /* most GPUs of a node that can have a prepared hand-off */
enum { SHP_ORDER_BYTES = 64 };    /* size of the longest grant frame */
enum { SHP_WANTS = 0, SHP_WANTS_NOT = 1 };

/* Order: if the holder drains between `since` and `until` (CLOCK_MONOTONIC, ns), send `grant` to `socket`, the next
 * tenant's process. */
typedef struct {
    int64_t since;
    int64_t until;
    int32_t socket;
    uint32_t size; /* bytes of `grant`; 0: there is no order */
    unsigned char grant[SHP_ORDER_BYTES];
} shp_order;

/* Prepared hand-off of one GPU. */
typedef struct {
    int32_t socket; /* of the holder's process; negative: nothing is prepared */
    /* 1 after the hand-off was carried out; Python sets it to 0 when it has recorded the hand-off */
    int32_t made;
    int32_t order;       /* the index in `orders` that was used */
    uint64_t grant_id;   /* id of the grant that the holder must have drained */
    int64_t seen_at;     /* time at which its DRAINED was read */
    int64_t sent_at;     /* time at which the grant had been sent */
    shp_order orders[2]; /* used if the holder wants more time (SHP_WANTS), and if it does not (SHP_WANTS_NOT) */
} shp_hand_off;

typedef struct {
    int32_t count; /* number of places that are checked, from the first one on */
    int32_t made;  /* number of hand-offs that were carried out and that Python has not yet recorded */
    int64_t until; /* no order is carried out after this moment, even within its own window */
    shp_hand_off places[SHP_HAND_OFFS_MOST];
} shp_hand_offs;

/* Carry out each prepared hand-off whose holder has sent DRAINED: send the grant, then remove the DRAINED from the
 * holder's socket. Nothing is sent or removed if the next packet in that socket is another frame, if the order's window
 * is over, or if the grant cannot be sent. Never waits. Return the number of hand-offs carried out. */
int shp_hand_on(shp_hand_offs *all);

/* Return the index in `places` of a hand-off that was carried out and not yet returned, the earliest DRAINED first.
 * Negative: there is none. */
int shp_next_made(shp_hand_offs *all);

#endif
