/* Theory of operation
 *   rocprofiler's own records of calls have neither arguments nor streams. Its callbacks do: they mark where a launch
 *   begins and ends, and pass the arguments, whose places in the call's structure are in hip_arguments.h. One record is
 *   pushed when a call ends.
 *
 *   The start time of a call is stored in the word that rocprofiler keeps for each call and client (`user`), so no
 *   per-thread state is needed. It is 0 for calls that began before the recording.
 *
 *   A kernel whose code was loaded before us has the kernel id 0 in dispatches, or one whose name we never get. HIP
 *   itself knows the name of a launched function: it is queried once for each function, after the launch has succeeded,
 *   so that nothing is loaded because of us. The key of a name is a hash of its text. Known functions are in a
 *   lock-free table, each entry valid for one epoch: a recording begins a new one, and so does the unloading of a
 *   module, after which another function may have the same address.
 *
 * Threads: hip_call_made runs on every thread of the program that calls HIP, inside the call; hip_calls_tell on the
 *   collector's; the rest on the agent's.
 * Blocks: never: no lock, no allocation. HIP's own look-up of a name takes HIP's lock, which no caller of ours holds.
 */
#define _GNU_SOURCE
#include "rocprofiler/hip_calls.h"

#include <dlfcn.h>
#include <fnmatch.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "common/wake.h"
#include "rocprofiler/hip_arguments.h"

#define FUNCTIONS 16384u /* a power of two; at most that many kernels are named by their launches */
#define PROBES 8u
#define ARGUMENTS_OFFSET 8u /* in the payload, after its size */
#define RESULT_BYTES 24u    /* at the end of the payload: the union of all results, an int32_t first */
#define EPOCH_SHIFT 48u     /* addresses have 47 bits */

/* Calls that put work on the device or wait for it, and those that may stop the device to allocate. */
static const char *const RUNTIME_CALLS[] = {
    "hipLaunch*",          "hipExtLaunch*",   "hipExtModuleLaunch*", "hipHccModuleLaunch*",
    "hipModuleLaunch*",    "hipDrvLaunch*",   "hipGraphLaunch*",     "hipMemcpy*",
    "hipDrvMemcpy*",       "hipMemset*",      "hipMemPrefetchAsync", "*Synchronize*",
    "hipStreamWaitEvent*", "hipEventRecord*", "hipMalloc",           "hipFree",
    "hipHostMalloc",       "hipHostFree",     "hipMallocManaged",    "hipModuleUnload",
};
/* All allocations, if requested. */
static const char *const MEMORY_CALLS[] = {"hipMalloc*", "hipFree*", "hipExtMalloc*", "hipHostAlloc*", "hipMem*Alloc*"};
/* Code loading; not the calls that the compiler adds to each launch. */
static const char *const COMPILER_CALLS[] = {"__hipRegister*", "__hipUnregister*"};

enum { UNLOADS = 1, LAUNCHES = 2, ALLOCATES_ONLY = 4 }; /* of an operation */

struct operation {
    int16_t stream; /* byte offset in the arguments; -1: none */
    int16_t function;
    uint8_t named_by; /* hip_named_by */
    uint8_t flags;
};

typedef const char *(*name_of_function)(void *function);
typedef const char *(*name_of_host_function)(const void *function, void *stream);

struct function { /* the hash is valid if both tags are the same */
    _Atomic uint64_t tag;
    _Atomic uint64_t hash;
    _Atomic uint64_t tag_again;
};

static struct {
    struct operation operations[HIP_OPERATIONS_MOST];
    struct hip_operations *runtime, *compiler;
    const struct rocp_api *api;
    name_of_function name_of;
    name_of_host_function name_of_host;
    const struct kit_host *host;
    uint32_t space;
    _Atomic bool recording;
    _Atomic bool dead;
    bool all_allocations;
    _Atomic uint64_t made, launches;
    _Atomic uint64_t epoch;
    struct function functions[FUNCTIONS];
} calls;

/* ---- which calls ---- */

