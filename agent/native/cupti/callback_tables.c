/* See callback_tables.h.
 *
 * Theory of operation
 *   libcupti has a flag "somebody subscribes" and, behind it, a pointer per domain to a table with a number per call. A
 *   process's first cuptiSubscribe attaches to the driver, then sets the flag, then allocates the tables. A hook of
 *   another thread that comes in between sees the flag and reads through a null pointer (libcupti 12.1 to 13.5; CUDA
 *   11 has no such pointers). The driver calls these hooks for whatever changes a resource, also while nothing is
 *   recorded: XLA's command buffers, which change the kernels of executable graphs all the time, died of it in one of
 *   a hundred first captures (H200, libcupti 13.0).
 *
 *   So the pointers get an empty table before the first subscription: no call is wanted. cuptiSubscribe replaces them
 *   by its own. Only null pointers are replaced, each in one store, and never that of domain 0, which no hook reads and
 *   libcupti frees.
 *
 *   The flag is private. It is found by the instruction that sets it, in the functions that cuptiSubscribe calls: a
 *   constant 1 stored at an address that is also loaded and compared with 0 nearby, next to an instruction with the
 *   address of the first pointer. It is taken for the flag only if all versions of it that are found agree, it lies in
 *   data of the same library, and it is 0.
 *
 * Threads: the agent's.
 * Blocks: for the loader's lock.
 */
#define _GNU_SOURCE
#include "cupti/callback_tables.h"

#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)

#define REACH 0x600u  /* bytes of a function that are searched */
#define CALLS_DEEP 2u /* the flag is set by a function called by one called by cuptiSubscribe */
#define BEFORE 64     /* where the address of the pointers is looked for, around the instruction that sets the flag */
#define AFTER 160
#define DOMAINS 7u          /* CUPTI_CB_DOMAIN_SIZE */
#define EMPTY_NUMBERS 4096u /* more than any domain has calls */
#define SETS_BYTES 10u
#define LONGEST 10u /* of the instructions looked for */

struct library {
    uintptr_t address; /* in its code */
    const uint8_t *code, *code_end;
    uintptr_t data, data_end;
};

struct tables { /* of libcupti */
    int32_t subscribed;
    uint32_t *of_domain[DOMAINS];
};

static uint32_t empty[EMPTY_NUMBERS];

static int look_for_library(struct dl_phdr_info *info, size_t bytes, void *user) {
    struct library *library = user;
    struct library found = {0};
    (void)bytes;
    for (uint32_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part->p_vaddr, end = begin + part->p_memsz;
        if (part->p_type != PT_LOAD) {
            continue;
        }
        if ((part->p_flags & (PF_X | PF_R)) == (PF_X | PF_R) && library->address >= begin && library->address < end) {
            found.code = (const uint8_t *)begin;
            found.code_end = (const uint8_t *)end;
        } else if ((part->p_flags & PF_W) != 0) {
            found.data = begin;
            found.data_end = end;
        }
    }
    if (found.code == NULL) {
        return 0;
    }
    found.address = library->address;
    *library = found;
    return 1;
}

/* The address that an instruction names relative to the next one. */
static uintptr_t named(const uint8_t *displacement, const uint8_t *next) {
    int32_t distance;
    memcpy(&distance, displacement, sizeof distance);
    return (uintptr_t)next + (uintptr_t)(intptr_t)distance;
}

/* movl $1, flag(%rip) */
static uintptr_t set_flag(const uint8_t *at) {
    static const uint8_t one[] = {1, 0, 0, 0};
    const bool sets = at[0] == 0xc7 && at[1] == 0x05 && memcmp(at + 6, one, sizeof one) == 0;
    return sets ? named(at + 2, at + SETS_BYTES) : 0;
}

/* mov flag(%rip), %eax; test %eax, %eax */
static bool tests(const uint8_t *at, uintptr_t flag) {
    return at[0] == 0x8b && at[1] == 0x05 && at[6] == 0x85 && at[7] == 0xc0 && named(at + 2, at + 6) == flag;
}

/* lea first(%rip), a register; or movups %xmm0, first(%rip) */
static bool names(const uint8_t *at, uintptr_t first) {
    const bool takes = (at[0] == 0x48 || at[0] == 0x4c) && at[1] == 0x8d && (at[2] & 0xc7) == 0x05;
    const bool stores = at[0] == 0x0f && at[1] == 0x11 && at[2] == 0x05;
    return (takes || stores) && named(at + 3, at + 7) == first;
}

static bool any(const uint8_t *begin, const uint8_t *end, bool (*is_one)(const uint8_t *, uintptr_t), uintptr_t of) {
    for (const uint8_t *at = begin; at < end; at++) {
        if (is_one(at, of)) {
            return true;
        }
    }
    return false;
}

static bool lies_in_data(const struct library *library, uintptr_t address) {
    return address % _Alignof(struct tables) == 0 && address >= library->data &&
           address + sizeof(struct tables) <= library->data_end;
}

/* Puts the flags that are set in or below a function into *flag; false: there are two different ones. */
static bool search(const struct library *library, const uint8_t *function, uint32_t deeper, uintptr_t *flag) {
    if (function < library->code || library->code_end - function < (ptrdiff_t)(REACH + LONGEST)) {
        return true;
    }
    const uint8_t *const end = function + REACH;
    for (const uint8_t *at = function; at < end; at++) {
        const uintptr_t found = set_flag(at);
        const uintptr_t first = found + offsetof(struct tables, of_domain);
        const uint8_t *near = at - function < BEFORE ? function : at - BEFORE;
        if (found == 0 || !any(near, at + AFTER < end ? at + AFTER : end, names, first) ||
            !any(function, end, tests, found) || !lies_in_data(library, found)) {
            continue;
        }
        if (*flag != 0 && *flag != found) {
            return false;
        }
        *flag = found;
    }
    for (const uint8_t *at = function; deeper > 0 && at < end; at++) {
        if (at[0] == 0xe8 && !search(library, (const uint8_t *)named(at + 1, at + 5), deeper - 1, flag)) {
            return false;
        }
    }
    return true;
}

bool callback_tables_fill(const void *const *functions, unsigned count) {
    uintptr_t flag = 0;
    for (unsigned i = 0; i < count; i++) {
        struct library library = {.address = (uintptr_t)functions[i]};
        if (functions[i] != NULL && dl_iterate_phdr(look_for_library, &library) != 0 &&
            !search(&library, functions[i], CALLS_DEEP, &flag)) {
            return false;
        }
    }
    if (flag == 0) {
        return false;
    }
    struct tables *tables = (struct tables *)flag; // NOLINT(performance-no-int-to-ptr): named by an instruction
    for (uint32_t domain = 1; domain < DOMAINS && __atomic_load_n(&tables->subscribed, __ATOMIC_SEQ_CST) == 0;
         domain++) {
        uint32_t *none = NULL;
        (void)__atomic_compare_exchange_n(&tables->of_domain[domain], &none, empty, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST);
    }
    return true;
}

#else /* no decoder for this architecture */

bool callback_tables_fill(const void *const *functions, unsigned count) {
    (void)functions, (void)count;
    return false;
}

#endif
