/* See callable_names.h.
 *
 * Theory of operation
 *   A number stands for a code object, a C function or a module, by its address; its text enters the string table when
 *   it is first seen. C functions have odd numbers. Code objects are kept alive until the end of the recording, so that
 *   no other gets the address of one. C functions and modules are not: that would keep the program's objects alive. A
 *   module is identified by its address and type, and a C function by the address of its definition, which some
 *   libraries free, and its name.
 *
 * Threads: that of on_event (call_tracer.c), with the GIL; python_find and python_names_prepare run on the agent's
 *   without it.
 * Blocks: never waits. The interpreter's functions used for a new callable (attributes of code objects and frames) run
 *   no code of the program.
 */
#define _GNU_SOURCE
#include "python/callable_names.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define NAMES_SLOTS (1u << 18)
#define NAMES_MOST (NAMES_SLOTS / 4 * 3)
#define TEXT_BYTES 1024u

/* The beginning of objects in builds without free threading and without reference tracing. */
struct object {
    int64_t references;
    struct type *type;
};
struct type {
    struct object object;
    int64_t size;
    const char *name;
};
struct method {
    const char *name;
};
struct c_function {
    struct object object;
    const struct method *method;
    const struct object *self;
};

struct name {
    uint64_t key;  /* address; 0: empty */
    uint64_t type; /* modules: of their type; C functions: a hash of the name */
    uint64_t value;
    bool is_code; /* a code object, kept alive */
};

struct python python;

static const struct {
    const char *name;
    size_t offset;
} FUNCTIONS[] = {
#define FUNCTION(field, symbol) {symbol, offsetof(struct python, field)}
    FUNCTION(main_interpreter, "PyInterpreterState_Main"),
    FUNCTION(newest_interpreter, "PyInterpreterState_Head"),
    FUNCTION(first_thread, "PyInterpreterState_ThreadHead"),
    FUNCTION(next_thread, "PyThreadState_Next"),
    FUNCTION(this_thread, "PyThreadState_Get"),
    FUNCTION(set_profile, "_PyEval_SetProfile"),
    FUNCTION(frame_back, "PyFrame_GetBack"),
    FUNCTION(frame_code, "PyFrame_GetCode"),
    FUNCTION(keep, "Py_IncRef"),
    FUNCTION(let_go, "Py_DecRef"),
    FUNCTION(attribute, "PyObject_GetAttrString"),
    FUNCTION(item, "PyMapping_GetItemString"),
    FUNCTION(text, "PyUnicode_AsUTF8"),
    FUNCTION(number, "PyLong_AsLong"),
    FUNCTION(clear_error, "PyErr_Clear"),
};

static struct {
    struct arena *arena;
    void *module_call;
    struct name *names;
    uint32_t used;
    uint32_t next;
    uint64_t lost;
} self;

const char *python_find(void) {
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; i++) {
        void *found = dlsym(RTLD_DEFAULT, FUNCTIONS[i].name);
        if (found == NULL) {
            return FUNCTIONS[i].name;
        }
        memcpy((char *)&python + FUNCTIONS[i].offset, &found, sizeof found);
    }
    return NULL;
}

/* The slot of the key, which may be empty; NULL if the table is full. */
static struct name *slot_of(uint64_t key, uint64_t type) {
    uint64_t at = (key ^ type * 31) * 0x9E3779B97F4A7C15u >> 40 & (NAMES_SLOTS - 1);
    while (self.names[at].key != 0 && (self.names[at].key != key || self.names[at].type != type)) {
        at = (at + 1) & (NAMES_SLOTS - 1);
    }
    if (self.names[at].key == 0) {
        if (self.used >= NAMES_MOST) {
            return NULL;
        }
        self.names[at].key = key;
        self.names[at].type = type;
        self.used++;
    }
    return &self.names[at];
}

static uint32_t named(struct name *slot, const char *text, int length) {
    const uint32_t bytes = length < 0 ? 0 : (uint32_t)length < TEXT_BYTES ? (uint32_t)length : TEXT_BYTES - 1;
    slot->value = self.next | (text[0] == 'C');
    self.next += 2;
    self.lost += !arena_add_string(self.arena, slot->value, ARENA_SPACE_PYTHON_CALL, text, bytes);
    return (uint32_t)slot->value;
}

static const char *or_unknown(const char *text) { return text != NULL ? text : "?"; }

