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
    bool code;     /* look for code instead of data that stays writable */
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
