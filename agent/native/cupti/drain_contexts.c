/* See drain_contexts.h.
 *
 * Threads: the dedicated one of device_drain.c; driver_find and contexts_steps also on the agent's.
 * Blocks: inside the driver, and 0.4 s at most, in all, before calls of it.
 */
#define _GNU_SOURCE
#include "cupti/drain_contexts.h"

#include <dlfcn.h>
#include <stddef.h>

#include "cupti/capture_gate.h"
#include "cupti/cupti_gate.h"
#include "cupti/device_drain.h"

#define PRIMARY_MOST 16
#define LEGACY_STREAM ((void *)1)
enum { EVENT_DISABLE_TIMING = 2 };

void *drain_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library != NULL) {
        dlclose(library); /* it stays: CUDA is never unloaded */
    }
    return library;
}

bool driver_find(struct drain_driver *driver) {
    driver->library = drain_driver();
    if (driver->library == NULL) {
        return false;
    }
    bool all = true;
#define FIND(field, name, parameters)                          \
    *(void **)&driver->field = dlsym(driver->library, (name)); \
    all = all && driver->field != NULL;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    return all;
}

void contexts_answered(struct drain_contexts *contexts) { __atomic_fetch_add(&contexts->steps, 1, __ATOMIC_SEQ_CST); }

uint32_t contexts_steps(const struct drain_contexts *contexts) {
    return __atomic_load_n(&contexts->steps, __ATOMIC_SEQ_CST);
}

static void another_tool_enters(void *contexts) {
    launches_release(launches_held_until_ns());
    contexts_answered(contexts); /* we wait for that tool and not for the driver, so launches need not pause */
}

void contexts_call_begin(struct drain_contexts *contexts) {
    if (contexts->begun++ == 0) {
        gate_driver_begin(&contexts->may_wait_ns, another_tool_enters, contexts);
    }
}

void contexts_call_end(struct drain_contexts *contexts) {
    if (--contexts->begun == 0) {
        gate_driver_end();
    }
    contexts_answered(contexts);
}

static int in_context(struct drain_contexts *contexts, struct drain_context *context, context_call call) {
    contexts_call_begin(contexts);
    const bool stands = !context->noted || context_enter(context->entry, context->generation);
    int code = SUCCESS; /* destroyed, and its events with it */
    if (stands) {
        const int result = contexts->driver.set_current(context->handle);
        code = result == SUCCESS ? call(&contexts->driver, context) : context->noted ? SUCCESS : result;
    }
    if (stands && context->noted) {
        context_leave();
    }
    contexts_call_end(contexts);
    return code;
}

int contexts_each(struct drain_contexts *contexts, context_call call) {
    for (int i = 0; i < contexts->count; i++) {
        const int code = in_context(contexts, &contexts->all[i], call);
        if (code != SUCCESS) {
            return code;
        }
    }
    return SUCCESS;
}

int context_make_events(const struct drain_driver *driver, struct drain_context *context) {
    const int made = driver->event_create(&context->anchor, EVENT_DISABLE_TIMING);
    return made != SUCCESS ? made : driver->event_create(&context->probe, EVENT_DISABLE_TIMING);
}

static int destroy_events(const struct drain_driver *driver, struct drain_context *context) {
    if (context->anchor != NULL) {
        (void)driver->event_destroy(context->anchor);
    }
    if (context->probe != NULL) {
        (void)driver->event_destroy(context->probe);
    }
    return SUCCESS;
}

int context_ask_legacy_stream(const struct drain_driver *driver, struct drain_context *context) {
    int capturing = 0;
    (void)context;
    return driver->is_capturing(LEGACY_STREAM, &capturing);
}

/* A thread that did not get to run may reach this long after the moment. */
static int record_now(const struct drain_driver *driver, const struct drain_context *context, void *event) {
    return capture_gate_recording() ? driver->record(context->handle, event) : CAPTURE_IMPLICIT;
}

int context_record_anchor(const struct drain_driver *driver, struct drain_context *context) {
    return record_now(driver, context, context->anchor);
}

int context_record_probe(const struct drain_driver *driver, struct drain_context *context) {
    return record_now(driver, context, context->probe);
}

int context_query_anchor(const struct drain_driver *driver, struct drain_context *context) {
    return driver->event_query(context->anchor);
}

int context_query_probe(const struct drain_driver *driver, struct drain_context *context) {
    return driver->event_query(context->probe);
}

static bool is_known(const struct drain_contexts *contexts, const void *handle) {
    for (int i = 0; i < contexts->count; i++) {
        const struct drain_context *known = &contexts->all[i];
        uint32_t generation = known->generation;
        const bool stands = !known->noted || context_noted(known->entry, &generation) == handle;
        if (known->handle == handle && stands && generation == known->generation) {
            return true;
        }
    }
    return false;
}

int contexts_add_noted(struct drain_contexts *contexts) {
    for (uint32_t i = 0; i < CONTEXTS_NOTED && contexts->count < CONTEXTS_MOST; i++) {
        struct drain_context context = {.noted = true, .entry = i};
        context.handle = context_noted(i, &context.generation);
        if (context.handle != NULL && !is_known(contexts, context.handle)) {
            const int code = in_context(contexts, &context, context_make_events);
            if (code != SUCCESS) {
                return code;
            }
            contexts->all[contexts->count++] = context;
        }
    }
    return SUCCESS;
}

static int count_devices(struct drain_contexts *contexts) {
    int devices = 0;
    contexts_call_begin(contexts);
    const int result = contexts->driver.device_count(&devices);
    contexts_call_end(contexts);
    return result == SUCCESS ? devices : -1;
}

bool contexts_find(struct drain_contexts *contexts) {
    const int devices = count_devices(contexts);
    for (int device = 0; device < devices && contexts->count < PRIMARY_MOST; device++) {
        unsigned flags = 0;
        int active = 0;
        struct drain_context context = {.device = device};
        contexts_call_begin(contexts);
        if (contexts->driver.primary_state(device, &flags, &active) == SUCCESS && active &&
            contexts->driver.retain(&context.handle, device) == SUCCESS) {
            contexts->all[contexts->count++] = context;
        }
        contexts_call_end(contexts);
    }
    return devices >= 0;
}

void contexts_close(struct drain_contexts *contexts) {
    (void)contexts_each(contexts, destroy_events);
    for (int i = 0; i < contexts->count; i++) {
        if (!contexts->all[i].noted) {
            contexts_call_begin(contexts);
            (void)contexts->driver.release(contexts->all[i].device);
            contexts_call_end(contexts);
        }
    }
}
