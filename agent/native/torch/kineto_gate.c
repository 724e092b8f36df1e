/* Theory of operation
 *
 * torch's profiler, even for operators only, makes CUPTI record every runtime and driver call, except some that it
 * switches off one by one, and registers its buffers and clock there. While other threads make calls that is not safe:
 * for CUPTI, a thread inside a call at that moment may never leave it, and all its later calls get the correlation id
 * of that one. (Seen on CUDA 13.0, once in 30 to 100 sessions, with the kinds switched on and off again, and also where
 * single calls were switched off and the clock was registered and nothing else: the program's next torch.profiler
 * session then fails, since it takes correlation ids for unique.) So our sessions must not change anything in CUPTI.
 *
 * Kineto calls CUPTI through the table of addresses (global offset table) of the library that it is linked into. During
 * one call on one thread, the table's entries of the functions in GATES lead here. Calls of other threads are passed
 * on. The code stays mapped (the collector is never unloaded).
 *
 * The entries are found in the library's relocations, once. An entry that the dynamic linker has not resolved yet (lazy
 * binding) may be overwritten by it on another thread: then that thread's calls, and ours after it, go straight to
 * CUPTI, and are missing from the count that kc_gate_down returns.
 *
 * Threads: kc_gate_up and kc_gate_down run on the agent's, which then calls Kineto; the gates themselves on the thread
 *   that calls CUPTI from that library.
 * Blocks: never. Up and down take the loader's lock.
 */
#define _GNU_SOURCE
#include "torch/kineto_gate.h"

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

#include "common/error_text.h"

#define MAX_ENTRIES 32

#if defined(__x86_64__)
#define IS_ENTRY(type) ((type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_JUMP_SLOT)
#elif defined(__aarch64__)
#define IS_ENTRY(type) ((type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_JUMP_SLOT)
#else
#define IS_ENTRY(type) false
#endif

typedef void (*function)(void); /* any of them */

/* Names and parameters of all functions by which Kineto changes what CUPTI records for the whole process. */
#define EACH_GATE(X)                                                                              \
    X(cuptiActivityEnable, (uint32_t kind), (kind))                                               \
    X(cuptiActivityDisable, (uint32_t kind), (kind))                                              \
    X(cuptiActivityEnableDriverApi, (uint32_t call, uint8_t on), (call, on))                      \
    X(cuptiActivityEnableRuntimeApi, (uint32_t call, uint8_t on), (call, on))                     \
    X(cuptiActivityEnableCudaEventDeviceTimestamps, (uint8_t on), (on))                           \
    X(cuptiActivityFlushAll, (uint32_t flag), (flag))                                             \
    X(cuptiActivityRegisterCallbacks, (void *requested, void *completed), (requested, completed)) \
    X(cuptiActivityRegisterTimestampCallback, (void *clock), (clock))                             \
    X(cuptiActivitySetAttribute, (uint32_t attribute, size_t *bytes, void *value), (attribute, bytes, value))

#define AS_NUMBER(name, parameters, arguments) AT_##name,
enum { EACH_GATE(AS_NUMBER) GATED };

struct entry {
    _Atomic(function) *at;
    int which;
    bool read_only;
    function before;
};

/* The dynamic linker's data about the object, which stays loaded. */
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
    _Atomic(function) real[GATED];
    _Atomic(pid_t) thread;  /* 0: no gate is up */
    _Atomic(pid_t) process; /* of that thread: a child forked since has no gate up */
    _Atomic uint64_t kept_off;
} gate;

static bool is_up(void) { return atomic_load(&gate.thread) != 0 && atomic_load(&gate.process) == getpid(); }

static bool kept_off(void) {
    if (atomic_load(&gate.thread) != (pid_t)syscall(SYS_gettid) || !is_up()) {
        return false;
    }
    atomic_fetch_add(&gate.kept_off, 1);
    return true;
}

