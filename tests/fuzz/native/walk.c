/* The walk through declared records: any framing, any sizes, any bytes.
 *
 * The data is a heap block of exactly its size. Counting and filling must find the same, and every record must lie in
 * the data, behind the one before it.
 */
#include "codec/codec.h"
#include "input.h"

#define SIZES 6

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    input_set(bytes, size);
    uint32_t framing = (uint32_t)next(3), kind = 0;
    kc_size sizes[SIZES];
    for (int i = 0; i < SIZES; i++) {
        kind += (uint32_t)next(4) + (i > 0);
        sizes[i] = (kc_size){kind, (uint32_t)next(100)};
    }
    uint64_t length = input.left;
    uint8_t *data = room(length, 1);
    if (length) {
        memcpy(data, input.at, length);
    }
    kc_decoded counted, found;
    kc_walk(data, length, framing, sizes, SIZES, NULL, &counted);
    kc_places places = {counted.records, room(counted.records, 8), room(counted.records, 4), room(counted.records, 4)};
    kc_walk(data, length, framing, sizes, SIZES, &places, &found);
    expect(found.records == counted.records && found.consumed == counted.consumed && found.status == counted.status,
           "two walks differ");
    expect(found.consumed <= length && (found.consumed == length) == (found.status == KC_OK), "the end is wrong");
    uint64_t end = 0;
    for (uint64_t i = 0; i < found.records; i++) {
        expect(places.begin[i] >= end && places.begin[i] + places.bytes[i] <= length, "a record lies elsewhere");
        end = places.begin[i] + places.bytes[i];
    }
    if (counted.records) {
        places.capacity = counted.records - 1;
        kc_walk(data, length, framing, sizes, SIZES, &places, &found);
        expect(found.status == KC_FULL && found.records == places.capacity, "more records than there is room for");
    }
    free(places.begin);
    free(places.bytes);
    free(places.kind);
    free(data);
    return 0;
}
