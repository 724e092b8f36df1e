/* See op_inputs.h.
 *
 * Reads torch's objects through the layout table, never calls their methods: those of tensor subclasses may run Python.
 * Sizes and strides are read only if the object stores them itself (sizes_strides_policy_), so sparse, nested, symbolic
 * and Python-defined tensors are described without them.
 *
 * Threads: the thread of the program that begins the op; kc_observer_describe_tensor uses it on the agent's.
 * Blocks: never: no lock, no allocation, no system call, no call into torch.
 */
#include "torch/op_inputs.h"

#include <string.h>

#include "torch/read_object.h"

#define INPUTS_MOST 32u
#define LIST_MOST 32u
#define SCALARS_MOST 30u
#define DIMS_MOST 16u

enum kind { OTHER, TENSOR, TENSOR_LIST, INT, DOUBLE, BOOL, SCALAR_LIST, NONE };
enum { CUT = 1 };                                    /* flags of the whole and of a list */
enum { NO_SIZES = 1, NO_STRIDES = 2, CUT_DIMS = 4 }; /* flags of a tensor */
enum { NO_DTYPE = 255 };
enum { CUSTOM_STRIDES = 1, CUSTOM_SIZES = 2 }; /* SizesStridesPolicy */

static uint32_t half(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void put(struct ops_inputs *inputs, const void *data, uint32_t bytes) {
    memcpy(inputs->text + inputs->bytes, data, bytes);
    inputs->bytes += bytes;
}

static void put_byte(struct ops_inputs *inputs, uint32_t value) { inputs->text[inputs->bytes++] = (uint8_t)value; }

static uint64_t data_of(const struct kc_observer_layout *layout, const uint8_t *tensor) {
    const uint8_t *storage = ops_pointer(tensor + layout->tensor_storage);
    return storage == NULL ? 0 : ops_word(storage + layout->storage_data);
}

/* The most bytes that a tensor can take. */
static uint32_t room_for_tensor(void) { return 4 + DIMS_MOST * 2 * (uint32_t)sizeof(int64_t); }

static bool fits(const struct ops_inputs *inputs, uint32_t bytes) { return inputs->bytes + bytes <= OPS_INPUTS_BYTES; }

static uint32_t policy_of(const struct kc_observer_layout *layout, const uint8_t *tensor) {
    const uint32_t mask = layout->tensor_policy_mask;
    const uint32_t lowest = mask & (~mask + 1);
    if ((tensor[layout->tensor_symbolic] & layout->tensor_symbolic_mask) != 0) {
        return CUSTOM_SIZES;
    }
    return (tensor[layout->tensor_policy] & mask) / lowest;
}

void ops_describe_tensor(const struct kc_observer_layout *layout, const uint8_t *tensor, struct ops_inputs *inputs) {
    uint16_t dtype;
    memcpy(&dtype, tensor + layout->tensor_dtype, sizeof dtype);
    const bool defined = dtype < layout->dtypes;
    const uint32_t policy = defined ? policy_of(layout, tensor) : CUSTOM_SIZES;
    const uint8_t *sizes = tensor + layout->tensor_sizes;
    const uint64_t dims = policy >= CUSTOM_SIZES ? 0 : ops_word(sizes + layout->sizes_count);
    const uint32_t kept = dims < DIMS_MOST ? (uint32_t)dims : DIMS_MOST;
    const uint8_t *values = sizes + layout->sizes_values;
    uint64_t between = layout->sizes_inline;
    if (dims > layout->sizes_inline) {
        values = ops_pointer(values);
        between = dims;
    }
    put_byte(inputs, defined ? dtype : NO_DTYPE);
    put_byte(inputs, kept);
    put_byte(inputs, (policy >= CUSTOM_SIZES ? NO_SIZES : 0) | (policy >= CUSTOM_STRIDES ? NO_STRIDES : 0) |
                         (kept < dims ? CUT_DIMS : 0));
    put(inputs, values, kept * 8);
    if (policy < CUSTOM_STRIDES) {
        put(inputs, values + between * 8, kept * 8);
    }
    if (defined && inputs->tensor_count < OPS_TENSORS_MOST) {
        struct ops_tensor *own = &inputs->tensors[inputs->tensor_count++];
        own->tensor = (uint64_t)(uintptr_t)tensor;
        own->data = data_of(layout, tensor);
    }
}

static enum kind scalar_kind(const struct kc_observer_layout *layout, const uint8_t *value) {
    const uint32_t tag = half(value + layout->value_tag);
    return tag == layout->tag_int ? INT : tag == layout->tag_double ? DOUBLE : tag == layout->tag_bool ? BOOL : OTHER;
}

static void put_scalar(const struct kc_observer_layout *layout, const uint8_t *value, enum kind kind,
                       struct ops_inputs *inputs) {
    put_byte(inputs, kind);
    put(inputs, value + layout->value_payload, kind == BOOL ? 1 : 8);
}

static bool is_tensor(const struct kc_observer_layout *layout, const uint8_t *value) {
    return half(value + layout->value_tag) == layout->tag_tensor;
}

static void put_list(const struct kc_observer_layout *layout, const uint8_t *list, struct ops_inputs *inputs) {
    const uint8_t *first = ops_pointer(list + layout->list_values);
    const uint8_t *end = ops_pointer(list + layout->list_values + sizeof first);
    const uint64_t count = first == NULL ? 0 : (uint64_t)(end - first) / layout->value_bytes;
    const bool tensors = count > 0 && is_tensor(layout, first);
    if (!tensors && count > 0 && scalar_kind(layout, first) == OTHER) {
        put_byte(inputs, OTHER);
        return;
    }
    put_byte(inputs, tensors ? TENSOR_LIST : SCALAR_LIST);
    const uint32_t head = inputs->bytes;
    put(inputs, (const uint8_t[]){0, 0}, 2);
    const uint32_t most = tensors ? LIST_MOST : SCALARS_MOST;
    uint32_t kept = 0;
    for (; kept < most && kept < count; kept++) {
        const uint8_t *value = first + kept * layout->value_bytes;
        const enum kind kind = scalar_kind(layout, value);
        if (!fits(inputs, room_for_tensor()) || (tensors ? !is_tensor(layout, value) : kind == OTHER)) {
            break;
        }
        if (tensors) {
            ops_describe_tensor(layout, ops_pointer(value + layout->value_payload), inputs);
        } else {
            put_scalar(layout, value, kind, inputs);
        }
    }
    inputs->text[head] = (uint8_t)kept;
    inputs->text[head + 1] = kept < count ? CUT : 0;
}

static void put_value(const struct kc_observer_layout *layout, const uint8_t *value, struct ops_inputs *inputs) {
    const uint32_t tag = half(value + layout->value_tag);
    const uint8_t *object = ops_pointer(value + layout->value_payload);
    if (tag == layout->tag_tensor && object != NULL) {
        put_byte(inputs, TENSOR);
        ops_describe_tensor(layout, object, inputs);
    } else if (tag == layout->tag_list && object != NULL) {
        put_list(layout, object, inputs);
    } else if (scalar_kind(layout, value) != OTHER) {
        put_scalar(layout, value, scalar_kind(layout, value), inputs);
    } else {
        put_byte(inputs, tag == layout->tag_none ? NONE : OTHER);
    }
}

void ops_describe_inputs(const struct kc_observer_layout *layout, const uint8_t *function, struct ops_inputs *inputs) {
    const uint8_t *values = ops_pointer(function + layout->function_inputs);
    const uint64_t count = values == NULL ? 0 : ops_word(function + layout->function_inputs + sizeof values);
    inputs->bytes = 0;
    inputs->tensor_count = 0;
    put(inputs, (const uint8_t[]){0, 0}, 2);
    uint32_t kept = 0;
    for (; kept < INPUTS_MOST && kept < count && fits(inputs, room_for_tensor()); kept++) {
        put_value(layout, values + kept * layout->value_bytes, inputs);
    }
    inputs->text[0] = (uint8_t)kept;
    inputs->text[1] = kept < count ? CUT : 0;
}
