/* The stack sampler's interface, driven by sources/python/sampler_binding.py. stack_sampler.c explains how it works.
 *
 *   kc_sampler_open -> kc_sampler_look* -> kc_sampler_read_text* -> kc_sampler_prepare -> kc_sampler_start
 *     -> kc_sampler_name*, kc_sampler_counts* -> kc_sampler_stop -> kc_sampler_close
 *
 * kc_sampler_open, _look, _read_text, _read_names, _runs and _change_item may be called at any time; the rest belongs
 * to one recording at a time. All are called on one thread at a time (the agent's). Functions return 0 (or what their
 * comments say) on success and a negative kc_error otherwise, KC_ORDER in a forked child; those with an `error` buffer
 * put a text into it.
 */
#ifndef KINETO_STACKS_H
#define KINETO_STACKS_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

#define KC_SAMPLER_ABI 4 /* changes with any signature or structure below */

enum { KC_SAMPLER_UNREAD = -3 }; /* this process's memory does not match the layout, or cannot be read */

enum kc_sampler_frames {
    KC_FRAME_OBJECTS = 0,    /* up to 3.10: PyFrameObject linked by f_back */
    KC_FRAMES_BY_CFRAME = 1, /* 3.11 and 3.12: thread -> _PyCFrame -> _PyInterpreterFrame */
    KC_FRAMES_BY_THREAD = 2, /* from 3.13 on: thread -> _PyInterpreterFrame */
};

enum kc_sampler_gil {
    KC_GIL_UNKNOWN = 0,
    KC_GIL_IN_RUNTIME = 1, /* up to 3.11: inside _PyRuntime */
    KC_GIL_BY_POINTER = 2, /* from 3.12 on: each interpreter points to its own */
};

/* Where the running CPython keeps its data: addresses, then offsets in bytes. 0: none. */
struct kc_sampler_layout {
    uint64_t runtime;    /* address of _PyRuntime */
    uint64_t code_type;  /* address of PyCode_Type */
    uint64_t frame_type; /* address of PyFrame_Type; KC_FRAME_OBJECTS only */
    uint32_t frames;     /* kc_sampler_frames */
    uint32_t gil;        /* kc_sampler_gil */
    uint32_t runtime_interpreters;
    uint32_t interpreter_next;
    uint32_t interpreter_threads;
    uint32_t thread_next;
    uint32_t thread_interpreter;
    uint32_t thread_frame; /* pointer to the current frame, or to the _PyCFrame */
    uint32_t thread_id;    /* pthread_t */
    uint32_t thread_native_id;
    uint32_t cframe_frame;
    uint32_t frame_code;
    uint32_t frame_previous;
    uint32_t frame_instruction; /* a pointer into the bytecode; KC_FRAME_OBJECTS: an int32 */
    uint32_t frame_owner;       /* one byte */
    uint32_t instruction_scale; /* KC_FRAME_OBJECTS: bytes of bytecode per unit */
    uint32_t least_shim_owner;  /* frames with this owner or a higher one are internal */
    uint32_t object_type;
    uint32_t object_size; /* ob_size of a variable-sized object */
    uint32_t code_filename;
    uint32_t code_name;
    uint32_t code_first_line;
    uint32_t code_lines;
    uint32_t code_bytecode;  /* 0: in a separate object */
    uint32_t code_names;     /* 0: neither bytecode nor names are recorded */
    uint32_t code_variables; /* names of locals, cells and free variables */
    uint32_t tuple_items;
    uint32_t bytes_value;
    uint32_t text_length;
    uint32_t text_state;
    uint32_t text_kind_shift; /* of the 3 bits of the kind in the state word; compact and ascii follow */
    uint32_t text_ascii;      /* where the characters begin */
    uint32_t text_compact;
    uint32_t gil_offset; /* in _PyRuntime, or of the pointer in the interpreter */
    uint32_t gil_holder;
    uint32_t gil_locked;
    uint32_t interpreter_collecting; /* an int: the garbage collector runs */
    uint32_t line_table_kind;        /* as in SPACE_PYTHON_CODE */
};

