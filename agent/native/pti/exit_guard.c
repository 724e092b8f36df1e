/* Theory of operation
 *
 *   PTI's core makes a thread when it is first used, and registers a destructor that ends it when the process exits. A
 *   forked child has no such thread: there the destructor waits for it forever (for the waiters of a condition variable
 *   that the child has copied), so a child that calls exit() hangs. Every program that uses PTI has this problem;
 *   because of us, a program that never asked for PTI would.
 *
 *   The core registers its destructors by __cxa_atexit, which it calls through its own table of imported functions. We
 *   replace its entry there: ours registers a function that calls PTI's destructor in the process that has registered
 *   it, and does nothing in others. Destructors that PTI registered before us (because the program has used it) stay.
 *
 * Threads: the agent's places the guard; guarded runs on the thread that exits, register_guarded on the one that uses
 *   the core first.
 * Blocks: never.
 */
#define _GNU_SOURCE
#include "pti/exit_guard.h"

#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARDS_MOST 256u
#define CORE "libpti.so"
#define FUNCTION "__cxa_atexit"

#if defined __x86_64__
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOBAL_DATA R_X86_64_GLOB_DAT
#elif defined __aarch64__
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOBAL_DATA R_AARCH64_GLOB_DAT
#endif

typedef void (*destructor)(void *);

extern int __cxa_atexit(destructor function, void *argument, void *library);

struct guard {
    destructor function;
    void *argument;
    pid_t process;
};

static struct guard guards[GUARDS_MOST];
static uint32_t guard_count;

static void guarded(void *argument) {
    const struct guard *guard = argument;
    if (guard->process == getpid()) {
        guard->function(guard->argument);
    }
}

static int register_guarded(destructor function, void *argument, void *library) {
    const uint32_t index = __atomic_fetch_add(&guard_count, 1, __ATOMIC_RELAXED);
    if (index >= GUARDS_MOST) {
        return __cxa_atexit(function, argument, library);
    }
    guards[index] = (struct guard){.function = function, .argument = argument, .process = getpid()};
    return __cxa_atexit(guarded, &guards[index], library);
}

/* ---- the core's table of imported functions ---- */

struct image {
    uintptr_t base;
    const ElfW(Sym) *symbols;
    const char *names;
    const ElfW(Rela) *tables[2]; /* functions; data */
    size_t sizes[2];
};

static bool is_core(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    return strncmp(name, CORE, sizeof CORE - 1) == 0;
}

/* glibc has replaced the file's offsets by addresses. */
static void read_dynamic(struct image *image, const ElfW(Dyn) *entry) {
    for (; entry->d_tag != DT_NULL; entry++) {
        const uintptr_t address = entry->d_un.d_ptr;
        switch (entry->d_tag) {
        case DT_SYMTAB:
            image->symbols = (const ElfW(Sym) *)address; /* NOLINT */
            break;
        case DT_STRTAB:
            image->names = (const char *)address; /* NOLINT */
            break;
        case DT_JMPREL:
            image->tables[0] = (const ElfW(Rela) *)address; /* NOLINT */
            break;
        case DT_PLTRELSZ: image->sizes[0] = entry->d_un.d_val; break;
        case DT_RELA:
            image->tables[1] = (const ElfW(Rela) *)address; /* NOLINT */
            break;
        case DT_RELASZ: image->sizes[1] = entry->d_un.d_val; break;
        default: break;
        }
    }
}

static uintptr_t *find_entry(const struct image *image) {
    for (size_t table = 0; table < 2; table++) {
        const size_t count = image->tables[table] == NULL ? 0 : image->sizes[table] / sizeof(ElfW(Rela));
        for (size_t i = 0; i < count; i++) {
            const ElfW(Rela) *relocation = &image->tables[table][i];
            const uint64_t type = ELF64_R_TYPE(relocation->r_info);
            const ElfW(Sym) *symbol = &image->symbols[ELF64_R_SYM(relocation->r_info)];
            if ((type == JUMP_SLOT || type == GLOBAL_DATA) && strcmp(image->names + symbol->st_name, FUNCTION) == 0) {
                return (uintptr_t *)(image->base + relocation->r_offset); /* NOLINT */
            }
        }
    }
    return NULL;
}

static bool in_read_only_part(const struct dl_phdr_info *info, uintptr_t address) {
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_GNU_RELRO && address >= begin && address < begin + part->p_memsz) {
            return true;
        }
    }
    return false;
}

static bool replace(const struct dl_phdr_info *info, uintptr_t *entry) {
    const uintptr_t page = (uintptr_t)entry & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    const size_t bytes = (uintptr_t)(entry + 1) - page;
    const bool closed = in_read_only_part(info, (uintptr_t)entry);
    if (closed && mprotect((void *)page, bytes, PROT_READ | PROT_WRITE) != 0) { /* NOLINT */
        return false;
    }
    __atomic_store_n(entry, (uintptr_t)register_guarded, __ATOMIC_SEQ_CST);
    if (closed) {
        (void)mprotect((void *)page, bytes, PROT_READ); /* NOLINT */
    }
    return true;
}

static int place_in(struct dl_phdr_info *info, size_t bytes, void *placed) {
    struct image image = {.base = info->dlpi_addr};
    (void)bytes;
    if (!is_core(info->dlpi_name)) {
        return 0;
    }
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            read_dynamic(&image, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr)); /* NOLINT */
        }
    }
    uintptr_t *entry = image.symbols == NULL || image.names == NULL ? NULL : find_entry(&image);
    *(bool *)placed = entry != NULL && (*entry == (uintptr_t)register_guarded || replace(info, entry));
    return 1;
}

bool exit_guard_place(void) {
    bool placed = false;
    (void)dl_iterate_phdr(place_in, &placed);
    return placed;
}