static bool matches(const char *name, const char *const *patterns, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (fnmatch(patterns[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

#define MATCHES(name, patterns) matches(name, patterns, sizeof(patterns) / sizeof *(patterns))

static void describe_operation(struct operation *operation, const char *name, bool always) {
    *operation = (struct operation){.stream = -1, .function = -1};
    for (size_t i = 0; i < sizeof HIP_ARGUMENTS / sizeof *HIP_ARGUMENTS; i++) {
        if (strcmp(HIP_ARGUMENTS[i].name, name) == 0) {
            operation->stream = HIP_ARGUMENTS[i].stream;
            operation->function = HIP_ARGUMENTS[i].function;
            operation->named_by = HIP_ARGUMENTS[i].named_by;
            operation->flags |= HIP_ARGUMENTS[i].named_by != HIP_UNNAMED ? LAUNCHES : 0;
        }
    }
    operation->flags |= strcmp(name, "hipModuleUnload") == 0 ? UNLOADS : 0;
    operation->flags |= always ? 0 : ALLOCATES_ONLY;
}

static int choose(int kind, int32_t number, void *chosen) {
    struct hip_operations *operations = chosen;
    const bool compiler = kind == ROCP_CALLBACK_HIP_COMPILER;
    const char *name = NULL;
    if (number < 0 || number >= (int32_t)HIP_OPERATIONS_MOST || operations->count == HIP_OPERATIONS_MOST ||
        calls.api->callback_operation_name(kind, number, &name, NULL) != ROCP_SUCCESS || name == NULL) {
        return 0;
    }
    const bool always = compiler ? MATCHES(name, COMPILER_CALLS) : MATCHES(name, RUNTIME_CALLS);
    if (always || (!compiler && MATCHES(name, MEMORY_CALLS))) {
        operations->numbers[operations->count++] = number;
        if (!compiler) {
            describe_operation(&calls.operations[number], name, always);
        }
    }
    return 0;
}

static int find_hip(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "/libamdhip64.so") == NULL) {
        return 0;
    }
    *(const char **)found = info->dlpi_name;
    return 1;
}

static void find_names(void) {
    const char *path = NULL;
    (void)dl_iterate_phdr(find_hip, &path);
    void *library = path == NULL ? NULL : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) {
        *(void **)&calls.name_of = dlsym(library, "hipKernelNameRef");
        *(void **)&calls.name_of_host = dlsym(library, "hipKernelNameRefByPtr");
        dlclose(library); /* the program has loaded it, and the code stays */
    }
}

void hip_calls_choose(const struct rocp_api *api, struct hip_operations *runtime, struct hip_operations *compiler) {
    calls.api = api;
    calls.runtime = runtime;
    calls.compiler = compiler;
    runtime->count = compiler->count = 0;
    (void)api->each_callback_operation(ROCP_CALLBACK_HIP_RUNTIME, choose, runtime);
    (void)api->each_callback_operation(ROCP_CALLBACK_HIP_COMPILER, choose, compiler);
}

static void tell(const struct rocp_api *api, const struct kit_host *host, uint32_t space, int kind, uint64_t key,
                 const struct hip_operations *operations) {
    for (uint32_t i = 0; i < operations->count; i++) {
        const char *name = NULL;
        if (api->callback_operation_name(kind, operations->numbers[i], &name, NULL) == ROCP_SUCCESS && name != NULL) {
            (void)host->add_text(space, key << 32 | (uint32_t)operations->numbers[i], name, (uint32_t)strlen(name));
        }
    }
}

void hip_calls_tell(const struct rocp_api *api, const struct kit_host *host, uint32_t space) {
    tell(api, host, space, ROCP_CALLBACK_HIP_RUNTIME, HIP_RUNTIME_CALL, calls.runtime);
    tell(api, host, space, ROCP_CALLBACK_HIP_COMPILER, HIP_COMPILER_CALL, calls.compiler);
}

/* ---- a recording ---- */

void hip_calls_begin(const struct kit_host *host, uint32_t functions, bool all_allocations) {
    calls.host = host;
    calls.space = functions;
    calls.all_allocations = all_allocations;
    atomic_store(&calls.made, 0);
    atomic_store(&calls.launches, 0);
    atomic_fetch_add(&calls.epoch, 1);
    if (calls.name_of == NULL) {
        find_names(); /* HIP may have been loaded in the meantime */
    }
    atomic_store(&calls.recording, true);
}

void hip_calls_end(void) { atomic_store(&calls.recording, false); }
void hip_calls_kill(void) { atomic_store(&calls.dead, true); }
uint64_t hip_calls_made(void) { return atomic_load(&calls.made); }
uint64_t hip_calls_launches(void) { return atomic_load(&calls.launches); }

/* ---- names of launched kernels ---- */

static uint64_t hash_of(const char *text, uint32_t *length) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    uint32_t at = 0;
    for (; text[at] != 0 && at < KIT_TEXT_BYTES_MOST; at++) {
        hash = (hash ^ (uint8_t)text[at]) * 0x100000001b3u;
    }
    *length = at;
    return hash == 0 ? 1 : hash;
}

static const char *ask_hip(const struct operation *operation, uint64_t function, uint64_t stream) {
    void *address = (void *)(uintptr_t)function; /* NOLINT: HIP's own */
    if (operation->named_by == HIP_BY_FUNCTION) {
        return calls.name_of == NULL ? NULL : calls.name_of(address);
    }
    return calls.name_of_host == NULL ? NULL : calls.name_of_host(address, (void *)(uintptr_t)stream); /* NOLINT */
}

