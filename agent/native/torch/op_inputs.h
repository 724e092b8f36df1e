/* Describing the inputs of an op: types, sizes, strides, values (format: protocol/records.py). */
#ifndef KINETO_OPS_INPUTS_H
#define KINETO_OPS_INPUTS_H

#include <stdbool.h>
#include <stdint.h>

#include "torch/observer.h"

#define OPS_INPUTS_BYTES 4096u
#define OPS_TENSORS_MOST 64u /* tensors whose addresses are kept, per op */

struct ops_tensor {
    uint64_t tensor;
    uint64_t data;
};

struct ops_inputs {
    uint32_t bytes;
    uint32_t tensor_count;
    struct ops_tensor tensors[OPS_TENSORS_MOST];
    uint8_t text[OPS_INPUTS_BYTES];
};

/* Reads the inputs of the RecordFunction; only while its start callback runs. */
void ops_describe_inputs(const struct kc_observer_layout *layout, const uint8_t *function, struct ops_inputs *inputs);
/* Describes one TensorImpl. */
void ops_describe_tensor(const struct kc_observer_layout *layout, const uint8_t *tensor, struct ops_inputs *inputs);

#endif
