/* Finds interpreters, threads and frames in this process's memory. */
#ifndef KINETO_STACKS_WALK_H
#define KINETO_STACKS_WALK_H

#include <string.h>

#include "python/stack_sampler.h"
#include "python/read_memory.h"

#define FARTHER(a, b) ((a) > (b) ? (a) : (b))

#define STACK_DEPTH_MOST 256u /* frames; of a deeper stack the innermost ones are kept */

static inline uint64_t word_in(const uint8_t *bytes, uint32_t offset) {
    uint64_t word;
    memcpy(&word, bytes + offset, sizeof word);
    return word;
}

struct walked_frame {
    uint64_t address;
    uint64_t previous;
    uint64_t code;        /* 0: an internal frame of the interpreter */
    uint64_t instruction; /* as stored in the frame */
};

#define FRAMES_MOST (2 * STACK_DEPTH_MOST) /* including the interpreter's internal ones */

/* One thread's frames, innermost first. */
struct stack {
    uint32_t depth;
    bool truncated;
    struct walked_frame frames[FRAMES_MOST];
};

struct walker_of_stacks {
    const struct kc_sampler_layout *layout;
    struct memory memory;
    struct stack stack; /* the result of walk_stack: STACK_DEPTH_MOST frames at most, no internal ones */
    struct stack second;
    struct stack third;
    int64_t shortest_hold_ns; /* so far */
};

/* A thread state. */
struct python_thread {
    uint64_t address;
    uint64_t next;
    uint64_t interpreter;
    uint64_t frame; /* of the thread state: frame, or _PyCFrame */
    uint64_t id;    /* pthread_t */
    uint64_t native_id;
};

enum walk {
    WALK_WHOLE,
    WALK_PARTIAL, /* the thread kept running; calls shorter than the read may be missing */
    WALK_TORN,
    WALK_EMPTY, /* no Python frame */
};

uint64_t walk_interpreters(const struct walker_of_stacks *walker);
uint64_t walk_next_interpreter(const struct walker_of_stacks *walker, uint64_t interpreter);
uint64_t walk_threads(const struct walker_of_stacks *walker, uint64_t interpreter);
/* Reads a thread state. False if there is none of this interpreter at that address. */
bool walk_thread(const struct walker_of_stacks *walker, uint64_t address, uint64_t interpreter,
                 struct python_thread *thread);
/* Reads the frames. `*outermost` is the thread's outermost frame when last read, 0 if not read. */
enum walk walk_stack(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t *outermost);

/* The address of the interpreter's GIL, 0 if unknown. */
uint64_t walk_gil(const struct walker_of_stacks *walker, uint64_t interpreter);
/* The thread (pthread_t) that holds this GIL, 0 if none does. Not the thread state: up to 3.11 a thread that moves to
 * another interpreter keeps the GIL that it took for the first one. */
uint64_t walk_gil_holder(const struct walker_of_stacks *walker, uint64_t gil);

/* Whether this interpreter's garbage collector is running, on the thread that has its GIL. False if unknown. */
bool walk_collects(const struct walker_of_stacks *walker, uint64_t interpreter);

/* What identifies a code object, read each time: its memory, and that of its texts, may have been reused. */
struct code_identity {
    uint64_t address;
    uint64_t filename;
    uint64_t name;
    uint64_t lines;
    uint64_t names;     /* 0: unknown, as is the next one */
    uint64_t variables; /* names of locals, cells and free variables */
    uint64_t texts;     /* combines the lengths and hashes of both texts */
    uint32_t first_line;
    uint32_t units; /* of bytecode; 0: unknown */
};

/* Whether all offsets lie within the part of an object that is read. The functions below rely on it. */
bool walk_fits(const struct kc_sampler_layout *layout);
bool code_fits(const struct kc_sampler_layout *layout); /* those of code objects and texts */
/* Whether a word at each of these offsets ends within `bytes`. */
bool offsets_fit(const uint32_t *offsets, size_t count, uint32_t bytes);

/* Reads the code objects of the stack, in its order. False if one of them is not a code object. */
bool walk_codes(struct walker_of_stacks *walker, const struct stack *stack, struct code_identity *codes);
/* The offset in bytes of a frame's instruction from the start of its bytecode, -1 if unknown. */
int32_t walk_instruction(const struct kc_sampler_layout *layout, const struct walked_frame *frame,
                         const struct code_identity *code);

/* Reads a str as UTF-8, cut to `most` bytes; returns its length, negative if it is not a readable str. */
int32_t walk_text(const struct walker_of_stacks *walker, uint64_t address, char *text, uint32_t most);
/* Reads the items of a tuple of str, a NUL after each; returns their length, negative if unreadable or too long. */
int32_t walk_names(const struct walker_of_stacks *walker, uint64_t address, char *texts, uint32_t most);
/* Reads the current bytecode; returns its length, negative if it is unreadable or too long. */
int32_t walk_bytecode(const struct walker_of_stacks *walker, const struct code_identity *code, uint8_t *data,
                      uint32_t most);
/* Reads a bytes object, cut to `most`. */
int32_t walk_bytes(const struct walker_of_stacks *walker, uint64_t address, uint8_t *data, uint32_t most);

#endif
