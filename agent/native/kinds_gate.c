/* Theory of operation
 *
 * torch's profiler, asked for operators alone, also has CUPTI record every runtime and driver call. To switch these
 * kinds off again is not safe while other threads make calls: a thread that is inside one at that moment never leaves
 * it as CUPTI sees it, and all its later calls get the correlation id of that one. (Seen on CUDA 13.0: the program's
 * next torch.profiler session then fails, since it takes correlation ids for unique.) So they must not be switched on.
 *
 * Kineto calls cuptiActivityEnable through the table of addresses (global offset table) of the library that it is
 * linked into. For the time of one call on one thread, the table's entry is the function below. It passes on what
 * other threads ask for and what it need not keep off. It stays mapped for ever (the collector is never unloaded).
 *
 * The entries are found in the library's relocations, once. An entry that the dynamic linker has not resolved yet
 * (lazy binding) may be overwritten by it on another thread: then that thread's calls, and ours after it, go straight
 * to CUPTI, which kg_down tells by what was kept off.
 */
#define _GNU_SOURCE
#include "kinds_gate.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "refuse.h"

#define FUNCTION "cuptiActivityEnable"
#define MAX_ENTRIES 8
#define KIND_LIMIT 64

#if defined(__x86_64__)
#define IS_ENTRY(type) ((type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_JUMP_SLOT)
#elif defined(__aarch64__)
#define IS_ENTRY(type) ((type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_JUMP_SLOT)
#else
#define IS_ENTRY(type) false
#endif

typedef int (*enable_function)(uint32_t kind);

struct entry {
    _Atomic(enable_function) *at;
    bool read_only;
    enable_function before;
};

/* What the dynamic linker knows of the object; it stays loaded. */
struct object {
    const char *name;
    bool found;
    ElfW(Addr) base;
    const ElfW(Dyn) *dynamic;
    uintptr_t read_only, read_only_end;
};

static struct {
    struct entry entries[MAX_ENTRIES];
    uint32_t count;
    _Atomic(enable_function) real;
    _Atomic(pid_t) thread; /* 0: no gate is up */
    _Atomic uint64_t kinds, kept_off;
} gate;

static int filtered(uint32_t kind) {
    const enable_function real = atomic_load(&gate.real);
    if (kind < KIND_LIMIT && atomic_load(&gate.thread) == (pid_t)syscall(SYS_gettid) &&
        (atomic_load(&gate.kinds) >> kind & 1) != 0) {
        atomic_fetch_or(&gate.kept_off, UINT64_C(1) << kind);
        return 0;
    }
    return real(kind);
}

static int look(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    struct object *object = wanted;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (strcmp(slash == NULL ? info->dlpi_name : slash + 1, object->name) != 0) {
        return 0;
    }
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    object->base = info->dlpi_addr;
    for (unsigned n = 0; n < info->dlpi_phnum; n++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[n];
        const uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) {
            object->dynamic = (const void *)start; /* NOLINT */
            object->found = true;
        } else if (part->p_type == PT_GNU_RELRO) {
            /* the dynamic linker protects whole pages, no more */
            object->read_only = start & ~(page - 1);
            object->read_only_end = (start + part->p_memsz) & ~(page - 1);
        }
    }
    return object->found;
}

/* An address in the dynamic section: the linker has made it absolute, some libcs have not. */
static const void *absolute(const struct object *object, ElfW(Addr) address) {
    return (const void *)(address < object->base ? object->base + address : address);
}

static void find_in(const struct object *object, const ElfW(Rela) *first, size_t bytes, const ElfW(Sym) *symbols,
                    const char *names) {
    for (const ElfW(Rela) *each = first; each < first + bytes / sizeof *first; each++) {
        if (IS_ENTRY(ELF64_R_TYPE(each->r_info)) && gate.count < MAX_ENTRIES &&
            strcmp(names + symbols[ELF64_R_SYM(each->r_info)].st_name, FUNCTION) == 0) {
            const uintptr_t at = object->base + each->r_offset;
            gate.entries[gate.count++] = (struct entry){
                .at = (void *)at, /* NOLINT */
                .read_only = at >= object->read_only && at < object->read_only_end,
            };
        }
    }
}

