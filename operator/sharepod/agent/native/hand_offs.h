/* Interface of `sharepod.agent.on_time` to C: hand-offs that were decided on before the holder drains.
 *
 * cffi reads this file as it stands: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_HAND_OFFS_H
#define SHAREPOD_HAND_OFFS_H

#include <stdint.h>

enum { SHP_HAND_OFFS_MOST = 16 }; /* GPUs of a node for which one is kept */
enum { SHP_ORDER_BYTES = 64 };    /* no grant is longer */
enum { SHP_WANTS = 0, SHP_WANTS_NOT = 1 };

/* What is sent to whom if the holder drains between two moments of CLOCK_MONOTONIC, in nanoseconds. */
typedef struct {
    int64_t since;
    int64_t until;
    int32_t socket;
    uint32_t size; /* bytes of `grant`; 0: there is no such order */
    unsigned char grant[SHP_ORDER_BYTES];
} shp_order;

/* The hand-off of one GPU. */
typedef struct {
    int32_t socket;      /* of the holder; negative: nothing is prepared */
    int32_t made;        /* 1: it was carried out; 0 again once Python has taken note */
    int32_t order;       /* which of `orders` was */
    uint64_t grant_id;   /* of the grant that the holder drains */
    int64_t seen_at;     /* when its DRAINED was seen */
    int64_t sent_at;     /* when the grant had been sent */
    shp_order orders[2]; /* for a holder that wants more: SHP_WANTS; for one that does not: SHP_WANTS_NOT */
} shp_hand_off;

typedef struct {
    int32_t count; /* places that are looked at, the first ones */
    int32_t made;  /* hand-offs that were carried out and are to be taken note of */
    int64_t until; /* no order is carried out later, whatever its own window is */
    shp_hand_off places[SHP_HAND_OFFS_MOST];
} shp_hand_offs;

/* Carry out each hand-off whose holder has sent DRAINED: send the grant, and only then take that frame from the
 * holder's socket. Where the next packet is anything else, the moment is not in the order's window or the grant cannot
 * be sent, nothing is sent or taken. Never waits. Return how many were carried out. */
int shp_hand_on(shp_hand_offs *all);

/* Take note of the hand-off of which the holder was seen first among those that were carried out. Return its place;
 * negative: there is none. */
int shp_next_made(shp_hand_offs *all);

#endif
