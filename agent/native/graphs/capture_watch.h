/* Watching the capture of a CUDA graph: which operator of PyTorch adds which nodes.
 *
 * kc_graphs_open once, then for each capture, on the program's thread that captures:
 *
 *   (the capture begins) kc_graphs_begin -> kc_graphs_seal -> kc_graphs_take (the capture ends)
 *
 * One capture at a time is watched: a later kc_graphs_begin ends the watch of an earlier one. Functions return 0 (or
 * what their comments say) on success and a negative kc_error otherwise. A forked child has no watch.
 */
#ifndef KINETO_CAPTURE_WATCH_H
#define KINETO_CAPTURE_WATCH_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"
#include "torch/observer.h"

#define KC_GRAPHS_ABI 1 /* changes with any signature or structure below */

enum { KC_GRAPHS_CAPTURE = -3 }; /* the driver has no data about this capture, or it is beyond the limits */

struct kc_graphs_libraries {
    const char *torch; /* libtorch_cpu */
    const char *cuda;
    const char *c10_cuda;
};

KC_EXPORT uint32_t kc_graphs_abi(void);
/* Finds the functions of the loaded libraries and checks that torch takes our callbacks. `layout` may be NULL;
 * *layout_fits: whether this torch matches it; inputs are recorded only then. May be called again between captures. */
KC_EXPORT int kc_graphs_open(const struct kc_graphs_libraries *libraries, const struct kc_observer_layout *layout,
                             uint32_t *layout_fits, char *error, size_t error_bytes);
/* As kc_observer_describe_tensor. */
KC_EXPORT int kc_graphs_describe_tensor(const void *tensor, uint8_t *out, uint32_t bytes, uint64_t *storage_data);
/* Starts watching the capture of this stream of this device. *watch is its number. */
KC_EXPORT int kc_graphs_begin(uint64_t stream, int32_t device, uint32_t record_inputs, uint64_t *watch, char *error,
                              size_t error_bytes);
/* Ends the watch, while the capture is still active, and reads its nodes. *bytes is the size of the result for
 * kc_graphs_take. */
KC_EXPORT int kc_graphs_seal(uint64_t watch, uint64_t *bytes, char *error, size_t error_bytes);
/* Copies the sealed result and frees it; `bytes` must be its size. */
KC_EXPORT int kc_graphs_take(uint8_t *out, uint64_t bytes);
/* Ends the watch, if there is one, and frees the sealed result. */
KC_EXPORT void kc_graphs_drop(void);

#endif