struct kc_sampler_frame {
    uint64_t code;       /* address */
    int32_t instruction; /* offset in bytes, -1: unknown */
    uint32_t reserved;
};

struct kc_sampler_config {
    uint64_t buffer_limit_bytes;
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint32_t hz;
    uint32_t max_load_ppm; /* of one core; the rate is lowered beyond it */
};

struct kc_sampler_stop_result {
    struct kc_counts counts;
    uint64_t cpu_ns; /* of the sampler's thread */
    uint64_t ticks;
    uint64_t missed_ticks;
    uint64_t truncated_stacks;
    uint64_t torn_samples;
    uint64_t partial_stacks;    /* of threads that kept running; the innermost calls may be missing */
    uint64_t unnamed_samples;   /* dropped because a table is full */
    uint64_t threads_left_out;  /* the most in one tick */
    uint64_t longest_period_ns; /* between ticks; longer than requested if the rate was lowered */
    uint64_t longest_cost_ns;   /* of one tick then, on average */
    uint64_t timed_out;         /* 1: the thread did not end in time */
};

struct kc_sampler_item {
    int (*set)(void *object, void *key, void *new_value); /* PyObject_SetItem */
    int (*remove)(void *object, void *key);               /* PyObject_DelItem */
    void *object;
    void *key;
    void *new_value; /* NULL: it is removed */
};

KC_EXPORT uint32_t kc_sampler_abi(void);
/* Reads memory by this layout from now on. Fails if memory cannot be read at all. */
KC_EXPORT int kc_sampler_open(const struct kc_sampler_layout *layout, char *error, size_t error_bytes);
/* Reads the stack of the calling thread, innermost frame first; returns the number of frames. `*holds_gil` is 1 if the
 * GIL's owner, as the layout finds it, is this thread. The caller keeps the GIL. */
KC_EXPORT int kc_sampler_look(struct kc_sampler_frame *frames, uint32_t most, uint32_t *holds_gil, char *error,
                              size_t error_bytes);
/* Reads a str object as UTF-8, cut to `bytes`; returns its length. */
KC_EXPORT int kc_sampler_read_text(uint64_t address, char *text, uint32_t bytes);
/* Reads the items of a tuple of str, a NUL after each; returns their length, negative if they need more than
 * `bytes`. */
KC_EXPORT int kc_sampler_read_names(uint64_t address, char *texts, uint32_t bytes);
/* Returns 1 if a thread of any interpreter is inside this code object, or cannot be read, else 0. The caller keeps the
 * GIL, so that the threads of its interpreter stand still. */
KC_EXPORT int kc_sampler_runs(uint64_t code);
/* Changes an item of a Python object if certainly no thread is inside code of this file. The GIL, which the caller
 * keeps, is not released between the check and the change. Returns 1; 0 if nothing is changed; -1 with Python's error
 * set. */
KC_EXPORT int kc_sampler_change_item(const char *file, const struct kc_sampler_item *item);
/* Makes the arena; returns its descriptor, which stays the sampler's. */
KC_EXPORT int kc_sampler_prepare(const struct kc_sampler_config *config, char *error, size_t error_bytes);
KC_EXPORT int kc_sampler_start(char *error, size_t error_bytes);
/* Sets the program's own name of a thread, in place of the kernel's. After kc_sampler_prepare. */
KC_EXPORT int kc_sampler_name(uint32_t tid, const char *name, uint32_t length);
KC_EXPORT int kc_sampler_counts(struct kc_counts *counts);
/* How many ticks this recording has had. */
KC_EXPORT uint64_t kc_sampler_ticks(void);
KC_EXPORT int kc_sampler_stop(uint32_t limit_ms, struct kc_sampler_stop_result *result);
KC_EXPORT int kc_sampler_close(void);

#endif
