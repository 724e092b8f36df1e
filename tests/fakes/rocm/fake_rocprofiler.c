/* A librocprofiler-sdk without a GPU: the exact ABI of every function that the agent uses, and how each version behaves.
 *
 * Theory of operation
 *   Written after the library's public source; what differs between versions is asked of `sdk.version`
 *   (10000 * major + 100 * minor + patch):
 *
 *     below 1.3.0   rocprofiler_force_configure says CONFIGURATION_LOCKED once anything has been configured, and does
 *                   not reach a runtime that has registered before: nothing is ever recorded of it, silently
 *     1.3.0, 1.3.1  likewise locked; but runtimes that have registered are replayed
 *     1.3.2 on      anybody may configure at any time; each function once
 *     after 1.3.5   dispatch records have 192 bytes instead of 184
 *
 *   Buffers have two halves, of which the policy DISCARD allocates only the first: what comes after the first flush is
 *   lost and not counted, as in the real library. LOSSLESS makes producers wait while both halves are full, and before
 *   1.3.0 also while a callback runs. Kernels loaded before a runtime's tables were wrapped have the kernel id 0.
 *
 *   This file: registration, contexts, services, agents. fake_rocprofiler_buffers.c: buffers and callback threads.
 *   fake_rocprofiler_trace.c: what the runtimes' wrapped functions do, and the thread that completes work.
 */
#define _GNU_SOURCE
#include "fake_rocprofiler.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE_START 10300
#define ANYTIME 10302

struct sdk sdk = {.mutex = PTHREAD_MUTEX_INITIALIZER, .version = 10305};

static const struct {
    const char *name;
    long *value;
} KEYS[] = {
    {"version", &sdk.version},
    {"hang_ms", &sdk.hang_ms},
    {"extra_dispatch_bytes", &sdk.extra_dispatch_bytes},
    {"shifted_kinds", &sdk.shifted_kinds},
    {"deaf_again", &sdk.deaf_again},
    {"busy_flushes", &sdk.busy_flushes},
    {"start_delay_ms", &sdk.start_delay_ms},
    {"flush_delay_ms", &sdk.flush_delay_ms},
    {"old_register", &sdk.old_register},
};

/* ---- controls ---- */

EXPORT int fake_rocprofiler_set(const char *key, long value) {
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        if (strcmp(KEYS[i].name, key) == 0) {
            __atomic_store_n(KEYS[i].value, value, __ATOMIC_SEQ_CST);
            return 0;
        }
    }
    return -1;
}

EXPORT uint64_t fake_rocprofiler_emitted(int kind) { return __atomic_load_n(&sdk.emitted[kind], __ATOMIC_SEQ_CST); }
EXPORT uint64_t fake_rocprofiler_misused(void) { return __atomic_load_n(&sdk.misused, __ATOMIC_SEQ_CST); }
EXPORT uint64_t fake_rocprofiler_lost(void) { return __atomic_load_n(&sdk.lost, __ATOMIC_SEQ_CST); }
EXPORT uint64_t fake_rocprofiler_blocked_ns(void) { return __atomic_load_n(&sdk.blocked_ns, __ATOMIC_SEQ_CST); }
EXPORT int fake_rocprofiler_clients(void) { return (int)sdk.client_count; }

EXPORT int fake_rocprofiler_active(void) {
    int active = 0;
    for (size_t i = 0; i < CONTEXTS; i++) {
        active += __atomic_load_n(&sdk.contexts[i].active, __ATOMIC_SEQ_CST);
    }
    return active;
}

__attribute__((constructor)) static void read_environment(void) {
    char *settings = strdup(getenv("KINETO_FAKE_ROCPROFILER") != NULL ? getenv("KINETO_FAKE_ROCPROFILER") : "");
    char *rest = settings;
    sdk.pid = getpid();
    for (char *pair = strsep(&rest, ","); pair != NULL; pair = strsep(&rest, ",")) {
        char *value = strchr(pair, '=');
        if (value != NULL) {
            *value = 0;
            if (fake_rocprofiler_set(pair, atol(value + 1)) != 0) {
                fprintf(stderr, "KINETO_FAKE_ROCPROFILER: unknown key %s\n", pair);
                abort();
            }
        }
    }
    free(settings);
}

static void misuse_in_child(void) {
    if (getpid() != sdk.pid) {
        __atomic_fetch_add(&sdk.misused, 1, __ATOMIC_SEQ_CST);
    }
}

/* ---- registration ---- */

/* With one client, the function that is handed out ends the whole library, for good. */
static void finalize_client(struct client_id id) {
    (void)id;
    __atomic_fetch_add(&sdk.misused, 1, __ATOMIC_SEQ_CST);
    sdk.finalised = 1;
}

