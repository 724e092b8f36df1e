/* The part of rocprofiler-sdk's public C interface that the fake library has, written from AMD's headers of 1.0.0.
 *
 * Written apart from what the agent declares (agent/native/rocprofiler/rocprofiler_api.h): a mistake made there is not
 * made here, too. tests/unit/agent/native/test_rocprofiler_abi.py compares both with the table of the decoder.
 */
#ifndef FAKE_ROCPROFILER_ABI_H
#define FAKE_ROCPROFILER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum {
    OK = 0,
    ERROR = 1,
    CONTEXT_NOT_FOUND = 2,
    BUFFER_NOT_FOUND = 3,
    KIND_NOT_FOUND = 4,
    OPERATION_NOT_FOUND = 5,
    THREAD_NOT_FOUND = 6,
    BUFFER_BUSY = 14,
    ALREADY_CONFIGURED = 15,
    CONFIGURATION_LOCKED = 16,
    INCOMPATIBLE_ABI = 18,
    INVALID_ARGUMENT = 19,
    FINALIZED = 21,
    INCOMPATIBLE_REGISTER = 43,
};

enum { PHASE_NONE, PHASE_ENTER, PHASE_EXIT };
enum { CATEGORY_TRACING = 1 };
enum { POLICY_DISCARD = 1, POLICY_LOSSLESS = 2 };
enum { AGENT_CPU = 1, AGENT_GPU = 2 };

/* Callback kinds and buffer kinds differ. */
enum { CB_HIP_RUNTIME = 5, CB_HIP_COMPILER = 6, CB_CODE_OBJECT = 10, CB_KINDS = 24 };
enum {
    BUF_HSA_CORE = 1,
    BUF_HSA_AMD_EXT = 2,
    BUF_HIP_RUNTIME = 5,
    BUF_HIP_COMPILER = 6,
    BUF_MEMORY_COPY = 10,
    BUF_KERNEL_DISPATCH = 11,
    BUF_SCRATCH_MEMORY = 12,
    BUF_MEMORY_ALLOCATION = 16,
    BUF_KINDS = 34,
};
enum { CODE_OBJECT_LOAD = 1, CODE_OBJECT_KERNEL_SYMBOL = 2 };

struct dim3 {
    uint32_t x, y, z;
};

struct correlation {
    uint64_t internal, external, ancestor;
};

struct callback_record {
    uint64_t context, thread;
    struct correlation correlation;
    int32_t kind, operation, phase;
    void *payload;
};
_Static_assert(sizeof(struct callback_record) == 64, "rocprofiler_callback_tracing_record_t");
_Static_assert(offsetof(struct callback_record, payload) == 56, "rocprofiler_callback_tracing_record_t.payload");

struct record_header {
    uint32_t category, kind;
    void *payload;
};
_Static_assert(sizeof(struct record_header) == 16, "rocprofiler_record_header_t");

struct dispatch_info {
    uint64_t size, agent, queue, kernel_id, dispatch_id;
    uint32_t private_segment, group_segment;
    struct dim3 workgroup, grid;
    uint8_t reserved[56];
};
_Static_assert(sizeof(struct dispatch_info) == 128, "rocprofiler_kernel_dispatch_info_t");

struct dispatch_record {
    uint64_t size;
    int32_t kind, operation;
    uint64_t internal, external, thread, start, end;
    struct dispatch_info info;
    int32_t pipe_id, padding; /* after 1.3.5 */
};
#define DISPATCH_BYTES offsetof(struct dispatch_record, pipe_id)
_Static_assert(DISPATCH_BYTES == 184, "rocprofiler_buffer_tracing_kernel_dispatch_record_t");
_Static_assert(offsetof(struct dispatch_record, info.grid) == 116, "rocprofiler_kernel_dispatch_info_t.grid_size");

struct copy_record {
    uint64_t size;
    int32_t kind, operation;
    uint64_t internal, external, thread, start, end, destination, source, bytes, destination_address, source_address;
};
_Static_assert(sizeof(struct copy_record) == 96, "rocprofiler_buffer_tracing_memory_copy_record_t");

