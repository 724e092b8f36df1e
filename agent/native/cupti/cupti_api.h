/* The part of CUPTI's public C interface that the collector uses, resolved at run time.
 *
 * No CUPTI header is needed to build: the functions below have not changed since CUDA 10. Of the record layouts, which
 * do change, the collector uses only the place of a kernel's name, which the caller passes.
 */
#ifndef KINETO_CUPTI_API_H
#define KINETO_CUPTI_API_H

#include <stddef.h>
#include <stdint.h>

#define CUPTI_SUCCESS 0
#define CUPTI_ERROR_INVALID_PARAMETER 1
#define CUPTI_ERROR_NOT_INITIALIZED 15
#define CUPTI_ERROR_MULTIPLE_SUBSCRIBERS 39

#define CUPTI_KIND_DRIVER 4u
#define CUPTI_KIND_RUNTIME 5u
#define CUPTI_KIND_CONCURRENT_KERNEL 10u

#define CUPTI_DOMAIN_DRIVER_API 1u
#define CUPTI_DOMAIN_RUNTIME_API 2u
#define CUPTI_API_EXIT 1 /* CUpti_ApiCallbackSite */

#define CUPTI_FLUSH_DEFAULT 0u
#define CUPTI_FLUSH_FORCED 1u
#define CUPTI_THREAD_ID_SYSTEM 1u

typedef int cupti_result;
typedef void (*cupti_requested)(uint8_t **buffer, size_t *size, size_t *max_records);
typedef void (*cupti_completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
typedef void (*cupti_callback)(void *user, uint32_t domain, uint32_t cbid, const void *data);

/* name of the field, symbol, result, parameters */
#define CUPTI_FUNCTIONS(X)                                                                                         \
    X(get_version, "cuptiGetVersion", (uint32_t *version))                                                         \
    X(get_result_string, "cuptiGetResultString", (cupti_result result, const char **text))                         \
    X(get_callback_name, "cuptiGetCallbackName", (uint32_t domain, uint32_t cbid, const char **name))              \
    X(set_thread_id_type, "cuptiSetThreadIdType", (uint32_t type))                                                 \
    X(register_callbacks, "cuptiActivityRegisterCallbacks", (cupti_requested, cupti_completed))                    \
    X(enable, "cuptiActivityEnable", (uint32_t kind))                                                              \
    X(disable, "cuptiActivityDisable", (uint32_t kind))                                                            \
    X(flush_all, "cuptiActivityFlushAll", (uint32_t flag))                                                         \
    X(get_next_record, "cuptiActivityGetNextRecord", (uint8_t *buffer, size_t valid, void **record))               \
    X(get_num_dropped, "cuptiActivityGetNumDroppedRecords", (void *context, uint32_t stream, size_t *dropped))     \
    X(subscribe, "cuptiSubscribe", (void **subscriber, cupti_callback, void *user))                                \
    X(unsubscribe, "cuptiUnsubscribe", (void *subscriber))                                                         \
    X(enable_domain, "cuptiEnableDomain", (uint32_t enable, void *subscriber, uint32_t domain))                    \
    X(enable_callback, "cuptiEnableCallback", (uint32_t enable, void *subscriber, uint32_t domain, uint32_t cbid)) \
    X(finalize, "cuptiFinalize", (void))

struct cupti_call { /* CUpti_CallbackData */
    int site;
    const char *function;
    const void *parameters;
    void *result; /* at the end of a call: its cudaError_t or CUresult */
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation_data;
    uint32_t correlation;
};

/* cuptiActivityGetEnabledKinds, since CUDA 13.2. Without a subscriber: those of all. */
typedef cupti_result (*cupti_get_enabled_kinds)(void *subscriber, uint32_t *kinds, uint32_t *size, uint32_t *count);

struct cupti_api {
    void *library; /* dlopen's handle, which is never closed */
#define CUPTI_FIELD(field, symbol, parameters) cupti_result(*field) parameters;
    CUPTI_FUNCTIONS(CUPTI_FIELD)
#undef CUPTI_FIELD
    cupti_get_enabled_kinds get_enabled_kinds; /* NULL: this CUPTI does not have it */
};

/* Opens the library at `path` (the process's own copy if it is loaded) and resolves every function.
 * Returns 0 or -1 with a text in `error`. */
int cupti_api_open(struct cupti_api *api, const char *path, char *error, size_t error_bytes);

#endif