static void finalize(void) {
    if (sdk.finalised != 0 || getpid() != sdk.pid) {
        return;
    }
    sdk.finalised = -1;
    sdk_drain();
    for (uint32_t i = 0; i < sdk.client_count; i++) {
        if (sdk.clients[i].tool.finalize != NULL) {
            fprintf(stderr, "W fake_rocprofiler.c] invoking tool finalize for %s\n", sdk.clients[i].id.name);
            sdk.clients[i].tool.finalize(sdk.clients[i].tool.data);
        }
    }
    for (size_t i = 0; i < CONTEXTS; i++) {
        __atomic_store_n(&sdk.contexts[i].active, false, __ATOMIC_SEQ_CST);
    }
    sdk_join_groups();
    sdk.finalised = 1;
}

static struct client *add_client(configure_fn configure) {
    for (uint32_t i = 0; i < sdk.client_count; i++) {
        if (sdk.clients[i].configure == configure) {
            return NULL;
        }
    }
    struct client *client = &sdk.clients[sdk.client_count];
    *client = (struct client){.configure = configure, .id = {sizeof client->id, NULL, 77 + sdk.client_count}};
    sdk.client_count++;
    return client;
}

static void configure_client(uint32_t index) {
    struct client *client = &sdk.clients[index];
    const struct tool *tool = client->configured ? NULL
                                                 : client->configure((uint32_t)sdk.version, "fake", index, &client->id);
    client->configured = true;
    if (tool != NULL) {
        client->tool = *tool;
        sdk.configuring = index;
        if (tool->initialize != NULL) {
            (void)tool->initialize(finalize_client, tool->data);
        }
    }
}

static void find_clients(void) {
    char *libraries = strdup(getenv("ROCP_TOOL_LIBRARIES") != NULL ? getenv("ROCP_TOOL_LIBRARIES") : "");
    char *rest = libraries;
    const bool list = strchr(libraries, ':') != NULL;
    for (char *path = strsep(&rest, ":"); path != NULL; path = strsep(&rest, ":")) {
        if (*path == 0 || (list && rest == NULL)) {
            continue; /* the last entry of a list is dropped */
        }
        void *library = dlopen(path, RTLD_LOCAL | RTLD_LAZY);
        if (library == NULL) {
            fprintf(stderr, "F fake_rocprofiler.c] error dlopening '%s'\n", path);
            abort();
        }
        void *found = dlsym(library, "rocprofiler_configure");
        if (found != NULL) {
            (void)add_client((configure_fn)(uintptr_t)found);
        }
    }
    free(libraries);
    void *exported = dlsym(RTLD_DEFAULT, "rocprofiler_configure");
    if (exported != NULL) {
        (void)add_client((configure_fn)(uintptr_t)exported);
    }
}

static void initialize(void) {
    if (sdk.initialised != 0) {
        return;
    }
    setenv("ROCPROFILER_REGISTER_LIBRARY", "librocprofiler-sdk.so.1", 1);
    sdk.initialised = -1;
    (void)atexit(finalize);
    find_clients();
    for (uint32_t i = 0; i < sdk.client_count; i++) {
        configure_client(i);
    }
    sdk.initialised = 1;
}

static int replay(void) {
    int (*again)(void);
    *(void **)&again = sdk.old_register ? NULL : dlsym(RTLD_DEFAULT, "rocprofiler_register_invoke_all_registrations");
    return again == NULL ? INCOMPATIBLE_REGISTER : again() != 0 ? ERROR : OK;
}

EXPORT int rocprofiler_force_configure(configure_fn configure) {
    misuse_in_child();
    if (sdk.finalised != 0) {
        return FINALIZED;
    }
    if (sdk.version < ANYTIME && sdk.initialised != 0) {
        return CONFIGURATION_LOCKED;
    }
    if (sdk.initialised < 0) {
        __atomic_fetch_add(&sdk.misused, 1, __ATOMIC_SEQ_CST);
    }
    if (add_client(configure) == NULL) {
        return OK;
    }
    if (sdk.initialised > 0) {
        sdk.initialised = -1;
        configure_client(sdk.client_count - 1);
        sdk.initialised = 1;
        return replay();
    }
    setenv("ROCPROFILER_REGISTER_FORCE_LOAD", "1", 1);
    initialize();
    if (sdk.version >= LATE_START) {
        (void)replay();
    }
    return OK;
}

/* tables: the place of the runtime's hooks. */
EXPORT int rocprofiler_set_api_table(const char *name, uint64_t version, uint64_t instance, void **tables,
                                     uint64_t count) {
    (void)name, (void)version, (void)instance, (void)count;
    if (sdk.finalised != 0) {
        return 0;
    }
    initialize();
    if (sdk.client_count > 0) {
        __atomic_store_n((struct fake_hooks **)tables[0], &sdk_hooks, __ATOMIC_SEQ_CST);
    }
    return 0;
}

