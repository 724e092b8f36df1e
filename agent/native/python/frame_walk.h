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
    uint64_t code;        /* 0: one of the interpreter's own */
    uint64_t instruction; /* as it stands in the frame */
};

#define FRAMES_MOST (2 * STACK_DEPTH_MOST) /* with those of the interpreter's own */

/* One thread's frames, innermost first. */
struct stack {
    uint32_t depth;
    bool truncated;
    struct walked_frame frames[FRAMES_MOST];
};

struct walker_of_stacks {
    const struct kc_sampler_layout *layout;
    struct memory memory;
    struct stack stack; /* what walk_stack has found: STACK_DEPTH_MOST frames at the most, none of them hidden */
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
    WALK_PARTIAL, /* the thread went on meanwhile; calls shorter than the look may be missing */
    WALK_TORN,
    WALK_EMPTY, /* no Python frame */
};

uint64_t walk_interpreters(const struct walker_of_stacks *walker);
uint64_t walk_next_interpreter(const struct walker_of_stacks *walker, uint64_t interpreter);
uint64_t walk_threads(const struct walker_of_stacks *walker, uint64_t interpreter);
/* False if there is no thread state of this interpreter at that address. */
bool walk_thread(const struct walker_of_stacks *walker, uint64_t address, uint64_t interpreter,
                 struct python_thread *thread);
/* Reads the frames. `*outermost` is the outermost frame of the thread when it was last read, 0 if it was not. */
enum walk walk_stack(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t *outermost);

/* Where the interpreter's GIL is, 0 if that is not known. */
uint64_t walk_gil(const struct walker_of_stacks *walker, uint64_t interpreter);
/* The thread (pthread_t) that holds this GIL, 0 if none does. Not the thread state: up to 3.11 a thread that moves to
 * another interpreter keeps the GIL that it took for the first one. */
uint64_t walk_gil_holder(const struct walker_of_stacks *walker, uint64_t gil);

/* Whether this interpreter's garbage collector runs now, on the thread that has its GIL. False if that is not known. */
bool walk_collects(const struct walker_of_stacks *walker, uint64_t interpreter);

/* What identifies a code object, read each time: its memory may have become another one's, and that of its texts too. */
struct code_identity {
    uint64_t address;
    uint64_t filename;
    uint64_t name;
    uint64_t lines;
    uint64_t names;     /* 0: not known, as is the next one */
    uint64_t variables; /* names of locals, cells and free variables */
    uint64_t texts;     /* made of the lengths and hashes of both texts */
    uint32_t first_line;
    uint32_t units; /* of bytecode; 0: not known */
};

/* Whether all offsets lie within what is read of an object. What follows relies on it. */
bool walk_fits(const struct kc_sampler_layout *layout);
bool code_fits(const struct kc_sampler_layout *layout); /* those of code objects and texts */
/* Whether a word at each of these offsets ends within so many bytes. */
bool offsets_fit(const uint32_t *offsets, size_t count, uint32_t bytes);

/* The code objects of the stack, in its order. False if one of them is none. */
bool walk_codes(struct walker_of_stacks *walker, const struct stack *stack, struct code_identity *codes);
/* The offset in bytes of a frame's instruction from the start of its bytecode, -1 if unknown. */
int32_t walk_instruction(const struct kc_sampler_layout *layout, const struct walked_frame *frame,
                         const struct code_identity *code);

/* A str as UTF-8, cut to `most` bytes; returns its length, negative if it is no str that can be read. */
int32_t walk_text(const struct walker_of_stacks *walker, uint64_t address, char *text, uint32_t most);
/* The items of a tuple of str, a NUL after each; returns their length, negative if unreadable or longer. */
int32_t walk_names(const struct walker_of_stacks *walker, uint64_t address, char *texts, uint32_t most);
/* The bytecode as it is now; returns its length, negative if it cannot be read or needs more. */
int32_t walk_bytecode(const struct walker_of_stacks *walker, const struct code_identity *code, uint8_t *data,
                      uint32_t most);
/* A bytes object, cut. */
int32_t walk_bytes(const struct walker_of_stacks *walker, uint64_t address, uint8_t *data, uint32_t most);

#endif
