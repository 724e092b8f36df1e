/* The reader of Perfetto traces.
 *
 * The last two bytes say into which pieces the rest is cut and what the caller does between them; each piece is a heap
 * block of exactly its size.
 */
#include "input.h"
#include "perfetto/read_packets.h"

static uint64_t state;

static uint64_t any(uint64_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return limit ? state % limit : state;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t given) {
    uint64_t size = given > 2 ? given - 2 : 0;
    state = given > 2 ? 88172645463325252u + data[size] + 256u * data[size + 1] : 1;
    kc_packet_reader *reader = kc_packet_reader_new();
    kc_packet_read_counts counts;
    uint64_t at = 0, ready = 0, length;
    if (!reader) {
        abort();
    }
    kc_packet_reader_set(reader, (int64_t)any(0), (uint32_t)any(2), (uint32_t)any(2));
    for (;;) {
        kc_packet_fed fed;
        uint8_t *piece = malloc(ready - at ? ready - at : 1);
        if (!piece) {
            abort();
        }
        memcpy(piece, data + at, ready - at);
        kc_packet_reader_feed(reader, piece, ready - at, &fed);
        if (fed.consumed > ready - at || fed.end > ready - at || fed.begin > fed.end) {
            abort();
        }
        free(piece);
        at += fed.consumed;
        if (fed.status == KC_PACKET_DAMAGED || fed.status == KC_PACKET_NO_MEMORY) {
            break;
        }
        if (fed.status == KC_PACKET_WHOLE &&
            kc_packet_reader_track(reader, any(64), "\"pid\":1", 7, "\"k\"", 3, any(8) == 0)) {
            abort();
        }
        if (fed.status == KC_PACKET_MORE && !fed.consumed) {
            if (ready == size) {
                break;
            }
            ready += any(size / 3) + 1;
            ready = ready < size ? ready : size;
        }
        if (any(4) == 0) {
            kc_packet_reader_drop(reader);
        }
    }
    if (kc_packet_reader_finish(reader)) {
        abort();
    }
    kc_packet_reader_text(reader, &length);
    kc_packet_reader_count(reader, &counts);
    kc_packet_reader_free(reader);
    return 0;
}