static void find_entries(const struct object *object) {
    const ElfW(Rela) *jumps = NULL, *others = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    size_t jump_bytes = 0, other_bytes = 0;
    for (const ElfW(Dyn) *each = object->dynamic; each->d_tag != DT_NULL; each++) {
        switch (each->d_tag) {
        case DT_JMPREL: jumps = absolute(object, each->d_un.d_ptr); break;
        case DT_PLTRELSZ: jump_bytes = each->d_un.d_val; break;
        case DT_RELA: others = absolute(object, each->d_un.d_ptr); break;
        case DT_RELASZ: other_bytes = each->d_un.d_val; break;
        case DT_SYMTAB: symbols = absolute(object, each->d_un.d_ptr); break;
        case DT_STRTAB: names = absolute(object, each->d_un.d_ptr); break;
        default: break;
        }
    }
    if (symbols == NULL || names == NULL) {
        return;
    }
    if (jumps != NULL) {
        find_in(object, jumps, jump_bytes, symbols, names);
    }
    if (others != NULL) {
        find_in(object, others, other_bytes, symbols, names);
    }
}

static bool writable(const struct entry *entry, bool yes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((uintptr_t)entry->at & ~(page - 1)); /* NOLINT */
    return !entry->read_only || mprotect(start, page, yes ? PROT_READ | PROT_WRITE : PROT_READ) == 0;
}

/* Puts back the first `count` entries, those that the dynamic linker has not filled in meanwhile. */
static void put_back(uint32_t count) {
    for (uint32_t n = 0; n < count; n++) {
        struct entry *entry = &gate.entries[n];
        enable_function ours = filtered;
        if (writable(entry, true)) { /* if not, the entry passes everything on */
            (void)atomic_compare_exchange_strong(entry->at, &ours, entry->before);
            (void)writable(entry, false);
        }
    }
}

int kg_up(const char *object_name, const char *cupti, const uint32_t *kinds, uint32_t count, char *error,
          size_t error_bytes) {
    if (atomic_load(&gate.thread) != 0) {
        return refuse(KC_ORDER, error, error_bytes, "kinds of CUPTI are being kept off already");
    }
    void *library = dlopen(cupti, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    void *real = library == NULL ? NULL : dlsym(library, FUNCTION);
    if (real == NULL) {
        return refuse(KC_LIBRARY, error, error_bytes, "the loaded libcupti has no " FUNCTION);
    }
    if (gate.count == 0) {
        struct object object = {.name = object_name};
        (void)dl_iterate_phdr(look, &object);
        if (object.found) {
            find_entries(&object);
        }
        if (gate.count == 0) {
            return KG_NOTHING;
        }
    }
    uint64_t wanted = 0;
    for (uint32_t n = 0; n < count; n++) {
        wanted |= UINT64_C(1) << (kinds[n] % KIND_LIMIT);
    }
    atomic_store(&gate.real, (enable_function)real);
    atomic_store(&gate.kinds, wanted);
    atomic_store(&gate.kept_off, 0);
    atomic_store(&gate.thread, (pid_t)syscall(SYS_gettid));
    for (uint32_t n = 0; n < gate.count; n++) {
        struct entry *entry = &gate.entries[n];
        if (!writable(entry, true)) {
            const int number = errno;
            put_back(n);
            atomic_store(&gate.thread, 0);
            return refuse_system(error, error_bytes, "mprotect", number);
        }
        entry->before = atomic_exchange(entry->at, filtered);
        (void)writable(entry, false);
    }
    return 0;
}

uint64_t kg_down(void) {
    put_back(gate.count);
    atomic_store(&gate.thread, 0);
    return atomic_load(&gate.kept_off);
}
