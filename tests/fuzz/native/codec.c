/* The trace codec: raw records into columns, columns into text.
 *
 * The first eight bytes say how much room there is, the rest are raw records (kinds and sizes below). They are decoded
 * from a heap block of exactly their size into columns of that capacity, and what came out is written as text into an
 * output block of that size.
 */
#include "codec/codec.h"
#include "input.h"

#define COLUMNS 6

static void write_rows(const kc_column *columns, uint64_t rows, uint64_t capacity, int64_t base) {
    static const char text[] = "first\"second"
                               "0123456789abcdef0123456789abcdef";
    static const uint64_t ends[] = {0, 5, 5, 12};
    static const char literal[] = ",\"key\":"
                                  "0123456789abcdef0123456789abcdef";
    kc_field fields[COLUMNS + 1];
    memset(fields, 0, sizeof fields);
    for (int i = 0; i < COLUMNS + 1; i++) {
        fields[i].literal = literal;
        fields[i].literal_bytes = 7;
    }
    fields[0] = (kc_field){literal, 7, KC_MICROSECONDS, columns[0].out, 8, 0, NULL, NULL, base};
    fields[1] = (kc_field){literal, 7, KC_SIGNED, columns[0].out_2, 8, 0, NULL, NULL, 0};
    fields[2] = (kc_field){literal, 7, KC_UNSIGNED, columns[1].out, 4, 0, NULL, NULL, 0};
    fields[3] = (kc_field){literal, 7, KC_TEXT, columns[2].out, 4, 3, text, ends, 0};
    fields[4] = (kc_field){literal, 7, KC_DECIMAL, columns[0].out, 8, 0, NULL, NULL, 0};
    fields[5] = (kc_field){literal, 7, KC_OPTIONAL, columns[4].out, 2, 0, NULL, NULL, 0};
    char *out = room(capacity, 1);
    kc_written written;
    for (uint64_t done = 0; done < rows; done += written.rows) {
        kc_write(fields, COLUMNS + 1, done, rows - done, out, capacity, &written);
        if (written.bytes > capacity || written.rows > rows - done) {
            abort();
        }
        if (!written.rows) {
            break;
        }
    }
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    input_set(bytes, size);
    uint64_t capacity = next(400), out_bytes = next(4096);
    uint32_t lanes = (uint32_t)next(300) + 1;
    int64_t base = (int64_t)next(65536) * 1000;
    uint64_t length = input.left;
    uint8_t *data = room(length, 1);
    memcpy(data, input.at, length);
    kc_interner *interner = kc_interner_new();
    kc_column columns[COLUMNS] = {
        {KC_SPAN, 8, 16, 24, room(capacity, 8), room(capacity, 8), NULL},
        {KC_COPY, 4, 40, 0, room(capacity, 4), NULL, NULL},
        {KC_INTERN, 8, 104, 0, room(capacity, 4), NULL, interner},
        {KC_COPY, 8, 208, 0, room(capacity, 8), NULL, NULL},
        {KC_COPY, 2, 6, 0, room(capacity, 2), NULL, NULL},
        {KC_COPY, 1, 215, 0, room(capacity, 1), NULL, NULL},
    };
    kc_kind kinds[] = {{10, 216, 0, COLUMNS, capacity, 0},
                       {5, 40, 0, 0, 0, 0},
                       {4, 40, 0, 0, 0, 0},
                       {1, 96, 0, 0, 0, 0},
                       {38, 56, 0, 0, 0, 0},
                       {17, 56, 0, 0, 0, 0}};
    kc_decoded result;
    kc_decode(data, length, kinds, sizeof kinds / sizeof *kinds, columns, &result);
    if (result.consumed > length || kinds[0].rows > capacity) {
        abort();
    }
    write_rows(columns, kinds[0].rows, out_bytes, base);
    uint8_t *lane = room(kinds[0].rows, 1);
    kc_lanes(columns[1].out, columns[0].out, columns[0].out_2, kinds[0].rows, lanes, lane);
    free(lane);
    for (int i = 0; i < COLUMNS; i++) {
        free(columns[i].out);
        free(columns[i].out_2);
    }
    kc_interner_free(interner);
    free(data);
    return 0;
}
