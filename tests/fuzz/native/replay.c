/* Runs a target where the compiler has no libFuzzer: target ROUNDS FILE…, every file once, then damaged copies of them.
 *
 * Damage is blind: bytes, numbers, cuts, copies and pieces of other files, always the same for the same files.
 */
#include "input.h"

#define FILES_MOST 4096
#define GROWTH 512

static struct {
    uint8_t *data;
    uint64_t size;
} files[FILES_MOST];

static uint64_t state = 88172645463325252u;

static uint64_t any(uint64_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return limit ? state % limit : 0;
}

static uint64_t damaged(uint8_t *data, uint64_t size, uint64_t capacity, uint64_t count) {
    for (uint64_t changes = any(12); changes && size; changes--) {
        uint64_t at = any(size), length = any(60), other = any(count);
        switch (any(5)) {
        case 0: data[at] = (uint8_t)any(256); break;
        case 1: data[at] ^= (uint8_t)(1u << any(8)); break;
        case 2: /* cut */
            if (at + length < size) {
                memmove(data + at, data + at + length, size - at - length);
                size -= length;
            }
            break;
        case 3: /* a piece of another file, or of this one */
            if (length < files[other].size && size + length < capacity) {
                memmove(data + at + length, data + at, size - at);
                memcpy(data + at, files[other].data + any(files[other].size - length), length);
                size += length;
            }
            break;
        default:
            for (uint64_t n = 0; n < 8 && at + n < size; n++) {
                data[at + n] = length & 1 ? 0xff : 0;
            }
        }
    }
    return size;
}

static void read_file(const char *path, uint64_t place) {
    FILE *file = fopen(path, "rb");
    expect(file != NULL, path);
    fseek(file, 0, SEEK_END);
    files[place].size = (uint64_t)ftell(file);
    rewind(file);
    files[place].data = room(files[place].size, 1);
    expect(fread(files[place].data, 1, files[place].size, file) == files[place].size, path);
    fclose(file);
}

int main(int words, char **word) {
    uint64_t count = 0;
    for (int i = 2; i < words && count < FILES_MOST; i++) {
        read_file(word[i], count++);
    }
    for (uint64_t i = 0; i < count; i++) {
        LLVMFuzzerTestOneInput(files[i].data, files[i].size);
    }
    for (long round = words > 1 ? atol(word[1]) : 0; round > 0 && count; round--) {
        uint64_t chosen = any(count), size = files[chosen].size;
        uint8_t *work = room(size + GROWTH, 1);
        memcpy(work, files[chosen].data, size);
        size = damaged(work, size, size + GROWTH, count);
        uint8_t *exact = room(size, 1);
        memcpy(exact, work, size);
        free(work);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    for (uint64_t i = 0; i < count; i++) {
        free(files[i].data);
    }
    puts("ok");
    return 0;
}
