/* Theory of operation
 *   rocprofiler configures a client only once: contexts, services and buffers can be made only while it calls the
 *   client's initialize function, once in the life of a process. So everything that any recording may need is
 *   configured at the first one, in separate contexts, which are then started and stopped. The contexts are never
 *   finalised: with a single client that would end rocprofiler for the whole process.
 *
 *   Buffers: with the policy DISCARD rocprofiler allocates only one of a buffer's two halves, and records after the
 *   first flush are lost without being counted (its buffer.cpp, from 1.0.0 to today). So the policy is LOSSLESS: a
 *   producer, which is a thread of rocprofiler's or HSA's for all records but those of allocations, waits while both
 *   halves are full. Each is emptied by a memcpy into the arena, which never waits: records that find no room there are
 *   dropped and counted. rocprofiler keeps a header of 16 bytes for each byte of a half, and clears them at each flush;
 *   hence the moderate size.
 *
 *   The configuration includes nothing that makes rocprofiler put its own queues before the program's (counters, thread
 *   traces, PC sampling, HIP graphs).
 *
 *   No finalize function is registered: rocprofiler announces those on the program's standard error when the process
 *   exits. The kit's handler, registered after rocprofiler's and hence run before it, flushes instead.
 *
 * Threads: client_configure, client_start and client_stop run on the agent's; on_records on a thread of rocprofiler's
 *   that serves only us, with signals blocked; on_code_object on the thread that loads code; client_flush on the
 *   collector's.
 * Blocks: client_flush waits for on_records. The callbacks never wait.
 */
#define _GNU_SOURCE
#include "rocprofiler/rocprofiler_client.h"

#include <fnmatch.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "common/own_threads.h"
#include "rocprofiler/hip_calls.h"
#include "rocprofiler/kernel_ids.h"

#define BUFFER_BYTES (512u << 10) /* a half: 2,800 dispatches; 8 MiB of headers */
#define WATERMARK_BYTES (BUFFER_BYTES / 4 * 3)
#define HSA_OPERATIONS_MOST 128u

/* HSA has calls for each packet put into a queue. These are the calls that take time. */
static const char *const HSA_CALLS[] = {
    "hsa_memory_allocate",
    "hsa_memory_free",
    "hsa_memory_copy",
    "hsa_queue_create",
    "hsa_queue_destroy",
    "hsa_executable_load*",
    "hsa_executable_freeze",
    "hsa_signal_wait_*",
    "hsa_amd_memory_pool_alloc*",
    "hsa_amd_memory_pool_free",
    "hsa_amd_memory_async_copy*",
    "hsa_amd_memory_lock*",
    "hsa_amd_memory_unlock",
    "hsa_amd_queue_create",
    "hsa_amd_vmem_*",
    "hsa_amd_agents_allow_access",
};

/* Sizes of records by kind, as in the decoder's rocprofiler_layouts.py. */
static const struct {
    uint32_t kind;
    uint32_t sizes[2];
} RECORD_SIZES[] = {
    {ROCP_BUFFER_HSA_CORE, {64, 64}},       {ROCP_BUFFER_HSA_AMD_EXT, {64, 64}},
    {ROCP_BUFFER_MEMORY_COPY, {96, 96}},    {ROCP_BUFFER_KERNEL_DISPATCH, {184, 192}},
    {ROCP_BUFFER_SCRATCH_MEMORY, {96, 96}}, {ROCP_BUFFER_MEMORY_ALLOCATION, {88, 88}},
};

struct hsa_operations {
    int32_t numbers[HSA_OPERATIONS_MOST];
    uint32_t count;
};

static struct {
    const struct rocp_api *api;
    bool asked, ready;
    int status; /* of the first function that failed */
    const char *step;
    uint64_t contexts[PARTS];
    bool started[PARTS];
    uint64_t buffer, thread;
    struct hip_operations hip_runtime, hip_compiler;
    struct hsa_operations hsa_core, hsa_extensions;
    const struct kit_host *_Atomic host;
    _Atomic bool dead;
    _Atomic uint64_t records, dispatches, dropped, dropped_told;
    _Atomic uint64_t alien_count, alien_first; /* kind << 48 | size */
} client;

static _Thread_local sigset_t signals_before;

/* ---- callbacks ---- */

static bool knows_size(uint32_t kind, uint64_t size) {
    for (size_t i = 0; i < sizeof RECORD_SIZES / sizeof *RECORD_SIZES; i++) {
        if (RECORD_SIZES[i].kind == kind) {
            return size == RECORD_SIZES[i].sizes[0] || size == RECORD_SIZES[i].sizes[1];
        }
    }
    return false;
}

