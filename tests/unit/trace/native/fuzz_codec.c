/* Runs the trace codec over damaged records, for sanitizers: fuzz_codec FILE ROUNDS.
 *
 * FILE holds raw records (kinds and sizes below). Each round damages some bytes, cuts the file at a random
 * place, decodes it from a heap block of exactly that size into columns of random capacity, and writes what
 * came out as text into an output block of random size.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec.h"

#define COLUMNS 6

static uint64_t state = 88172645463325252u;

static uint64_t next(uint64_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % limit;
}

static void *room(uint64_t bytes)
{
    void *block = malloc(bytes ? bytes : 1);
    if (!block)
        abort();
    return block;
}

static void write_rows(const kc_column *columns, uint64_t rows)
{
    static const char text[] = "first\"second" "0123456789abcdef0123456789abcdef";
    static const uint64_t ends[] = {0, 5, 5, 12};
    static const char literal[] = ",\"key\":" "0123456789abcdef0123456789abcdef";
    kc_field fields[COLUMNS + 1];
    memset(fields, 0, sizeof fields);
    for (int i = 0; i < COLUMNS + 1; i++) {
        fields[i].literal = literal;
        fields[i].literal_bytes = 7;
    }
    fields[0] = (kc_field){literal, 7, KC_MICROSECONDS, columns[0].out, 8, 0, NULL, NULL, (int64_t)next(1u << 30)};
    fields[1] = (kc_field){literal, 7, KC_SIGNED, columns[0].out_2, 8, 0, NULL, NULL, 0};
    fields[2] = (kc_field){literal, 7, KC_UNSIGNED, columns[1].out, 4, 0, NULL, NULL, 0};
    fields[3] = (kc_field){literal, 7, KC_TEXT, columns[2].out, 4, 3, text, ends, 0};
    fields[4] = (kc_field){literal, 7, KC_DECIMAL, columns[0].out, 8, 0, NULL, NULL, 0};
    fields[5] = (kc_field){literal, 7, KC_OPTIONAL, columns[4].out, 2, 0, NULL, NULL, 0};
    uint64_t capacity = next(4096);
    char *out = room(capacity);
    kc_written written;
    for (uint64_t done = 0; done < rows; done += written.rows) {
        kc_write(fields, COLUMNS + 1, done, rows - done, out, capacity, &written);
        if (written.bytes > capacity || written.rows > rows - done)
            abort();
        if (!written.rows)
            break;
    }
    free(out);
}

static void one_round(const uint8_t *original, uint64_t size)
{
    uint64_t length = next(size) + 1, capacity = next(400), damages = next(64);
    uint8_t *data = room(length);
    memcpy(data, original, length);
    while (damages--)
        data[next(length)] = (uint8_t)next(256);
    kc_interner *interner = kc_interner_new();
    kc_column columns[COLUMNS] = {
        {KC_SPAN, 8, 16, 24, room(capacity * 8), room(capacity * 8), NULL},
        {KC_COPY, 4, 40, 0, room(capacity * 4), NULL, NULL},
        {KC_INTERN, 8, 104, 0, room(capacity * 4), NULL, interner},
        {KC_COPY, 8, 208, 0, room(capacity * 8), NULL, NULL},
        {KC_COPY, 2, 6, 0, room(capacity * 2), NULL, NULL},
        {KC_COPY, 1, 215, 0, room(capacity), NULL, NULL},
    };
    kc_kind kinds[] = {{10, 216, 0, COLUMNS, capacity, 0}, {5, 40, 0, 0, 0, 0}, {4, 40, 0, 0, 0, 0},
                       {1, 96, 0, 0, 0, 0},  {38, 56, 0, 0, 0, 0}, {17, 56, 0, 0, 0, 0}};
    kc_decoded result;
    kc_decode(data, length, kinds, sizeof kinds / sizeof *kinds, columns, &result);
    if (result.consumed > length || kinds[0].rows > capacity)
        abort();
    write_rows(columns, kinds[0].rows);
    uint8_t *lane = room(kinds[0].rows);
    kc_lanes(columns[1].out, columns[0].out, columns[0].out_2, kinds[0].rows, (uint32_t)next(300) + 1, lane);
    free(lane);
    for (int i = 0; i < COLUMNS; i++) {
        free(columns[i].out);
        free(columns[i].out_2);
    }
    kc_interner_free(interner);
    free(data);
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    FILE *file = fopen(words[1], "rb");
    if (!file)
        return 2;
    fseek(file, 0, SEEK_END);
    uint64_t size = (uint64_t)ftell(file);
    rewind(file);
    uint8_t *data = room(size);
    if (fread(data, 1, size, file) != size)
        return 2;
    fclose(file);
    for (long round = atol(words[2]); round > 0; round--)
        one_round(data, size);
    free(data);
    puts("ok");
    return 0;
}
