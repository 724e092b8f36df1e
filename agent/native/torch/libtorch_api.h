/* The functions of libtorch_cpu that the observer calls, and the checks before they are trusted. */
#ifndef KINETO_OPS_TORCH_H
#define KINETO_OPS_TORCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "torch/observer.h"

#define OPS_SCOPES 10u
#define OPS_SCOPE_UNUSED 9u /* STATIC_RUNTIME_MODEL: for checks; nothing in a Python process uses it */

/* at::RecordFunctionCallback; the generator of sources/torch/object_layouts.py checks it for each supported version. */
struct ops_callback {
    void *start;
    void *end;
    double probability;
    uint8_t scopes[OPS_SCOPES];
    uint8_t needs_inputs;
    uint8_t needs_outputs;
    uint8_t needs_ids;
};
_Static_assert(sizeof(struct ops_callback) == 40, "at::RecordFunctionCallback");

struct ops_torch {
    const char *(*name)(const void *function);
    uint64_t (*add)(struct ops_callback callback);
    void (*remove)(uint64_t handle);
    uint64_t (*thread)(void); /* torch's number of this thread */
    void (*construct)(void *function, uint8_t scope);
    void (*destroy)(void *function);
};

/* Finds the functions in the library, which must be loaded already. Returns 0 or KC_LIBRARY. */
int ops_torch_open(struct ops_torch *torch, const char *path, char *error, size_t error_bytes);
/* True if the callback is found, with its scopes, where this torch keeps callbacks. `callback` must be harmless. */
bool ops_torch_takes(const struct ops_torch *torch, struct ops_callback callback);
/* True if a RecordFunction made by this torch has its members where `layout` says. */
bool ops_torch_fits(const struct ops_torch *torch, const struct kc_observer_layout *layout);

#endif
