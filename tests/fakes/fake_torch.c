/* See fake_torch.h. The names are the mangled ones of the real library. */
#include "fake_torch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define GLOBAL_CALLBACKS 16u

struct callback { /* at::RecordFunctionCallback */
    void *start;
    void *end;
    double probability;
    uint8_t scopes[10];
    uint8_t needs_inputs;
    uint8_t needs_outputs;
    uint8_t needs_ids;
};

static struct {
    uint64_t handle;
    struct callback callback;
} callbacks[GLOBAL_CALLBACKS];
static uint64_t handles;
static int strange;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_set_strange(int value) { strange = value; }

uint64_t _ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE(struct callback callback) {
    uint64_t handle = 0;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < GLOBAL_CALLBACKS && handle == 0; i++) {
        if (callbacks[i].handle == 0) {
            handle = callbacks[i].handle = ++handles;
            callbacks[i].callback = callback;
        }
    }
    pthread_mutex_unlock(&lock);
    return handle;
}

void _ZN2at14removeCallbackEm(uint64_t handle) {
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < GLOBAL_CALLBACKS; i++) {
        if (callbacks[i].handle == handle) {
            callbacks[i].handle = 0;
        }
    }
    pthread_mutex_unlock(&lock);
}

const char *_ZNK2at14RecordFunction4nameEv(const struct fake_function *function) { return function->name; }

uint64_t _ZN2at14RecordFunction15currentThreadIdEv(void) {
    static _Atomic uint64_t last;
    static _Thread_local uint64_t own;
    if (own == 0) {
        own = atomic_fetch_add(&last, 1) + 1;
    }
    return own;
}

void _ZN2at14RecordFunctionC1ENS_11RecordScopeE(struct fake_function *function, uint8_t scope) {
    memset(function, 0, sizeof *function);
    function->scope = scope;
    function->sequence = -1;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < GLOBAL_CALLBACKS; i++) {
        const struct callback *callback = &callbacks[i].callback;
        const uint32_t place = strange ? scope + 1u : scope;
        if (callbacks[i].handle != 0 && callback->scopes[place % 10] && function->count < FAKE_CALLBACKS) {
            function->pairs[function->count].start = callback->start;
            function->pairs[function->count++].end = callback->end;
            function->inputs_wanted |= callback->needs_inputs;
        }
    }
    pthread_mutex_unlock(&lock);
}

static void run(struct fake_function *function) {
    function->started = 1;
    for (uint32_t i = 0; i < function->count; i++) {
        void *context = function;
        void *(*start)(void **, const void *);
        memcpy(&start, &function->pairs[i].start, sizeof start);
        if (start(&context, function) != &context || context != NULL) {
            __builtin_trap();
        }
    }
}

void fake_begin(struct fake_function *function, uint8_t scope, const char *name) {
    _ZN2at14RecordFunctionC1ENS_11RecordScopeE(function, scope);
    function->name = name;
    run(function);
}

void fake_begin_with(struct fake_function *function, const char *name, int64_t sequence, uint64_t forward_thread,
                     const struct fake_value *inputs, uint64_t count) {
    _ZN2at14RecordFunctionC1ENS_11RecordScopeE(function, forward_thread ? 1 : 0);
    function->name = name;
    function->sequence = sequence;
    function->forward_thread = forward_thread;
    if (function->inputs_wanted) {
        function->inputs = inputs;
        function->input_count = count;
    }
    run(function);
}

void fake_end(struct fake_function *function) {
    for (uint32_t i = 0; function->started && i < function->count; i++) {
        void (*end)(const void *, void *);
        memcpy(&end, &function->pairs[i].end, sizeof end);
        end(function, NULL);
    }
    function->started = 0;
}

void _ZN2at14RecordFunctionD1Ev(struct fake_function *function) { fake_end(function); }
