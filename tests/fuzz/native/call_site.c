/* Finding calls in machine code: the function is a heap block of exactly its size. Every call that is found is one. */
#include "patching/call_site.h"

#include "input.h"

#define SITES_MOST 6

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct call_site sites[SITES_MOST];
    uint8_t *code = room(size, 1);
    if (size) {
        memcpy(code, data, size);
    }
    uint32_t count = call_sites_find(code, size, sites, SITES_MOST);
    expect(count <= SITES_MOST, "more sites than there is room for");
    for (uint32_t i = 0; i < count; i++) {
        int32_t distance;
        expect(sites[i].displacement > code && sites[i].next <= code + size, "a call outside of the function");
        expect(sites[i].next == sites[i].displacement + 4, "an operand of another length");
        memcpy(&distance, sites[i].displacement, sizeof distance);
        expect((uintptr_t)sites[i].callee == (uintptr_t)sites[i].next + (uintptr_t)(intptr_t)distance,
               "another callee");
        expect(sites[i].displacement[-1] == 0xe8 || sites[i].displacement[-1] == 0xe9, "no call and no jump");
    }
    free(code);
    return 0;
}
