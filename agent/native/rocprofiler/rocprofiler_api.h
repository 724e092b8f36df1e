/* The part of rocprofiler-sdk's public C interface that the collector uses, resolved at run time.
 *
 * No AMD header is needed to build. Structures and numbers are those of 1.0.0 to 1.4.1 (SONAME 1); 0.6 has others and
 * is refused. Checks against the library come before anything is configured: rocprofiler_api_open compares the names of
 * the kinds below with the library's own. Records contain their sizes, which rocprofiler_client.c knows.
 */
#ifndef KINETO_ROCPROFILER_API_H
#define KINETO_ROCPROFILER_API_H

#include <stddef.h>
#include <stdint.h>

/* Versions whose records are known, as in kineto_agent/sources/rocprofiler/known_versions.py. */
#define ROCP_VERSION_LEAST 10000
#define ROCP_VERSION_BEYOND 10500

/* rocprofiler_status_t */
#define ROCP_SUCCESS 0
#define ROCP_BUFFER_BUSY 14
#define ROCP_CONFIGURATION_LOCKED 16
#define ROCP_FINALIZED 21

/* rocprofiler_callback_tracing_kind_t */
#define ROCP_CALLBACK_HIP_RUNTIME 5
#define ROCP_CALLBACK_HIP_COMPILER 6
#define ROCP_CALLBACK_CODE_OBJECT 10

/* rocprofiler_buffer_tracing_kind_t */
#define ROCP_BUFFER_HSA_CORE 1
#define ROCP_BUFFER_HSA_AMD_EXT 2
#define ROCP_BUFFER_MEMORY_COPY 10
#define ROCP_BUFFER_KERNEL_DISPATCH 11
#define ROCP_BUFFER_SCRATCH_MEMORY 12
#define ROCP_BUFFER_MEMORY_ALLOCATION 16

#define ROCP_PHASE_ENTER 1 /* for a code object: it is loaded */
#define ROCP_PHASE_EXIT 2
#define ROCP_CATEGORY_TRACING 1u
#define ROCP_POLICY_LOSSLESS 2
#define ROCP_KERNEL_SYMBOL 2 /* an operation of CODE_OBJECT */
#define ROCP_LIBRARY 1       /* whose threads: rocprofiler_runtime_library_t */
#define ROCP_AGENTS_VERSION 1
#define ROCP_AGENT_GPU 2

typedef int rocp_status;

struct rocp_callback_record { /* rocprofiler_callback_tracing_record_t */
    uint64_t context;
    uint64_t thread;
    uint64_t correlation; /* internal, then external and ancestor */
    uint64_t external;
    uint64_t ancestor;
    int32_t kind;
    int32_t operation;
    int32_t phase;
    const void *payload;
};
_Static_assert(sizeof(struct rocp_callback_record) == 64, "rocprofiler_callback_tracing_record_t");

struct rocp_header { /* rocprofiler_record_header_t */
    uint32_t category;
    uint32_t kind;
    const void *payload;
};

struct rocp_kernel_symbol { /* ..._code_object_kernel_symbol_register_data_t, its beginning */
    uint64_t size;
    uint64_t kernel_id;
    uint64_t code_object_id;
    const char *name;
};

struct rocp_agent { /* rocprofiler_agent_v0_t of 1.0.0; longer in later versions */
    uint64_t size;
    uint64_t id;
    int32_t type;
    uint32_t until_lds[8];
    uint32_t lds_kb; /* of a workgroup at most */
    uint32_t gds_kb;
    uint32_t global_wave_syncs;
    uint32_t wavefront; /* work-items */
    uint32_t dies;
    uint32_t compute_units;
    uint32_t until_simds[4];
    uint32_t simds_per_unit;
    uint32_t scratch_slots;
    uint32_t gfx_version; /* 90402: gfx942 */
    uint16_t vendor;
    uint16_t device;
    uint32_t location; /* of the PCI bus: bus << 8 | device << 3 | function */
    uint32_t domain;
    uint32_t until_clock[6];
    uint32_t clock_mhz;
    uint32_t until_waves[4];
    uint32_t waves_per_unit;
    uint32_t family;
    uint32_t workgroup_most; /* work-items */
    uint32_t grid_most;
    uint64_t memory_bytes;
    uint64_t hive;
    uint64_t gpu;
    uint32_t dimensions[6];
    const void *lists[3];
    const char *name; /* "gfx942" */
    const char *vendor_name;
    const char *product_name; /* "AMD Instinct MI300X" */
    const char *model_name;
    uint32_t node;
    int32_t logical_node;
    int32_t ordinal; /* logical_node_type_id: among the GPUs, before HIP_VISIBLE_DEVICES */
    uint32_t visibility;
    uint8_t uuid[16];
};
_Static_assert(sizeof(struct rocp_agent) == 312, "rocprofiler_agent_v0_t");
_Static_assert(offsetof(struct rocp_agent, clock_mhz) == 140, "rocprofiler_agent_v0_t.max_engine_clk_fcompute");
_Static_assert(offsetof(struct rocp_agent, memory_bytes) == 176, "rocprofiler_agent_v0_t.local_mem_size");
_Static_assert(offsetof(struct rocp_agent, name) == 248, "rocprofiler_agent_v0_t.name");