#define AS_FUNCTION(name, parameters, arguments)                                                  \
    static int gated_##name parameters {                                                          \
        return kept_off() ? 0 : ((int(*) parameters)atomic_load(&gate.real[AT_##name]))arguments; \
    }
EACH_GATE(AS_FUNCTION)

#define AS_ROW(name, parameters, arguments) [AT_##name] = {#name, (function)gated_##name},
static const struct {
    const char *name;
    function ours;
} GATES[GATED] = {EACH_GATE(AS_ROW)};

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

/* An address in the dynamic section: glibc's linker has made it absolute, some libcs have not. */
static const void *absolute(const struct object *object, ElfW(Addr) address) {
    return (const void *)(address < object->base ? object->base + address : address);
}

static int gate_of(const char *name) {
    int which = 0;
    while (which < GATED && strcmp(name, GATES[which].name) != 0) {
        which++;
    }
    return which;
}

static void find_in(const struct object *object, const ElfW(Rela) *first, size_t bytes, const ElfW(Sym) *symbols,
                    const char *names) {
    for (const ElfW(Rela) *each = first; each < first + bytes / sizeof *first; each++) {
        if (!IS_ENTRY(ELF64_R_TYPE(each->r_info)) || gate.count == MAX_ENTRIES) {
            continue;
        }
        const int which = gate_of(names + symbols[ELF64_R_SYM(each->r_info)].st_name);
        if (which != GATED) {
            const uintptr_t at = object->base + each->r_offset;
            gate.entries[gate.count++] = (struct entry){
                .at = (void *)at, /* NOLINT */
                .which = which,
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

/* Restores the first `count` entries, except those that the dynamic linker has filled in since. */
static void put_back(uint32_t count) {
    for (uint32_t n = 0; n < count; n++) {
        struct entry *entry = &gate.entries[n];
        function ours = GATES[entry->which].ours;
        /* If it is not writable, or was up at a fork without `before`, the entry passes all calls on. */
        if (entry->before != NULL && writable(entry, true)) {
            (void)atomic_compare_exchange_strong(entry->at, &ours, entry->before);
            (void)writable(entry, false);
        }
    }
}

int kc_gate_up(const char *object_name, const char *cupti, char *error, size_t error_bytes) {
    if (is_up()) {
        return refuse(KC_ORDER, error, error_bytes, "Kineto is being kept off CUPTI already");
    }
    void *library = dlopen(cupti, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (gate.count == 0) {
        struct object object = {.name = object_name};
        (void)dl_iterate_phdr(look, &object);
        if (object.found) {
            find_entries(&object);
        }
        if (gate.count == 0) {
            return KC_GATE_NOTHING;
        }
    }
    for (uint32_t n = 0; n < gate.count; n++) {
        const int which = gate.entries[n].which;
        void *real = library == NULL ? NULL : dlsym(library, GATES[which].name);
        if (real == NULL) {
            snprintf(error, error_bytes, "the loaded libcupti has no %s", GATES[which].name);
            return KC_LIBRARY;
        }
        atomic_store(&gate.real[which], *(function *)&real);
    }
    atomic_store(&gate.kept_off, 0);
    atomic_store(&gate.process, getpid());
    atomic_store(&gate.thread, (pid_t)syscall(SYS_gettid));
    for (uint32_t n = 0; n < gate.count; n++) {
        struct entry *entry = &gate.entries[n];
        if (!writable(entry, true)) {
            const int number = errno;
            put_back(n);
            atomic_store(&gate.thread, 0);
            return refuse_system(error, error_bytes, "mprotect", number);
        }
        function before = atomic_exchange(entry->at, GATES[entry->which].ours);
        entry->before = before == GATES[entry->which].ours ? entry->before : before; /* otherwise it was up at a fork */
        (void)writable(entry, false);
    }
    return 0;
}

uint64_t kc_gate_down(void) {
    put_back(gate.count);
    atomic_store(&gate.thread, 0);
    return atomic_load(&gate.kept_off);
}
