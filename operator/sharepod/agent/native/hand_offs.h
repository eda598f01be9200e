/* Interface of `sharepod.agent.on_time` to C: hand-offs that are decided before the holder drains.
 *
 * cffi reads this file unprocessed: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_HAND_OFFS_H
#define SHAREPOD_HAND_OFFS_H

#include <stdint.h>

enum { SHP_HAND_OFFS_MOST = 16 }; /* most GPUs of a node with a prepared hand-off */
enum { SHP_ORDER_BYTES = 64 };    /* no grant is longer */
enum { SHP_WANTS = 0, SHP_WANTS_NOT = 1 };

/* Grant to send, and its receiver, if the holder drains between two moments (CLOCK_MONOTONIC, ns). */
typedef struct {
    int64_t since;
    int64_t until;
    int32_t socket;
    uint32_t size; /* bytes of `grant`; 0: there is no order */
    unsigned char grant[SHP_ORDER_BYTES];
} shp_order;

/* The hand-off of one GPU. */
typedef struct {
    int32_t socket; /* socket of the holder; negative: nothing is prepared */
    /* 1 after the hand-off was carried out; Python sets it to 0 when it has recorded the hand-off */
    int32_t made;
    int32_t order;       /* the index in `orders` that was used */
    uint64_t grant_id;   /* id of the grant that the holder drains */
    int64_t seen_at;     /* time at which its DRAINED was read */
    int64_t sent_at;     /* time at which the grant had been sent */
    shp_order orders[2]; /* the order if the holder wants more time (SHP_WANTS), and if it does not (SHP_WANTS_NOT) */
} shp_hand_off;

typedef struct {
    int32_t count; /* number of places that are checked, from the first one on */
    int32_t made;  /* hand-offs that were carried out and not yet recorded by Python */
    int64_t until; /* no order is carried out after this moment, even within its own window */
    shp_hand_off places[SHP_HAND_OFFS_MOST];
} shp_hand_offs;

/* Carry out each hand-off whose holder has sent DRAINED: send the grant, then remove that frame from the holder's
 * socket. Nothing is sent or removed if the next packet is any other, if the time is outside the order's window, or if
 * the grant cannot be sent. Never waits. Return how many were carried out. */
int shp_hand_on(shp_hand_offs *all);

/* Record the carried-out hand-off whose holder drained first. Return its place; negative: there is none. */
int shp_next_made(shp_hand_offs *all);

#endif
