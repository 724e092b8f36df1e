/* The functions of libpti_view that the collector calls, and the numbers that it uses from PTI's public headers. */
#ifndef KINETO_PTI_API_H
#define KINETO_PTI_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int32_t pti_result;

enum {
    PTI_OK = 0,
    PTI_NOT_IMPLEMENTED = 2, /* returned by every function if the core library cannot be loaded */
};

enum pti_view {
    PTI_KERNEL = 1,
    PTI_DRIVER_CALLS = 3,
    PTI_OVERHEAD = 5,
    PTI_RUNTIME_CALLS = 6,
    PTI_COPY = 8,
    PTI_FILL = 9,
    PTI_COPY_BETWEEN = 10,
    PTI_SYNCHRONIZATION = 11,
};

enum {
    PTI_GROUP_LEVEL_ZERO = 1,
    PTI_GROUP_SYCL = 3,
    PTI_GROUP_SYCL_LEVEL_ZERO = 4, /* in records only: a SYCL call with a Level Zero number */
    PTI_GROUP_ALL = 0x7fffffff,
    PTI_CLASS_OPERATIONS = 1,
    PTI_CLASS_HOST_SYNCHRONIZATION = 2,
    PTI_ID_EXECUTE_COMMAND_LISTS = 31, /* zeCommandQueueExecuteCommandLists, the same in 0.12 to 1.0 */
    PTI_MEMORY_DEVICE = 2,
};

/* In every record of the kind; the same in all known versions. */
#define PTI_KERNEL_NAME_OFFSET 24u

typedef void (*pti_requested)(unsigned char **buffer, size_t *size);
typedef void (*pti_completed)(unsigned char *buffer, size_t size, size_t used);

struct pti_api {
    void *library;
    uint32_t major, minor;
    const char *(*version_string)(void);
    const char *(*memory_type_text)(int32_t type);
    pti_result (*local_available)(void);
    pti_result (*set_callbacks)(pti_requested requested, pti_completed completed);
    pti_result (*enable)(int32_t view);
    pti_result (*disable)(int32_t view);
    pti_result (*flush)(void);
    pti_result (*next_record)(uint8_t *buffer, size_t used, void **record);
    pti_result (*call_name)(int32_t group, uint32_t id, const char **name);
    pti_result (*driver_call)(uint32_t enable, int32_t group, uint32_t id);
    pti_result (*driver_class)(uint32_t enable, int32_t group_class, int32_t group);
    pti_result (*runtime_class)(uint32_t enable, int32_t group_class, int32_t group);
};

/* Opens the library and reads its version, which works without its core; calls nothing else. Returns 0, or a negative
 * kc_error with a text. */
int pti_api_open(struct pti_api *api, const char *path, char *error, size_t error_bytes);
/* Bytes of the largest record that this version writes: the least size of a buffer. */
uint32_t pti_largest_record(const struct pti_api *api);
/* Whether it loads its core library. Starts none of its threads and hooks nothing. */
bool pti_core_loads(const struct pti_api *api);
/* A text for a result. */
const char *pti_result_text(int32_t result);

#endif
