/* See libtorch_api.h.
 *
 * The checks construct a RecordFunction in our own memory, filled with a pattern before, and check what torch's own
 * constructor has stored where. It never runs: its callbacks are chosen, not called. Then it is destroyed.
 *
 * Threads: the agent's.
 * Blocks: inside torch while callbacks are registered, and in the loader.
 */
#define _GNU_SOURCE
#include "torch/libtorch_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define SPACE_BYTES 4096u /* a RecordFunction takes 300 to 400 */
#define PATTERN 0xA5
#define SCOPE_USER 7u
#define SCOPE_OTHER 8u

int ops_torch_open(struct ops_torch *torch, const char *path, char *error, size_t error_bytes) {
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(error, error_bytes, "%s is not loaded", path);
        return KC_LIBRARY;
    }
    const struct {
        void *place;
        const char *name;
    } wanted[] = {
        {&torch->name, "_ZNK2at14RecordFunction4nameEv"},
        {&torch->add, "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE"},
        {&torch->remove, "_ZN2at14removeCallbackEm"},
        {&torch->thread, "_ZN2at14RecordFunction15currentThreadIdEv"},
        {&torch->construct, "_ZN2at14RecordFunctionC1ENS_11RecordScopeE"},
        {&torch->destroy, "_ZN2at14RecordFunctionD1Ev"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (found == NULL) {
            snprintf(error, error_bytes, "%s has no function %s", path, wanted[i].name);
            dlclose(library);
            return KC_LIBRARY;
        }
        memcpy(wanted[i].place, &found, sizeof found);
    }
    return 0; /* the library stays loaded: our callbacks may outlive a recording in its threads */
}

/* The offset in a RecordFunction of `scope` at which the two callbacks lie side by side, -1: nowhere. */
static long find(const struct ops_torch *torch, uint8_t scope, const struct ops_callback *callback) {
    _Alignas(64) uint8_t space[SPACE_BYTES];
    long found = -1;
    memset(space, PATTERN, sizeof space);
    torch->construct(space, scope);
    for (size_t i = 0; found < 0 && i + 2 * sizeof(void *) <= sizeof space; i += sizeof(void *)) {
        if (memcmp(space + i, callback, 2 * sizeof(void *)) == 0) {
            found = (long)i;
        }
    }
    torch->destroy(space);
    return found;
}

bool ops_torch_takes(const struct ops_torch *torch, struct ops_callback callback) {
    memset(callback.scopes, 0, sizeof callback.scopes);
    callback.scopes[OPS_SCOPE_UNUSED] = 1;
    const uint64_t handle = torch->add(callback);
    const bool wanted = find(torch, OPS_SCOPE_UNUSED, &callback) >= 0;
    const bool unwanted = find(torch, SCOPE_OTHER, &callback) >= 0;
    torch->remove(handle);
    return wanted && !unwanted && find(torch, OPS_SCOPE_UNUSED, &callback) < 0;
}

static bool untouched(const uint8_t *at, const uint8_t *end) {
    while (at < end && *at == PATTERN) {
        at++;
    }
    return at == end;
}

bool ops_torch_fits(const struct ops_torch *torch, const struct kc_observer_layout *layout) {
    static const uint8_t none[16];
    const int64_t no_sequence = -1;
    _Alignas(64) uint8_t space[SPACE_BYTES];
    if (layout->function_bytes > sizeof space / 2) {
        return false;
    }
    memset(space, PATTERN, sizeof space);
    torch->construct(space, SCOPE_USER);
    const bool fits = space[layout->function_scope] == SCOPE_USER &&
                      memcmp(space + layout->function_sequence, &no_sequence, sizeof no_sequence) == 0 &&
                      memcmp(space + layout->function_inputs, none, 16) == 0 &&
                      memcmp(space + layout->function_forward_thread, none, 8) == 0 &&
                      untouched(space + layout->function_bytes, space + sizeof space);
    torch->destroy(space);
    return fits;
}