EXPORT int rocprofiler_is_initialized(int *status) {
    *status = sdk.initialised;
    return OK;
}

EXPORT int rocprofiler_is_finalized(int *status) {
    *status = sdk.finalised;
    return OK;
}

EXPORT int rocprofiler_get_version(uint32_t *major, uint32_t *minor, uint32_t *patch) {
    *major = (uint32_t)sdk.version / 10000;
    *minor = (uint32_t)sdk.version / 100 % 100;
    *patch = (uint32_t)sdk.version % 100;
    return OK;
}

EXPORT int rocprofiler_get_timestamp(uint64_t *time) {
    *time = fake_boottime_ns();
    return OK;
}

EXPORT const char *rocprofiler_get_status_string(int status) {
    switch (status) {
    case OK: return "Success";
    case CONTEXT_NOT_FOUND: return "No valid context for given context id";
    case BUFFER_BUSY: return "Buffer is busy";
    case CONFIGURATION_LOCKED: return "Configuration is locked";
    case FINALIZED: return "Finalized";
    default: return "Error";
    }
}

/* ---- contexts and services ---- */

static struct context *context_of(uint64_t id) {
    return id >= FIRST_CONTEXT && id < FIRST_CONTEXT + CONTEXTS && sdk.contexts[id - FIRST_CONTEXT].used
               ? &sdk.contexts[id - FIRST_CONTEXT]
               : NULL;
}

EXPORT int rocprofiler_create_context(uint64_t *id) {
    if (sdk.initialised >= 0) {
        return CONFIGURATION_LOCKED;
    }
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        if (!sdk.contexts[i].used) {
            sdk.contexts[i].used = true;
            sdk.contexts[i].client = sdk.configuring;
            *id = FIRST_CONTEXT + i;
            return OK;
        }
    }
    return ERROR;
}

EXPORT int rocprofiler_context_is_valid(uint64_t id, int *status) {
    *status = context_of(id) != NULL;
    return *status ? OK : CONTEXT_NOT_FOUND;
}

EXPORT int rocprofiler_context_is_active(uint64_t id, int *status) {
    const struct context *context = context_of(id);
    *status = context != NULL && context->active;
    return context != NULL ? OK : CONTEXT_NOT_FOUND;
}

EXPORT int rocprofiler_start_context(uint64_t id) {
    struct context *context = context_of(id);
    misuse_in_child();
    if (sdk.finalised != 0) {
        return FINALIZED;
    }
    if (context == NULL) {
        return CONTEXT_NOT_FOUND;
    }
    usleep((useconds_t)sdk.start_delay_ms * 1000);
    if (context->buffered[BUF_KERNEL_DISPATCH].on && sdk.hang_ms > 0) {
        sdk_stall(sdk.hang_ms);
    }
    context->starts++;
    __atomic_store_n(&context->active, true, __ATOMIC_SEQ_CST);
    return OK;
}

EXPORT int rocprofiler_stop_context(uint64_t id) {
    struct context *context = context_of(id);
    misuse_in_child();
    if (context == NULL) {
        return CONTEXT_NOT_FOUND;
    }
    __atomic_store_n(&context->active, false, __ATOMIC_SEQ_CST);
    return OK;
}

static int choose_operations(struct service *service, const int32_t *operations, size_t count) {
    service->all = count == 0;
    for (size_t i = 0; i < count; i++) {
        if (operations[i] < 0 || operations[i] >= (int32_t)OPERATIONS) {
            return OPERATION_NOT_FOUND;
        }
        service->operations[operations[i]] = 1;
    }
    service->on = true;
    return OK;
}

EXPORT int rocprofiler_configure_callback_tracing_service(uint64_t id, int kind, const int32_t *operations,
                                                          size_t count, callback_fn callback, void *data) {
    struct context *context = context_of(id);
    if (sdk.initialised >= 0) {
        return CONFIGURATION_LOCKED;
    }
    if (context == NULL || kind <= 0 || kind >= CB_KINDS) {
        return context == NULL ? CONTEXT_NOT_FOUND : KIND_NOT_FOUND;
    }
    if (context->callbacks[kind].on) {
        return ALREADY_CONFIGURED;
    }
    context->callbacks[kind].callback = callback;
    context->callbacks[kind].data = data;
    return choose_operations(&context->callbacks[kind], operations, count);
}