struct rocp_client { /* rocprofiler_client_id_t */
    size_t size;
    const char *name;
    uint32_t handle;
};

typedef void (*rocp_finalize)(struct rocp_client client);
struct rocp_tool { /* rocprofiler_tool_configure_result_t */
    size_t size;
    int (*initialize)(rocp_finalize finalize, void *data);
    void (*finalize)(void *data);
    void *data;
};

typedef struct rocp_tool *(*rocp_configure)(uint32_t version, const char *text, uint32_t priority,
                                            struct rocp_client *client);
typedef void (*rocp_buffer_callback)(uint64_t context, uint64_t buffer, struct rocp_header **headers, size_t count,
                                     void *data, uint64_t dropped);
typedef void (*rocp_callback)(struct rocp_callback_record record, uint64_t *user, void *data);
typedef int (*rocp_operation_callback)(int kind, int32_t operation, void *data);
typedef int (*rocp_agents_callback)(int version, const void **agents, size_t count, void *data);
typedef void (*rocp_thread_callback)(int library, void *data);

/* name of the field, symbol, parameters */
#define ROCP_FUNCTIONS(X)                                                                                              \
    X(get_version, "rocprofiler_get_version", (uint32_t *major, uint32_t *minor, uint32_t *patch))                     \
    X(is_initialized, "rocprofiler_is_initialized", (int *status))                                                     \
    X(is_finalized, "rocprofiler_is_finalized", (int *status))                                                         \
    X(force_configure, "rocprofiler_force_configure", (rocp_configure))                                                \
    X(create_context, "rocprofiler_create_context", (uint64_t *context))                                               \
    X(start_context, "rocprofiler_start_context", (uint64_t context))                                                  \
    X(stop_context, "rocprofiler_stop_context", (uint64_t context))                                                    \
    X(create_buffer, "rocprofiler_create_buffer",                                                                      \
      (uint64_t context, size_t size, size_t watermark, int policy, rocp_buffer_callback, void *data,                  \
       uint64_t *buffer))                                                                                              \
    X(flush_buffer, "rocprofiler_flush_buffer", (uint64_t buffer))                                                     \
    X(create_thread, "rocprofiler_create_callback_thread", (uint64_t *thread))                                         \
    X(assign_thread, "rocprofiler_assign_callback_thread", (uint64_t buffer, uint64_t thread))                         \
    X(at_thread_create, "rocprofiler_at_internal_thread_create",                                                       \
      (rocp_thread_callback before, rocp_thread_callback after, int libraries, void *data))                            \
    X(trace_by_callback, "rocprofiler_configure_callback_tracing_service",                                             \
      (uint64_t context, int kind, const int32_t *operations, size_t count, rocp_callback, void *data))                \
    X(trace_by_buffer, "rocprofiler_configure_buffer_tracing_service",                                                 \
      (uint64_t context, int kind, const int32_t *operations, size_t count, uint64_t buffer))                          \
    X(callback_kind_name, "rocprofiler_query_callback_tracing_kind_name",                                              \
      (int kind, const char **name, uint64_t *length))                                                                 \
    X(buffer_kind_name, "rocprofiler_query_buffer_tracing_kind_name", (int kind, const char **name, uint64_t *length)) \
    X(callback_operation_name, "rocprofiler_query_callback_tracing_kind_operation_name",                               \
      (int kind, int32_t operation, const char **name, uint64_t *length))                                              \
    X(buffer_operation_name, "rocprofiler_query_buffer_tracing_kind_operation_name",                                   \
      (int kind, int32_t operation, const char **name, uint64_t *length))                                              \
    X(each_callback_operation, "rocprofiler_iterate_callback_tracing_kind_operations",                                 \
      (int kind, rocp_operation_callback, void *data))                                                                 \
    X(each_buffer_operation, "rocprofiler_iterate_buffer_tracing_kind_operations",                                     \
      (int kind, rocp_operation_callback, void *data))                                                                 \
    X(available_agents, "rocprofiler_query_available_agents",                                                          \
      (int version, rocp_agents_callback, size_t agent_bytes, void *data))

struct rocp_api {
    void *library; /* dlopen's handle, which is never closed */
#define ROCP_FIELD(field, symbol, parameters) rocp_status(*field) parameters;
    ROCP_FUNCTIONS(ROCP_FIELD)
#undef ROCP_FIELD
    const char *(*status_text)(rocp_status status);
};

/* Opens the library at `path` (the process's own copy: a second one would be another profiler), resolves every
 * function, stores its version as 10000 * major + 100 * minor + patch, and checks that its kinds are numbered as above.
 * Returns 0 or -1 with a text in `error`. */
int rocprofiler_api_open(struct rocp_api *api, const char *path, uint64_t *version, char *error, size_t error_bytes);

#endif
