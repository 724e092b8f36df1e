/* Reads Perfetto's TrackEvent packets and writes the same events as Chrome-trace JSON, which chrome.h makes columns of.
 * Called through ctypes by kineto_trace.formats.perfetto.perfetto_reader.
 *
 * Theory of operation
 *     The trace comes in pieces; a piece that ends inside a packet is read up to that packet. Begin and end of a slice
 *     become one complete event, written when the slice ends, so that what is kept is the open slices, the interned
 *     texts and the ends of flows. Packets that describe tracks or the whole trace are handed to the caller, who says
 *     of each track how its events name their process and thread.
 *
 *     Input is untrusted: every read is checked against the end of its message, nesting is limited, nothing is
 *     allocated by a length that the input claims. A reader is for one thread at a time.
 */
#ifndef KINETO_PERFETTO_READ_H
#define KINETO_PERFETTO_READ_H

#include "chrome/chrome.h"

enum {
    KC_PACKET_MORE = 0,    /* wants the next piece, with what was not consumed in front of it */
    KC_PACKET_WHOLE = 1,   /* the caller should look at this packet: its content is at these places of the piece */
    KC_PACKET_DAMAGED = 2, /* what follows is no packet: reading cannot go on */
    KC_PACKET_NO_MEMORY = 3,
};

typedef struct {
    uint64_t consumed;   /* bytes of the piece */
    uint64_t begin, end; /* KC_PACKET_WHOLE */
    uint32_t status;
    uint32_t pad;
} kc_packet_fed;

typedef struct {
    uint64_t packets;
    uint64_t events;     /* of tracks */
    uint64_t undecoded;  /* packets that are no valid messages */
    uint64_t unbegun;    /* ends of slices that did not begin */
    uint64_t open;       /* slices that did not end; they end with the trace */
    uint64_t legacy;     /* events of a form that is not read */
    uint64_t lost_state; /* packets that refer to what was not in the file */
    int64_t last;        /* ns: the latest time of an event */
} kc_packet_read_counts;

typedef struct kc_packet_reader kc_packet_reader;

KC_EXPORT kc_packet_reader *kc_packet_reader_new(void); /* NULL: no memory */
KC_EXPORT void kc_packet_reader_free(kc_packet_reader *reader);
KC_EXPORT void kc_packet_reader_feed(kc_packet_reader *reader, const uint8_t *data, uint64_t size,
                                     kc_packet_fed *result);
/* base: is subtracted from all times (ns). ours: text values with an odd id are JSON. flows: 0 leaves out those of the
   events that follow. */
KC_EXPORT void kc_packet_reader_set(kc_packet_reader *reader, int64_t base, uint32_t ours, uint32_t flows);
/* Members of the track's events, like "pid":1,"tid":2; of counters also their name, and then the member's name in its
   arguments. hidden: its events are left out. -1: no memory. */
KC_EXPORT int kc_packet_reader_track(kc_packet_reader *reader, uint64_t uuid, const char *members, uint64_t size,
                                     const char *key, uint64_t key_size, uint32_t hidden);
/* Writes what is still open, and the flows. -1: no memory. */
KC_EXPORT int kc_packet_reader_finish(kc_packet_reader *reader);
/* The JSON objects so far, each but the first with a comma before it; kc_packet_reader_drop empties them. */
KC_EXPORT const char *kc_packet_reader_text(const kc_packet_reader *reader, uint64_t *size);
KC_EXPORT void kc_packet_reader_drop(kc_packet_reader *reader);
KC_EXPORT void kc_packet_reader_count(const kc_packet_reader *reader, kc_packet_read_counts *counts);

#endif