EXPORT int rocprofiler_configure_buffer_tracing_service(uint64_t id, int kind, const int32_t *operations, size_t count,
                                                        uint64_t buffer) {
    struct context *context = context_of(id);
    if (sdk.initialised >= 0) {
        return CONFIGURATION_LOCKED;
    }
    if (context == NULL || kind <= 0 || kind >= BUF_KINDS) {
        return context == NULL ? CONTEXT_NOT_FOUND : KIND_NOT_FOUND;
    }
    if (buffer < FIRST_BUFFER || buffer >= FIRST_BUFFER + sdk.buffer_count) {
        return BUFFER_NOT_FOUND;
    }
    if (context->buffered[kind].on) {
        return ALREADY_CONFIGURED;
    }
    context->buffered[kind].buffer = buffer;
    return choose_operations(&context->buffered[kind], operations, count);
}

/* ---- names and agents ---- */

static int answer(const char *found, const char **name, uint64_t *length, int otherwise) {
    if (name != NULL) {
        *name = found;
    }
    if (length != NULL) {
        *length = found == NULL ? 0 : strlen(found);
    }
    return found == NULL ? otherwise : OK;
}

EXPORT int rocprofiler_query_callback_tracing_kind_name(int kind, const char **name, uint64_t *length) {
    return answer(sdk_callback_kind_name(kind), name, length, KIND_NOT_FOUND);
}

EXPORT int rocprofiler_query_buffer_tracing_kind_name(int kind, const char **name, uint64_t *length) {
    return answer(sdk_buffer_kind_name(kind), name, length, KIND_NOT_FOUND);
}

EXPORT int rocprofiler_query_callback_tracing_kind_operation_name(int kind, int32_t operation, const char **name,
                                                                  uint64_t *length) {
    return answer(sdk_operation_name(false, kind, operation), name, length, OPERATION_NOT_FOUND);
}

EXPORT int rocprofiler_query_buffer_tracing_kind_operation_name(int kind, int32_t operation, const char **name,
                                                                uint64_t *length) {
    return answer(sdk_operation_name(true, kind, operation), name, length, OPERATION_NOT_FOUND);
}

static int iterate(bool buffered, int kind, kind_operation_fn callback, void *data) {
    for (int32_t operation = 0; operation < (int32_t)OPERATIONS; operation++) {
        if (sdk_operation_name(buffered, kind, operation) != NULL && callback(kind, operation, data) != 0) {
            break;
        }
    }
    return OK;
}

EXPORT int rocprofiler_iterate_callback_tracing_kind_operations(int kind, kind_operation_fn callback, void *data) {
    return iterate(false, kind, callback, data);
}

EXPORT int rocprofiler_iterate_buffer_tracing_kind_operations(int kind, kind_operation_fn callback, void *data) {
    return iterate(true, kind, callback, data);
}

EXPORT int rocprofiler_query_available_agents(int version, agents_fn callback, size_t bytes, void *data) {
    static const struct agent_v0 AGENTS[] = {
        {.size = sizeof(struct agent_v0),
         .id = 11,
         .type = AGENT_CPU,
         .name = "AMD EPYC",
         .vendor_name = "CPU",
         .product_name = "AMD EPYC 9534",
         .model_name = "",
         .node_id = 0},
        {.size = sizeof(struct agent_v0),
         .id = 21,
         .type = AGENT_GPU,
         .name = "gfx942",
         .vendor_name = "AMD",
         .product_name = "AMD Instinct MI300X",
         .model_name = "",
         .node_id = 1,
         .logical_node_id = 1,
         .logical_node_type_id = 0,
         .location_id = 0xc100,
         .cus = 304,
         .wavefront = 64,
         .lds_kb = 64,
         .gfx_target_version = 90402,
         .memory_bytes = 206141652992,
         .gpu_mhz = 2100,
         .waves_per_cu = 32,
         .simds_per_cu = 4,
         .xccs = 8,
         .vendor_id = 0x1002,
         .device_id = 0x74a1,
         .visibility = 7},
        {.size = sizeof(struct agent_v0),
         .id = 22,
         .type = AGENT_GPU,
         .name = "gfx942",
         .vendor_name = "AMD",
         .product_name = "AMD Instinct MI300X",
         .model_name = "",
         .node_id = 2,
         .logical_node_id = 2,
         .logical_node_type_id = 1,
         .location_id = 0xc000,
         .cus = 304,
         .wavefront = 64,
         .lds_kb = 64,
         .gfx_target_version = 90402,
         .memory_bytes = 206141652992,
         .gpu_mhz = 2100,
         .waves_per_cu = 32,
         .simds_per_cu = 4,
         .xccs = 8,
         .vendor_id = 0x1002,
         .device_id = 0x74a1,
         .visibility = 7},
    };
    const void *agents[] = {&AGENTS[0], &AGENTS[1], &AGENTS[2]};
    if (version != 1 || bytes > sizeof(struct agent_v0)) {
        return INCOMPATIBLE_ABI;
    }
    return callback(version, agents, 3, data);
}