struct allocation_record {
    uint64_t size;
    int32_t kind, operation;
    struct correlation correlation;
    uint64_t thread, start, end, agent, address, bytes;
};
_Static_assert(sizeof(struct allocation_record) == 88, "rocprofiler_buffer_tracing_memory_allocation_record_t");

struct scratch_record {
    uint64_t size;
    int32_t kind, operation;
    struct correlation correlation;
    uint64_t agent, queue, thread, start, end;
    uint32_t flags, padding;
    uint64_t bytes;
};
_Static_assert(sizeof(struct scratch_record) == 96, "rocprofiler_buffer_tracing_scratch_memory_record_t");

struct api_record {
    uint64_t size;
    int32_t kind, operation;
    struct correlation correlation;
    uint64_t start, end, thread;
};
_Static_assert(sizeof(struct api_record) == 64, "rocprofiler_buffer_tracing_hsa_api_record_t");

struct kernel_symbol {
    uint64_t size, kernel_id, code_object_id;
    const char *name;
    uint64_t kernel_object;
    uint32_t kernarg_size, kernarg_alignment, group_segment, private_segment, sgprs, vgprs, accumulators;
    int64_t entry_offset;
    uint64_t address;
};
_Static_assert(sizeof(struct kernel_symbol) == 88, "..._code_object_kernel_symbol_register_data_t");

struct api_data { /* rocprofiler_callback_tracing_hip_api_data_t; the union of all arguments is larger */
    uint64_t size;
    uint8_t arguments[192];
    uint64_t result[3]; /* a union; an int32_t first */
};

struct agent_v0 {
    uint64_t size, id;
    int32_t type;
    uint32_t cpu_cores, simds, mem_banks_count, caches_count, io_links_count, cpu_base, simd_base, waves_per_simd;
    uint32_t lds_kb, gds_kb, gws, wavefront, xccs, cus, arrays, shader_banks, simd_arrays, cus_per_array, simds_per_cu;
    uint32_t scratch_slots, gfx_target_version;
    uint16_t vendor_id, device_id;
    uint32_t location_id, domain, render_minor, sdma[3], queues, cpu_mhz, gpu_mhz, firmware[3], cus_per_engine;
    uint32_t waves_per_cu, family, workgroup_most, grid_most;
    uint64_t memory_bytes, hive_id, gpu_id;
    struct dim3 workgroup_dim, grid_dim;
    const void *mem_banks, *caches, *io_links;
    const char *name, *vendor_name, *product_name, *model_name;
    uint32_t node_id;
    int32_t logical_node_id, logical_node_type_id;
    uint32_t visibility;
    uint8_t uuid[16];
};
_Static_assert(sizeof(struct agent_v0) == 312, "rocprofiler_agent_v0_t");
_Static_assert(offsetof(struct agent_v0, location_id) == 108, "rocprofiler_agent_v0_t.location_id");
_Static_assert(offsetof(struct agent_v0, memory_bytes) == 176, "rocprofiler_agent_v0_t.local_mem_size");
_Static_assert(offsetof(struct agent_v0, logical_node_type_id) == 288, "rocprofiler_agent_v0_t");

struct client_id {
    size_t size;
    const char *name;
    uint32_t handle;
};
_Static_assert(sizeof(struct client_id) == 24, "rocprofiler_client_id_t");

typedef void (*finalize_fn)(struct client_id id);
struct tool {
    size_t size;
    int (*initialize)(finalize_fn finalize, void *data);
    void (*finalize)(void *data);
    void *data;
};
_Static_assert(sizeof(struct tool) == 32, "rocprofiler_tool_configure_result_t");

typedef struct tool *(*configure_fn)(uint32_t version, const char *text, uint32_t priority, struct client_id *id);
typedef void (*buffer_fn)(uint64_t context, uint64_t buffer, struct record_header **headers, size_t count, void *data,
                          uint64_t drop_count);
typedef void (*callback_fn)(struct callback_record record, uint64_t *user, void *data);
typedef int (*kind_operation_fn)(int kind, int32_t operation, void *data);
typedef int (*agents_fn)(int version, const void **agents, size_t count, void *data);
typedef void (*thread_fn)(int library, void *data);

#endif