static void on_records(uint64_t context, uint64_t buffer, struct rocp_header **headers, size_t count, void *data,
                       uint64_t dropped) {
    const struct kit_host *host = atomic_load(&client.host);
    uint64_t dispatches = 0, known = 0;
    (void)context, (void)buffer, (void)data;
    if (host == NULL || atomic_load(&client.dead)) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const struct rocp_header *header = headers[i];
        uint64_t size = 0;
        if (header->category != ROCP_CATEGORY_TRACING || header->payload == NULL) {
            continue;
        }
        memcpy(&size, header->payload, sizeof size);
        if (!knows_size(header->kind, size)) {
            uint64_t none = 0;
            (void)atomic_compare_exchange_strong(&client.alien_first, &none, (uint64_t)header->kind << 48 | size);
            atomic_fetch_add(&client.alien_count, 1);
            continue;
        }
        known++;
        dispatches += header->kind == ROCP_BUFFER_KERNEL_DISPATCH;
        (void)host->push(header->kind, header->payload, (uint32_t)size);
    }
    atomic_fetch_add(&client.records, known);
    atomic_fetch_add(&client.dispatches, dispatches);
    atomic_store(&client.dropped, dropped);
}

static void on_code_object(struct rocp_callback_record record, uint64_t *user, void *data) {
    const struct rocp_kernel_symbol *symbol = record.payload;
    (void)user, (void)data;
    if (record.operation == ROCP_KERNEL_SYMBOL && record.phase == ROCP_PHASE_ENTER && symbol != NULL &&
        symbol->size >= sizeof *symbol && symbol->name != NULL && !atomic_load(&client.dead)) {
        kernel_ids_add(symbol->kernel_id, symbol->name);
    }
}

static void before_thread(int library, void *data) {
    (void)library, (void)data;
    block_signals(&signals_before);
}

static void after_thread(int library, void *data) {
    (void)library, (void)data;
    pthread_sigmask(SIG_SETMASK, &signals_before, NULL);
}

/* ---- the configuration, made once ---- */

static bool succeeds(int status, const char *step) {
    if (status != ROCP_SUCCESS && client.status == ROCP_SUCCESS) {
        client.status = status;
        client.step = step;
    }
    return status == ROCP_SUCCESS;
}

static int choose_hsa(int kind, int32_t number, void *chosen) {
    struct hsa_operations *operations = chosen;
    const char *name = NULL;
    if (operations->count < HSA_OPERATIONS_MOST &&
        client.api->buffer_operation_name(kind, number, &name, NULL) == ROCP_SUCCESS && name != NULL) {
        for (size_t i = 0; i < sizeof HSA_CALLS / sizeof *HSA_CALLS; i++) {
            if (fnmatch(HSA_CALLS[i], name, 0) == 0) {
                operations->numbers[operations->count++] = number;
                break;
            }
        }
    }
    return 0;
}

static bool make_buffer(void) {
    const struct rocp_api *api = client.api;
    return succeeds(api->at_thread_create(before_thread, after_thread, ROCP_LIBRARY, NULL), "internal threads") &&
           succeeds(api->create_thread(&client.thread), "create_callback_thread") &&
           succeeds(api->create_buffer(client.contexts[PART_DISPATCHES], BUFFER_BYTES, WATERMARK_BYTES,
                                       ROCP_POLICY_LOSSLESS, on_records, NULL, &client.buffer),
                    "create_buffer") &&
           succeeds(api->assign_thread(client.buffer, client.thread), "assign_callback_thread");
}

static bool wish_for_records(enum client_part part, int kind, const struct hsa_operations *operations) {
    const int32_t *numbers = operations == NULL ? NULL : operations->numbers;
    const size_t count = operations == NULL ? 0 : operations->count;
    return (operations != NULL && count == 0) || /* none would mean all */
           succeeds(client.api->trace_by_buffer(client.contexts[part], kind, numbers, count, client.buffer),
                    "configure_buffer_tracing_service");
}

static bool wish_for_calls(enum client_part part, int kind, const struct hip_operations *operations) {
    return operations->count == 0 ||
           succeeds(client.api->trace_by_callback(client.contexts[part], kind, operations->numbers, operations->count,
                                                  hip_call_made, NULL),
                    "configure_callback_tracing_service");
}

