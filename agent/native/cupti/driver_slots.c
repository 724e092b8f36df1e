/* See driver_slots.h.
 *
 * Threads: the agent's.
 * Blocks: for the loader's lock.
 */
#define _GNU_SOURCE
#include "cupti/driver_slots.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>

#include "patching/call_site.h"

struct place {
    uintptr_t address;
    bool code;     /* look for code rather than writable data */
    bool is_there; /* in one library, all the eight bytes */
};

static int look_in(struct dl_phdr_info *info, size_t bytes, void *user) {
    struct place *place = user;
    bool within = false, sealed = false;
    (void)bytes;
    for (uint32_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part->p_vaddr;
        const bool here = place->address >= begin && place->address + sizeof(void *) <= begin + part->p_memsz;
        within |= here && part->p_type == PT_LOAD && (part->p_flags & (place->code ? PF_X : PF_W)) != 0;
        sealed |= here && part->p_type == PT_GNU_RELRO;
    }
    place->is_there |= within && !sealed;
    return within;
}

static bool lies_in(const void *address, bool code) {
    struct place place = {.address = (uintptr_t)address, .code = code};
    (void)dl_iterate_phdr(look_in, &place);
    return place.is_there;
}

void **driver_slot(uint8_t *function) {
    Dl_info known;
    ElfW(Sym) *symbol = NULL;
    if (function == NULL || dladdr1(function, &known, (void **)&symbol, RTLD_DL_SYMENT) == 0 || symbol == NULL) {
        return NULL;
    }
    void **slot = call_pointer_find(function, symbol->st_size);
    const bool usable = slot != NULL && (uintptr_t)slot % sizeof *slot == 0 && lies_in(slot, false);
    return usable && lies_in(__atomic_load_n(slot, __ATOMIC_SEQ_CST), true) ? slot : NULL;
}

bool in_between_may(const struct in_between *between, const void *ours) {
    const void *found = __atomic_load_n(between->slot, __ATOMIC_SEQ_CST);
    const void *before = in_between_original(between);
    return before == NULL || found == before || found == ours;
}

void in_between_place(struct in_between *between, void *ours) {
    void *found = __atomic_load_n(between->slot, __ATOMIC_SEQ_CST);
    if (found != ours) { /* otherwise it has come back to us after the removal */
        __atomic_store_n(&between->original, found, __ATOMIC_SEQ_CST);
        __atomic_store_n(between->slot, ours, __ATOMIC_SEQ_CST);
    }
}

void in_between_remove(struct in_between *between, void *ours) {
    if (between->slot != NULL) {
        (void)__atomic_compare_exchange_n(between->slot, &ours, in_between_original(between), false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST);
    }
}

void *in_between_original(const struct in_between *between) {
    return __atomic_load_n(&between->original, __ATOMIC_SEQ_CST);
}
