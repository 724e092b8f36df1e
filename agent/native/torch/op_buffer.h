/* One thread's buffer of the arena, and its records. */
#ifndef KINETO_OPS_BUFFER_H
#define KINETO_OPS_BUFFER_H

#include "common/arena.h"
#include "torch/op_inputs.h"

#define OPS_RECORD_BYTES 64u

struct ops_record {
    uint64_t start;
    uint64_t end;
    uint64_t name;
    int64_t sequence;
    uint64_t forward_thread;
    uint64_t inputs;
    uint32_t thread;
    uint32_t number;
    uint8_t kind;
    uint8_t scope;
    uint8_t flags;
    uint8_t reserved[5];
};
_Static_assert(sizeof(struct ops_record) == OPS_RECORD_BYTES, "records.OP");

struct ops_tensors_record {
    struct ops_tensor tensors[3];
    uint32_t thread;
    uint32_t number;
    uint8_t kind;
    uint8_t count;
    uint8_t first;
    uint8_t reserved[5];
};
_Static_assert(sizeof(struct ops_tensors_record) == OPS_RECORD_BYTES, "records.OP_TENSORS");

struct ops_comms_record {
    uint64_t text;
    int64_t sequence;
    uint64_t reserved_words[4];
    uint32_t thread;
    uint32_t number;
    uint8_t kind;
    uint8_t transfer;
    uint8_t reserved[6];
};
_Static_assert(sizeof(struct ops_comms_record) == OPS_RECORD_BYTES, "records.OP_COMMS");

struct ops_buffer {
    struct arena *arena;
    uint64_t lent_ns;
    uint64_t retry_ns;
    uint32_t index; /* UINT32_MAX: none lent */
    uint32_t used;  /* bytes of it in use */
};

/* No buffer is lent yet. */
void ops_buffer_begin(struct ops_buffer *buffer, struct arena *arena);
/* Writes one record at the time `now`, Unix ns; counts it as dropped if no buffer is FREE. */
void ops_buffer_append(struct ops_buffer *buffer, const void *record, uint64_t now);
void ops_buffer_drop(const struct ops_buffer *buffer);
/* Makes READY what has been written. */
void ops_buffer_publish(struct ops_buffer *buffer);

#endif
