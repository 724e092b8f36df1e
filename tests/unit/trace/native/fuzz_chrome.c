/* Runs the reader of Chrome traces over damaged ones, for sanitizers: fuzz_chrome FILE ROUNDS [SEED].
 *
 * Each round takes some of FILE, changes it (bytes, cuts, copies, tokens that JSON's grammar minds), and feeds it in
 * pieces of random size, each from a heap block that is not a byte longer than promised. Then all columns and texts
 * are read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chrome.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define ARG(key, type, column) {key, sizeof key - 1, type, KC_FIXED_COLUMNS + (column), 0, -1}

static uint64_t state = 88172645463325252u;

static uint64_t next(uint64_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return limit ? state % limit : 0;
}

static void *room(uint64_t bytes)
{
    void *block = malloc(bytes ? bytes : 1);
    if (!block)
        abort();
    return block;
}

static const kc_chrome_arg ARGS[] = {
    ARG("External id", KC_T_I64, 0),
    ARG("external id", KC_T_I64, 0),
    ARG("Record function id", KC_T_U64, 1),
    ARG("Sequence number", KC_T_I32, 2),
    ARG("Fwd thread id", KC_T_U32, 3),
    ARG("finished", KC_T_BOOL, 4),
    ARG("Ev Idx", KC_T_U16, 5),
    ARG("External id", KC_T_I64, 0),
    ARG("grid", KC_T_I32X3, 1),
    ARG("block", KC_T_I32X3, 4),
    ARG("stream", KC_T_SIGNED_U32, 7),
    ARG("blocks per SM", KC_T_F64, 8),
    ARG("Addr", KC_T_U64, 0),
};
static const kc_chrome_kind KINDS[] = {{0, 7}, {7, 5}, {12, 1}, {13, 0}, {13, 0}};
static const kc_chrome_category CATEGORIES[] = {{"cpu_op", 6, 0, 0, 0}, {"kernel", 6, 0, 1, 0}, {"_runtime", 8, 1, 0, 0}};
static const kc_chrome_plan PLAN = {KINDS, ARGS, CATEGORIES, COUNT(KINDS), COUNT(CATEGORIES), 2, 3, 4, 0};
static const uint8_t WIDTHS[] = {8, 8, 8, 4, 4, 4, 4, 4, 4, 1, 8, 8, 8};

static const char *const TOKENS[] = {
    "\"",  "\\",     "{",   "}",    "[",        "]",     ",",       ":",        "\\u",         "\\ud800", "\\udc00",
    "NaN", "N/A",    "nan", "-inf", "1e999",    "1e-99", "-0",      "0.1",      "18446744073709551615",   "\n",
    "\"args\":{",    "\"ph\":\"X\"", "\"ts\":", "null",  "\"cat\":", "\x01",     "\xff",        "{\"ph\":", "],\"traceName\":",
    "\"traceEvents\":[", "99999999999999999999999999", "[memory]", "\"External id\":", "\"grid\":[1,2,3]", "true", "-",
};

static uint64_t mutate(char *data, uint64_t size, uint64_t capacity)
{
    for (uint64_t changes = next(12); changes; changes--) {
        uint64_t at = next(size), length = next(60), to = next(size);
        switch (next(5)) {
        case 0: data[at] = (char)next(256); break;
        case 1: /* cut */
            if (at + length < size) {
                memmove(data + at, data + at + length, size - at - length);
                size -= length;
            }
            break;
        case 2: /* copy over */
            if (at + length < size && to + length < size)
                memmove(data + to, data + at, length);
            break;
        default: { /* insert */
            const char *token = TOKENS[next(COUNT(TOKENS))];
            uint64_t bytes = strlen(token);
            if (size + bytes < capacity) {
                memmove(data + at + bytes, data + at, size - at);
                memcpy(data + at, token, bytes);
                size += bytes;
            }
        }
        }
    }
    return size;
}

static volatile uint64_t sink;

static void touch(const void *bytes, uint64_t size)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < size; i++)
        sum += ((const uint8_t *)bytes)[i];
    sink += sum;
}

static void look(kc_chrome *parser, uint64_t size)
{
    kc_chrome_counts counts;
    kc_chrome_count(parser, &counts);
    uint64_t rows = 0;
    for (uint32_t kind = 0; kind < COUNT(KINDS); kind++) {
        uint64_t own = kc_chrome_rows(parser, kind);
        rows += own;
        for (uint32_t column = 0; column < KC_MAX_COLUMNS; column++) {
            void *data = kc_chrome_take(parser, kind, column);
            if (data && column == KC_COLUMN_NAME)
                for (uint64_t i = 0; i < own; i++)
                    if (((int32_t *)data)[i] >= (int64_t)counts.strings)
                        abort();
            if (data && column < COUNT(WIDTHS))
                touch(data, own * WIDTHS[column]);
            kc_chrome_release(data);
        }
    }
    const uint64_t *ends;
    const char *strings = kc_chrome_strings(parser, &ends);
    if (counts.strings)
        touch(strings, ends[counts.strings]);
    touch(kc_chrome_tracks(parser), counts.tracks * 16);
    if (rows != counts.events || rows > size)
        abort();
}

static void one_round(const char *original, uint64_t size)
{
    uint64_t first = next(2) ? 0 : next(size), length = next(size - first) + 1, capacity = length + 4096;
    char *data = room(capacity);
    memcpy(data, original + first, length);
    if (first && next(2))
        memcpy(data, "{\"traceEvents\":[", length < 16 ? length : 16);
    length = mutate(data, length, capacity);
    kc_chrome *parser = kc_chrome_new(&PLAN);
    if (!parser)
        abort();
    uint64_t begin = 0, end = 0, limit = 1 + next(next(4) ? length : 300);
    for (uint64_t calls = 0;; calls++) {
        int final = end == length;
        char *piece = room(end - begin + KC_SCAN_PADDING);
        memcpy(piece, data + begin, end - begin);
        memset(piece + end - begin, 0, KC_SCAN_PADDING);
        kc_chrome_fed fed;
        kc_chrome_feed(parser, piece, end - begin, (uint32_t)final, end - begin > 20000, &fed);
        if (fed.consumed > end - begin || fed.value_end > end - begin || calls > 8 * length + 1000)
            abort();
        begin += fed.consumed;
        free(piece);
        if (fed.status == KC_CHROME_MEMBER || fed.status == KC_CHROME_DAMAGE)
            continue;
        if (fed.status != KC_CHROME_MORE || final)
            break;
        end = end + limit < length ? end + limit : length;
    }
    look(parser, length);
    kc_chrome_free(parser);
    free(data);
}

int main(int count, char **words)
{
    if (count < 3)
        return 2;
    FILE *file = fopen(words[1], "rb");
    if (!file)
        return 2;
    fseek(file, 0, SEEK_END);
    uint64_t size = (uint64_t)ftell(file);
    rewind(file);
    char *data = room(size);
    if (fread(data, 1, size, file) != size)
        return 2;
    fclose(file);
    if (count > 3)
        state ^= strtoull(words[3], NULL, 10) * 0x9E3779B97F4A7C15ull;
    for (long round = atol(words[2]); round > 0; round--)
        one_round(data, size);
    free(data);
    puts("ok");
    return 0;
}
