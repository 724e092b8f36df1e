/* A libtorch_cpu with nothing but RecordFunction: the functions that the observer finds, and how to run an op. */
#ifndef FAKE_TORCH_H
#define FAKE_TORCH_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_CALLBACKS 4u

struct fake_pair {
    void *start;
    void *end;
};

/* at::RecordFunction */
struct fake_function {
    void *table;
    struct fake_pair pairs[FAKE_CALLBACKS];
    uint32_t count;
    uint8_t scope;
    uint8_t inputs_wanted;
    uint8_t started;
    const char *name;
    int64_t sequence;
    const void *inputs;
    uint64_t input_count;
    uint64_t forward_thread;
};

/* c10::IValue */
enum { FAKE_NONE, FAKE_TENSOR, FAKE_DOUBLE, FAKE_INT, FAKE_BOOL, FAKE_LIST, FAKE_STRING };
struct fake_value {
    uint64_t payload;
    uint32_t tag;
    uint32_t padding;
};

struct fake_list {
    uint64_t head[2];
    const struct fake_value *begin;
    const struct fake_value *end;
};

struct fake_storage {
    uint64_t head[2];
    uint64_t data;
};

/* c10::TensorImpl; up to five dimensions lie in `values`, then as many strides. */
struct fake_tensor {
    uint64_t head[2];
    struct fake_storage *storage;
    uint64_t dims;
    union {
        int64_t own[10];
        int64_t *outside;
    } values;
    uint16_t dtype;
    uint8_t policy; /* bits 2 and 3 */
    uint8_t symbolic;
};

#define FAKE_DTYPES 8u

/* Begins an op with the callbacks of this moment. The memory is the caller's. */
void fake_begin(struct fake_function *function, uint8_t scope, const char *name);
/* Likewise, with what it was called with. */
void fake_begin_with(struct fake_function *function, const char *name, int64_t sequence, uint64_t forward_thread,
                     const struct fake_value *inputs, uint64_t count);
void fake_end(struct fake_function *function);
/* 1: callbacks lie elsewhere than expected. */
void fake_set_strange(int strange);

#endif
