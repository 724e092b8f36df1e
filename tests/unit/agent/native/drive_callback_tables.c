/* Drives the search for CUPTI's tables of callbacks, in code as libcupti has it and in real ones, without a GPU.
 *
 *   drive_callback_tables [LIBCUPTI]
 *
 * Exits with 0 if the tables are found and filled, and nothing else is changed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "cupti/callback_tables.c"

#include "check.h"

/* As libcupti 12 does it: the address of the pointers for a function that allocates, the flag before the call. */
__asm__(".text\n"
        "attach: ret\n"
        ".skip 0x700, 0x90\n"
        "subscribe_12: call attach\n call add_12\n ret\n"
        "add_12: movl tables_12(%rip), %eax\n test %eax, %eax\n je 1f\n ret\n"
        "1: lea tables_12+8(%rip), %rdi\n movl $1, tables_12(%rip)\n call attach\n ret\n"
        ".skip 0x700, 0x90\n"
        /* libcupti 13: the pointers are stored one after another. */
        "subscribe_13: call subscribe_v2_13\n ret\n"
        ".skip 0x700, 0x90\n"
        "subscribe_v2_13: call attach\n call add_13\n ret\n"
        ".skip 0x700, 0x90\n"
        "add_13: movl tables_13(%rip), %eax\n test %eax, %eax\n je 1f\n ret\n"
        "1: movl $1, tables_13(%rip)\n call attach\n movups %xmm0, tables_13+8(%rip)\n"
        " mov %rdx, tables_13+24(%rip)\n ret\n"
        ".skip 0x700, 0x90\n"
        /* No flag: never tested; no pointers behind it; constant. */
        "untested: lea alone+8(%rip), %rdi\n movl $1, alone(%rip)\n ret\n"
        ".skip 0x700, 0x90\n"
        "single: movl alone(%rip), %eax\n test %eax, %eax\n movl $1, alone(%rip)\n ret\n"
        ".skip 0x700, 0x90\n"
        "constant: movl fixed(%rip), %eax\n test %eax, %eax\n lea fixed+8(%rip), %rdi\n movl $1, fixed(%rip)\n ret\n"
        ".skip 0x700, 0x90\n"
        /* Two that look alike. */
        "ambiguous: call add_12\n call add_13\n ret\n"
        ".skip 0x700, 0x90\n"
        ".section .rodata\n .balign 16\n fixed: .skip 64\n"
        ".data\n .balign 16\n tables_12: .skip 64\n tables_13: .skip 64\n alone: .skip 64\n"
        ".text\n");
extern const char subscribe_12, subscribe_13, subscribe_v2_13, untested, single, constant, ambiguous;
extern struct tables tables_12, tables_13, alone;

static bool fill(const char *function) {
    const void *const functions[] = {function, NULL};
    return callback_tables_fill(functions, 2);
}

static bool untouched(const struct tables *tables) {
    static const struct tables none;
    return memcmp(tables, &none, sizeof none) == 0;
}

static bool filled(const struct tables *tables) {
    for (uint32_t domain = 1; domain < DOMAINS; domain++) {
        if (tables->of_domain[domain] != empty) {
            return false;
        }
    }
    return tables->subscribed == 0 && tables->of_domain[0] == NULL;
}

static void try_made_code(void) {
    CHECK(!fill(&untested) && !fill(&single) && !fill(&constant) && !fill(&ambiguous) && !fill(NULL));
    CHECK(untouched(&tables_12) && untouched(&tables_13) && untouched(&alone));
    CHECK(fill(&subscribe_12) && filled(&tables_12) && untouched(&tables_13));
    CHECK(fill(&subscribe_v2_13) && filled(&tables_13)); /* if the first call of subscribe_13 has a gate */
    memset(&tables_13, 0, sizeof tables_13);
    CHECK(fill(&subscribe_13) && filled(&tables_13));
}

static void leave_what_others_have(void) {
    static uint32_t theirs[8];
    memset(&tables_12, 0, sizeof tables_12);
    tables_12.subscribed = 1;
    CHECK(fill(&subscribe_12) && tables_12.of_domain[1] == NULL);
    tables_12.subscribed = 0;
    tables_12.of_domain[3] = theirs;
    CHECK(fill(&subscribe_12) && tables_12.of_domain[3] == theirs && tables_12.of_domain[2] == empty);
}

/* How often all the tables are found filled in the library's data. */
static uint32_t count_filled(const void *function) {
    struct library library = {.address = (uintptr_t)function};
    uint32_t count = 0;
    CHECK(dl_iterate_phdr(look_for_library, &library) == 1);
    for (uintptr_t at = library.data; at + sizeof(struct tables) <= library.data_end; at += sizeof(void *)) {
        count += filled((const struct tables *)at);
    }
    return count;
}

static void try_real_code(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    const void *const functions[] = {dlsym(library, "cuptiSubscribe"), dlsym(library, "cuptiSubscribe_v2")};
    CHECK(functions[0] != NULL && count_filled(functions[0]) == 0);
    CHECK(callback_tables_fill(functions, 2));
    CHECK(count_filled(functions[0]) == 1);
}

int main(int argc, char **argv) {
    try_made_code();
    leave_what_others_have();
    if (argc > 1) {
        try_real_code(argv[1]);
    }
    return 0;
}
