/* The writer of Perfetto traces: events of any times on a few tracks get lanes, and are written as packets. */
#include "input.h"
#include "perfetto/write_packets.h"

#define EVENTS_MOST 200
#define FIELDS 5

static int64_t a_time(void) { return next(8) ? (int64_t)next(300) : (int64_t)next(0); }

static void write_track(const kc_packet_events *events, uint64_t first, uint64_t last, uint32_t deepest,
                        uint64_t flow) {
    kc_packet_track track = {.next = first, .last = last, .flow = flow, .stack = room(deepest, 8), .sequence = 7};
    uint64_t capacity = 200 + next(2000);
    uint8_t *out = room(capacity, 1);
    for (unsigned calls = 0; calls < 4 * EVENTS_MOST; calls++) {
        kc_written written;
        kc_packet_write(events, &track, 1 + next(20), out, capacity, &written);
        expect(written.bytes <= capacity && track.next <= last + 1 && track.depth <= deepest, "out of bounds");
        if (!written.rows) {
            break;
        }
    }
    free(track.stack);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input_set(data, size);
    uint64_t count = next(EVENTS_MOST), flows = next(8);
    uint32_t *track = room(count, 4), *row = room(count, 4);
    int64_t *start = room(count, 8), *end = room(count, 8), *signed_values = room(count, 8), *value = room(count, 8);
    uint8_t *leaf = room(count, 1), *kind = room(count, 1);
    int32_t *above = room(count, 4), *name = room(count, 4);
    uint16_t *lane = room(count, 2);
    uint64_t *present = room(count, 8), *flow_event = room(flows, 8), *flow_id = room(flows, 8);
    uint8_t *narrow = room(count, 1);
    static const uint8_t ready[] = "abcdef";
    static const uint64_t ready_ends[] = {0, 2, 2, 6};
    for (uint64_t i = 0; i < count; i++) {
        track[i] = 0;
        int64_t begin = a_time(), finish = a_time();
        start[i] = i && begin < start[i - 1] ? start[i - 1] : begin; /* sorted, as the caller has them */
        end[i] = finish < start[i] ? start[i] : finish;
        if (i && start[i] == start[i - 1] && end[i] > end[i - 1]) {
            end[i] = end[i - 1];
        }
        leaf[i] = (uint8_t)(next(8) == 0);
        kind[i] = (uint8_t)next(4);
        row[i] = (uint32_t)i;
        name[i] = (int32_t)next(1000);
        present[i] = next(0);
        narrow[i] = (uint8_t)next(256);
        signed_values[i] = (int64_t)next(0);
        value[i] = (int64_t)next(0);
    }
    for (uint64_t i = 0; i < flows; i++) {
        uint64_t event = count ? next(count) : 0;
        flow_event[i] = i && event < flow_event[i - 1] ? flow_event[i - 1] : event;
        flow_id[i] = next(0);
    }
    kc_packet_nesting nesting = {count, track, start, end, leaf, above, lane, (uint32_t)next(4) + 1, 0, 0};
    kc_packet_lanes(&nesting);
    expect(nesting.shortened <= count && nesting.deepest <= count, "counts");
    for (uint64_t i = 0; i < count; i++) {
        expect(lane[i] < nesting.lane_limit && end[i] >= start[i], "a lane that is none");
    }
    const kc_packet_field fields[FIELDS] = {
        {1, KC_PACKET_UNSIGNED, narrow, 1, 0, present, 0, NULL, NULL, 0},
        {2, KC_PACKET_SIGNED, signed_values, 8, 1, NULL, 0, NULL, NULL, 0},
        {3, KC_PACKET_DOUBLE, value, 8, 2, present, 0, NULL, NULL, 0},
        {4, KC_PACKET_OPTIONAL, narrow, 1, 0, NULL, 255, NULL, NULL, 0},
        {5, KC_PACKET_READY, narrow, 1, 0, NULL, 0, ready, ready_ends, 3},
    };
    const kc_packet_kind kinds[] = {
        {KC_PACKET_SLICE, 1, NULL, name, NULL, 0, FIELDS},
        {KC_PACKET_INSTANT, 0, NULL, name, NULL, 1, 2},
        {KC_PACKET_COUNTER, 0, NULL, NULL, value, 0, 0},
        {KC_PACKET_DOUBLE_COUNTER, 0, NULL, NULL, value, 0, 0},
    };
    const kc_packet_events events = {kind, row, start, end, kinds, fields, flow_event, flow_id, flows};
    if (nesting.lane_limit == 1 && count) { /* one lane: the events are in the order in which they are written */
        write_track(&events, 0, count, nesting.deepest, 0);
    }
    free(track), free(row), free(start), free(end), free(signed_values), free(value), free(leaf), free(kind);
    free(above), free(name), free(lane), free(present), free(flow_event), free(flow_id), free(narrow);
    return 0;
}
