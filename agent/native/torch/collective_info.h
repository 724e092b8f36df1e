/* PyTorch's description of a collective, read while its op "record_param_comms" begins (format:
 * protocol/records.py). */
#ifndef KINETO_OPS_COMMS_H
#define KINETO_OPS_COMMS_H

#include <stdbool.h>
#include <stdint.h>

#include "torch/observer.h"

#define OPS_COMMS_OP "record_param_comms"
#define OPS_COMMS_BYTES 2048u

struct ops_comms {
    int64_t sequence; /* of the collective in its process group, -1: unknown to this torch */
    uint32_t bytes;
    uint8_t transfer; /* the number counts transfers between two ranks */
    uint8_t text[OPS_COMMS_BYTES];
};

/* Finds the required symbols in the library opened by ops_torch_open. Without it nothing is ever described. */
void ops_comms_open(const char *path);
/* Returns false if this thread's op is not described. Only while a start callback runs. */
bool ops_comms_describe(const struct kc_observer_layout *layout, struct ops_comms *comms);

#endif
