/* Reads damaged Perfetto traces, for sanitizers: fuzz_perfetto FILE ROUNDS.
 *
 * Every piece is a heap block of exactly its size. Each round changes some bytes, cuts the file into pieces of any
 * length and reads it to its end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "perfetto_read.h"

static uint64_t state = 88172645463325252u;

static uint64_t next(uint64_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return limit ? state % limit : state;
}

static void read_all(const uint8_t *data, uint64_t size)
{
    kp_reader *reader = kp_reader_new();
    kp_read_counts counts;
    uint64_t at = 0, ready = 0, length;
    if (!reader)
        abort();
    kp_reader_set(reader, (int64_t)next(0), (uint32_t)next(2));
    for (;;) {
        kp_fed fed;
        uint8_t *piece = malloc(ready - at ? ready - at : 1);
        if (!piece)
            abort();
        memcpy(piece, data + at, ready - at);
        kp_reader_feed(reader, piece, ready - at, &fed);
        if (fed.consumed > ready - at || fed.end > ready - at || fed.begin > fed.end)
            abort();
        free(piece);
        at += fed.consumed;
        if (fed.status == KP_DAMAGED || fed.status == KP_NO_MEMORY)
            break;
        if (fed.status == KP_PACKET && kp_reader_track(reader, next(64), "\"pid\":1", 7, "\"k\"", 3, next(8) == 0))
            abort();
        if (fed.status == KP_MORE && !fed.consumed) {
            if (ready == size)
                break;
            ready += next(size / 3) + 1;
            ready = ready < size ? ready : size;
        }
        if (next(4) == 0)
            kp_reader_drop(reader);
    }
    if (kp_reader_finish(reader))
        abort();
    kp_reader_text(reader, &length);
    kp_reader_count(reader, &counts);
    kp_reader_free(reader);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    FILE *file = fopen(arguments[1], "rb");
    if (!file)
        return 2;
    static uint8_t whole[1 << 20], damaged[1 << 20];
    uint64_t size = fread(whole, 1, sizeof whole, file);
    fclose(file);
    for (long round = atol(arguments[2]); round > 0; round--) {
        uint64_t length = next(4) ? size : next(size) + 1;
        memcpy(damaged, whole, size);
        for (uint64_t n = next(12); n; n--)
            damaged[next(size)] = next(2) ? (uint8_t)next(256) : (uint8_t)(damaged[next(size)] ^ 1 << next(8));
        read_all(damaged, length);
    }
    puts("ok");
    return 0;
}