static uint32_t name_of_code(void *code) {
    struct name *slot = slot_of((uint64_t)code, 0);
    if (slot == NULL) {
        self.lost++;
        return ARENA_CALL_UNKNOWN;
    }
    if (slot->value != 0) {
        return (uint32_t)slot->value;
    }
    char text[TEXT_BYTES];
    python.keep(code);
    slot->is_code = true;
    void *file = python.attribute(code, "co_filename"), *line = python.attribute(code, "co_firstlineno");
    void *name = python.attribute(code, "co_qualname");
    if (name == NULL) { /* before Python 3.11 */
        python.clear_error();
        name = python.attribute(code, "co_name");
    }
    const int length = snprintf(text, sizeof text, "F%s\n%ld\n%s", or_unknown(file ? python.text(file) : NULL),
                                line ? python.number(line) : 0, or_unknown(name ? python.text(name) : NULL));
    python.let_go(file);
    python.let_go(line);
    python.let_go(name);
    python.clear_error();
    return named(slot, text, length);
}

static uint32_t name_of_module(struct object *module) {
    struct name *slot = slot_of((uint64_t)module, (uint64_t)module->type);
    struct name *of_type = slot_of((uint64_t)module->type, 1);
    if (slot == NULL || of_type == NULL) {
        self.lost++;
        return ARENA_CALL_UNKNOWN;
    }
    if (slot->value != 0) {
        return (uint32_t)slot->value;
    }
    char text[TEXT_BYTES];
    const int length = snprintf(text, sizeof text, "M%s\n%lu", module->type->name, (unsigned long)of_type->value++);
    return named(slot, text, length);
}

/* FNV-1a. */
static uint64_t hash_of(const char *text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; text != NULL && *text != 0; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return hash;
}

uint32_t python_name_of_c_function(const void *object) {
    const struct c_function *function = object;
    const struct method *method = function->method;
    struct name *slot = slot_of((uint64_t)method, hash_of(method->name));
    if (slot == NULL) {
        self.lost++;
        return ARENA_CALL_UNKNOWN | 1;
    }
    if (slot->value != 0) {
        return (uint32_t)slot->value;
    }
    char text[TEXT_BYTES];
    const char *type = function->self != NULL ? function->self->type->name : "module";
    const int length = strcmp(type, "module") == 0
                           ? snprintf(text, sizeof text, "C<built-in function %s>", or_unknown(method->name))
                           : snprintf(text, sizeof text, "C<built-in method %s of %s object>", or_unknown(method->name),
                                      type);
    return named(slot, text, length);
}

uint32_t python_name_of_frame(void *frame) {
    void *code = python.frame_code(frame);
    uint32_t name = 0;
    if (code == self.module_call) {
        void *locals = python.attribute(frame, "f_locals");
        struct object *module = locals != NULL ? python.item(locals, "self") : NULL;
        name = module != NULL ? name_of_module(module) : 0;
        python.let_go(module);
        python.let_go(locals);
        python.clear_error();
    }
    if (name == 0) {
        name = name_of_code(code);
    }
    python.let_go(code);
    return name;
}

bool python_calls_module(void *frame) {
    void *code = python.frame_code(frame);
    python.let_go(code);
    return code == self.module_call;
}

bool python_names_prepare(void) {
    if (self.names == NULL) {
        void *names = mmap(NULL, NAMES_SLOTS * sizeof *self.names, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);
        self.names = names == MAP_FAILED ? NULL : names;
    }
    return self.names != NULL;
}

void python_names_begin(struct arena *arena, void *module_call) {
    self.arena = arena;
    self.module_call = module_call;
    self.next = ARENA_CALL_FIRST;
    self.lost = 0;
}

uint64_t python_names_end(void) {
    for (uint32_t i = 0; i < NAMES_SLOTS && self.used > 0; i++) {
        if (self.names[i].key != 0 && self.names[i].is_code) {
            python.let_go((void *)self.names[i].key); // NOLINT: an object
        }
    }
    (void)madvise(self.names, NAMES_SLOTS * sizeof *self.names, MADV_DONTNEED); /* private: zeros again */
    self.used = 0;
    return self.lost;
}

void python_names_forked(void) {
    if (self.names != NULL) {
        (void)madvise(self.names, NAMES_SLOTS * sizeof *self.names, MADV_DONTNEED); /* the code objects stay alive */
        self.used = 0;
    }
}
