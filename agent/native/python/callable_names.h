/* The interpreter's functions, and the numbers of callables in the string table of a recording.
 *
 * Everything except python_find and python_names_prepare is called with the GIL held.
 */
#ifndef KINETO_PYTHON_NAMES_H
#define KINETO_PYTHON_NAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "common/arena.h"

typedef int (*profile_function)(void *, void *, int, void *);

/* Set by python_find. */
extern struct python {
    void *(*main_interpreter)(void);
    void *(*newest_interpreter)(void);
    void *(*first_thread)(void *);
    void *(*next_thread)(void *);
    void *(*this_thread)(void);
    int (*set_profile)(void *, profile_function, void *);
    void *(*frame_back)(void *);
    void *(*frame_code)(void *);
    void (*keep)(void *);
    void (*let_go)(void *);
    void *(*attribute)(void *, const char *);
    void *(*item)(void *, const char *);
    const char *(*text)(void *);
    long (*number)(void *);
    void (*clear_error)(void);
} python;

/* Finds the functions; returns the name of a missing one, or NULL. */
const char *python_find(void);

/* False if there is no memory. */
bool python_names_prepare(void);
/* module_call: the code object of torch.nn.Module.__call__, or NULL. */
void python_names_begin(struct arena *arena, void *module_call);
/* Releases the kept objects; returns the number of calls whose names found no room. */
uint64_t python_names_end(void);
void python_names_forked(void);

uint32_t python_name_of_frame(void *frame);
/* Whether the frame is that of torch.nn.Module.__call__. */
bool python_calls_module(void *frame);
/* function: the argument of the profile function for a C call. */
uint32_t python_name_of_c_function(const void *function);

#endif
