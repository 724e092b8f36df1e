/* The observer of PyTorch's operators: at::RecordFunction callbacks that write into their own arena.
 *
 * One recording at a time, every function on one thread at a time (the agent's), in this order:
 *
 *   kc_observer_open -> kc_observer_prepare -> kc_observer_start -> kc_observer_counts* -> kc_observer_stop
 *     -> kc_observer_close
 *
 * Functions return 0 (or what their comments say) on success and a negative kc_error otherwise; those with an `error`
 * buffer put a text into it. A forked child starts from scratch: its parent's recording is not its own.
 */
#ifndef KINETO_OPS_H
#define KINETO_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

#define KC_OBSERVER_ABI 2 /* changes with any signature or structure below */

enum { KC_OBSERVER_CALLBACK = -3 }; /* this torch does not take callbacks with our layout */

/* Byte offsets in torch's objects, for one torch minor version (sources/torch/object_layouts.py). */
struct kc_observer_layout {
    uint32_t function_bytes; /* at::RecordFunction */
    uint32_t function_scope;
    uint32_t function_sequence;
    uint32_t function_inputs; /* pointer, length */
    uint32_t function_forward_thread;
    uint32_t value_bytes; /* c10::IValue */
    uint32_t value_payload;
    uint32_t value_tag;
    uint32_t tag_none;
    uint32_t tag_tensor;
    uint32_t tag_double;
    uint32_t tag_int;
    uint32_t tag_bool;
    uint32_t tag_list;
    uint32_t list_values;    /* c10::detail::ListImpl: begin, end */
    uint32_t tensor_storage; /* c10::TensorImpl */
    uint32_t tensor_sizes;   /* c10::impl::SizesAndStrides */
    uint32_t tensor_dtype;
    uint32_t tensor_policy; /* the byte with sizes_strides_policy_, and its bits */
    uint32_t tensor_policy_mask;
    uint32_t tensor_symbolic; /* the byte with has_symbolic_sizes_strides_, and its bit */
    uint32_t tensor_symbolic_mask;
    uint32_t sizes_count; /* in SizesAndStrides */
    uint32_t sizes_values;
    uint32_t sizes_inline; /* how many dimensions fit in the object itself */
    uint32_t storage_data; /* c10::StorageImpl */
    uint32_t string_bytes; /* of std::string: which of libstdc++'s two types it is */
    uint32_t comms_kind;   /* of torch::ParamCommsDebugInfo; 0: an object that the library exports */
    uint32_t comms_group;  /* std::string, as are the next two */
    uint32_t comms_description;
    uint32_t comms_name;
    uint32_t comms_rank; /* int, as are the next three */
    uint32_t comms_world;
    uint32_t comms_first;
    uint32_t comms_stride;
    uint32_t comms_in; /* int64_t side by side with the next; int up to torch 2.4 */
    uint32_t comms_out;
    uint32_t comms_dtype;
    uint32_t comms_in_splits; /* std::vector<int64_t>, as are the next two */
    uint32_t comms_out_splits;
    uint32_t comms_ranks;
    uint32_t comms_sequence; /* int64_t; 0: not in this version */
    uint32_t comms_transfer; /* bool; 0: not in this version */
    uint32_t dtypes;         /* ScalarType values below this one are types, the next is Undefined */
};

struct kc_observer_config {
    uint64_t buffer_limit_bytes; /* cap on all buffers */
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint64_t prefault_bytes; /* buffers backed by memory before kc_observer_prepare returns */
    uint32_t record_inputs;  /* only with a layout that kc_observer_open accepted */
    uint32_t reserved;
};

struct kc_observer_stop_result {
    struct kc_counts counts;
    uint64_t names_lost;      /* texts of names for which the string table had no room */
    uint64_t inputs_lost;     /* descriptions of inputs for which it had no room */
    uint64_t ended_elsewhere; /* ops that ended on another thread than the one they began on */
    uint64_t unfinished;      /* ops that were still running */
    uint64_t too_deep;        /* dropped ops that were nested too deeply */
    uint64_t unserved;        /* dropped ops of threads beyond the limit of threads */
    uint64_t threads;         /* that ran an op */
    uint64_t stuck;           /* threads that stayed inside a callback: their last records are lost */
};

KC_EXPORT uint32_t kc_observer_abi(void);
/* Finds torch's functions in the library loaded as `path` and checks that it takes our callbacks. `layout` may be NULL;
 * *layout_fits: whether this library matches it as far as at::RecordFunction goes. May be called again. */
KC_EXPORT int kc_observer_open(const char *path, const struct kc_observer_layout *layout, uint32_t *layout_fits,
                               char *error, size_t error_bytes);
/* Describes one TensorImpl as an input (protocol/records.py), to check the layout: returns the number of bytes written
 * to `out`; *storage_data is the address of its data. */
KC_EXPORT int kc_observer_describe_tensor(const void *tensor, uint8_t *out, uint32_t bytes, uint64_t *storage_data);
/* Makes the arena; returns its descriptor, which stays the observer's. */
KC_EXPORT int kc_observer_prepare(const struct kc_observer_config *config, char *error, size_t error_bytes);
KC_EXPORT int kc_observer_start(char *error, size_t error_bytes);
KC_EXPORT int kc_observer_counts(struct kc_counts *counts);
/* Removes the callbacks and makes everything READY; waits `limit_ms` at most for threads inside a callback. */
KC_EXPORT int kc_observer_stop(uint32_t limit_ms, struct kc_observer_stop_result *result);
KC_EXPORT int kc_observer_close(void);

#endif