static uint64_t name_function(const struct operation *operation, uint64_t function, uint64_t stream) {
    const uint64_t tag = function | atomic_load(&calls.epoch) << EPOCH_SHIFT;
    uint64_t slot = (function >> 4) * 0x9e3779b97f4a7c15u >> 50;
    struct function *place = NULL;
    for (uint32_t i = 0; i < PROBES; i++, slot = (slot + 1) % FUNCTIONS) {
        struct function *entry = &calls.functions[slot % FUNCTIONS];
        const uint64_t found = atomic_load(&entry->tag);
        if (found == tag) {
            const uint64_t hash = atomic_load(&entry->hash);
            if (atomic_load(&entry->tag_again) == tag && atomic_load(&entry->tag) == tag) {
                return hash;
            }
        } else if (place == NULL && found >> EPOCH_SHIFT != tag >> EPOCH_SHIFT) {
            place = entry; /* of an earlier epoch, or free */
        }
    }
    uint32_t length = 0;
    const char *name = ask_hip(operation, function, stream);
    const uint64_t hash = name == NULL ? 0 : hash_of(name, &length);
    if (hash == 0 || !calls.host->add_text(calls.space, hash, name, length)) {
        return 0;
    }
    uint64_t before = place == NULL ? 0 : atomic_load(&place->tag);
    if (place != NULL && before >> EPOCH_SHIFT != tag >> EPOCH_SHIFT &&
        atomic_compare_exchange_strong(&place->tag, &before, tag)) {
        atomic_store(&place->hash, hash);
        atomic_store(&place->tag_again, tag);
    }
    return hash;
}

/* ---- one call ---- */

static uint64_t word_at(const uint8_t *payload, uint64_t size, int16_t offset) {
    uint64_t value = 0;
    if (offset >= 0 && ARGUMENTS_OFFSET + (uint64_t)offset + sizeof value + RESULT_BYTES <= size) {
        memcpy(&value, payload + ARGUMENTS_OFFSET + offset, sizeof value);
    }
    return value;
}

static bool succeeded(const uint8_t *payload, uint64_t size) {
    int32_t result = -1;
    if (size >= ARGUMENTS_OFFSET + RESULT_BYTES) {
        memcpy(&result, payload + size - RESULT_BYTES, sizeof result);
    }
    return result == 0;
}

static void look_at_arguments(struct hip_call *call, const struct operation *operation, const uint8_t *payload) {
    uint64_t size = 0;
    memcpy(&size, payload, sizeof size);
    call->stream = word_at(payload, size, operation->stream);
    const uint64_t function = word_at(payload, size, operation->function);
    if (function != 0 && function >> (EPOCH_SHIFT - 1) == 0 && succeeded(payload, size)) {
        call->function = name_function(operation, function, call->stream);
    }
}

void hip_call_made(struct rocp_callback_record record, uint64_t *user, void *data) {
    static const struct operation PLAIN = {.stream = -1, .function = -1};
    (void)data;
    if (!atomic_load_explicit(&calls.recording, memory_order_acquire) || atomic_load(&calls.dead)) {
        return;
    }
    if (record.phase == ROCP_PHASE_ENTER) {
        *user = (uint64_t)clock_ns(CLOCK_BOOTTIME);
        return;
    }
    if (record.phase != ROCP_PHASE_EXIT || *user == 0 || record.operation < 0 ||
        record.operation >= (int32_t)HIP_OPERATIONS_MOST) {
        return;
    }
    const bool compiler = record.kind == ROCP_CALLBACK_HIP_COMPILER;
    const struct operation *operation = compiler ? &PLAIN : &calls.operations[record.operation];
    struct hip_call call = {.start = *user,
                            .end = (uint64_t)clock_ns(CLOCK_BOOTTIME),
                            .correlation = record.correlation,
                            .thread = (uint32_t)record.thread,
                            .operation = (uint32_t)record.operation};
    if (operation->flags & UNLOADS) {
        atomic_fetch_add(&calls.epoch, 1);
    }
    if (operation->flags & ALLOCATES_ONLY && !calls.all_allocations) {
        return;
    }
    if (record.payload != NULL && (operation->stream >= 0 || operation->function >= 0)) {
        look_at_arguments(&call, operation, record.payload);
    }
    atomic_fetch_add_explicit(&calls.made, 1, memory_order_relaxed);
    if (operation->flags & LAUNCHES) {
        atomic_fetch_add_explicit(&calls.launches, 1, memory_order_relaxed);
    }
    (void)calls.host->push(compiler ? HIP_COMPILER_CALL : HIP_RUNTIME_CALL, &call, sizeof call);
}