static int initialize(rocp_finalize finalize, void *data) {
    static const int32_t NAMES[] = {ROCP_KERNEL_SYMBOL};
    const struct rocp_api *api = client.api;
    (void)finalize, (void)data;
    for (size_t i = 0; i < PARTS; i++) {
        if (!succeeds(api->create_context(&client.contexts[i]), "create_context")) {
            return -1;
        }
    }
    hip_calls_choose(api, &client.hip_runtime, &client.hip_compiler);
    (void)api->each_buffer_operation(ROCP_BUFFER_HSA_CORE, choose_hsa, &client.hsa_core);
    (void)api->each_buffer_operation(ROCP_BUFFER_HSA_AMD_EXT, choose_hsa, &client.hsa_extensions);
    client.ready = make_buffer() &&
                   succeeds(api->trace_by_callback(client.contexts[PART_KERNEL_NAMES], ROCP_CALLBACK_CODE_OBJECT, NAMES,
                                                   1, on_code_object, NULL),
                            "configure_callback_tracing_service") &&
                   wish_for_calls(PART_HIP_RUNTIME, ROCP_CALLBACK_HIP_RUNTIME, &client.hip_runtime) &&
                   wish_for_calls(PART_HIP_COMPILER, ROCP_CALLBACK_HIP_COMPILER, &client.hip_compiler) &&
                   wish_for_records(PART_DISPATCHES, ROCP_BUFFER_KERNEL_DISPATCH, NULL) &&
                   wish_for_records(PART_COPIES, ROCP_BUFFER_MEMORY_COPY, NULL) &&
                   wish_for_records(PART_ALLOCATIONS, ROCP_BUFFER_MEMORY_ALLOCATION, NULL) &&
                   wish_for_records(PART_SCRATCH, ROCP_BUFFER_SCRATCH_MEMORY, NULL) &&
                   wish_for_records(PART_HSA, ROCP_BUFFER_HSA_CORE, &client.hsa_core) &&
                   wish_for_records(PART_HSA, ROCP_BUFFER_HSA_AMD_EXT, &client.hsa_extensions) &&
                   succeeds(api->start_context(client.contexts[PART_KERNEL_NAMES]), "start_context");
    return client.ready ? 0 : -1;
}

static struct rocp_tool *be_asked(uint32_t version, const char *text, uint32_t priority, struct rocp_client *id) {
    static struct rocp_tool tool = {sizeof tool, initialize, NULL, NULL};
    (void)version, (void)text, (void)priority;
    client.asked = true;
    id->name = "kineto";
    return &tool;
}

static int find_rocprofiler(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "/librocprofiler-sdk.so") == NULL) {
        return 0;
    }
    *(const char **)found = info->dlpi_name;
    return 1;
}

struct rocp_tool *kc_rocprofiler_client(uint32_t version, const char *text, uint32_t priority, struct rocp_client *id) {
    static struct rocp_api api;
    const char *path = NULL;
    uint64_t known = 0;
    char error[256];
    (void)dl_iterate_phdr(find_rocprofiler, &path);
    if (client.asked || path == NULL || rocprofiler_api_open(&api, path, &known, error, sizeof error) != 0 ||
        known < ROCP_VERSION_LEAST || known >= ROCP_VERSION_BEYOND) {
        return NULL;
    }
    client.api = &api;
    return be_asked(version, text, priority, id);
}

int client_configure(const struct rocp_api *api, const struct kit_host *host, const char **step) {
    atomic_store(&client.host, host);
    if (!client.asked) {
        client.api = api;
        const int status = api->force_configure(be_asked);
        if (status != ROCP_SUCCESS) {
            *step = "rocprofiler_force_configure";
            return status;
        }
    }
    *step = client.step;
    return client.ready ? ROCP_SUCCESS : client.status != ROCP_SUCCESS ? client.status : -1;
}

bool client_configured(void) { return client.asked && client.ready; }

/* ---- recordings ---- */

int client_start(enum client_part part) {
    const int status = client.api->start_context(client.contexts[part]);
    client.started[part] = status == ROCP_SUCCESS;
    return status;
}

void client_stop(enum client_part part) {
    if (client.started[part]) {
        client.started[part] = false;
        (void)client.api->stop_context(client.contexts[part]);
    }
}

int client_flush(void) { return client.api->flush_buffer(client.buffer); }

void client_begin(const struct kit_host *host) {
    atomic_store(&client.host, host);
    atomic_store(&client.records, 0);
    atomic_store(&client.dispatches, 0);
    atomic_store(&client.alien_count, 0);
    atomic_store(&client.alien_first, 0);
}

uint64_t client_dispatches(void) { return atomic_load(&client.dispatches); }
uint64_t client_records(void) { return atomic_load(&client.records); }

uint64_t client_take_dropped(void) {
    const uint64_t dropped = atomic_load(&client.dropped);
    return dropped - atomic_exchange(&client.dropped_told, dropped);
}

struct client_alien client_alien(void) {
    const uint64_t first = atomic_load(&client.alien_first);
    return (struct client_alien){
        .count = atomic_load(&client.alien_count), .kind = (uint32_t)(first >> 48), .size = first & ((1ull << 48) - 1)};
}

static void tell_hsa(const struct kit_host *host, uint32_t space, int kind, const struct hsa_operations *operations) {
    for (uint32_t i = 0; i < operations->count; i++) {
        const char *name = NULL;
        if (client.api->buffer_operation_name(kind, operations->numbers[i], &name, NULL) == ROCP_SUCCESS &&
            name != NULL) {
            (void)host->add_text(space, (uint64_t)kind << 32 | (uint32_t)operations->numbers[i], name,
                                 (uint32_t)strlen(name));
        }
    }
}

void client_tell(const struct kit_host *host, uint32_t space) {
    tell_hsa(host, space, ROCP_BUFFER_HSA_CORE, &client.hsa_core);
    tell_hsa(host, space, ROCP_BUFFER_HSA_AMD_EXT, &client.hsa_extensions);
}

void client_kill(void) { atomic_store(&client.dead, true); }
