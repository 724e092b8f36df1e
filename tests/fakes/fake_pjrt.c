// A PJRT plug-in with nothing but a profiler, with the ABI of xla/pjrt/c/pjrt_c_api_profiler_extension.h and
// xla/backends/profiler/plugin/profiler_c_api.h. FAKE_PJRT names what is peculiar about it:
//   owned           the first call that collects data returns the address of the plug-in's own copy
//   swapped         buffer and size of the collected data have changed places
//   small           its PLUGIN_Profiler_Api ends before the last function
//   none            it has other extensions, but no profiler
//   refuse-create, refuse-start, refuse-collect     that function returns an error
// What it records is "XSPACE", then a byte for each call that it got: c s t d x (create, start, stop, collect, destroy).
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t struct_size;
    int type;
    void *next;
} Base;
typedef struct {
    char text[32];
} Error;
typedef struct {
    size_t size;
    void *priv;
    Error *error;
    const char *message;
    size_t message_size;
} ErrorArgs;
typedef struct {
    size_t size;
    const char *options;
    size_t options_size;
    void *profiler;
} CreateArgs;
typedef struct {
    size_t size;
    void *profiler;
    void *buffer;
    size_t bytes;
} Args;

static char data[64] = "XSPACE";
static int errors; // that nobody has freed

static int peculiar(const char *word) {
    const char *found = getenv("FAKE_PJRT");
    return found != NULL && strcmp(found, word) == 0;
}

static Error *answer(const char *word, char call) {
    data[strlen(data)] = call;
    if (!peculiar(word)) {
        return NULL;
    }
    Error *error = calloc(1, sizeof *error);
    strcpy(error->text, "another session is active");
    errors++;
    return error;
}

static void error_destroy(ErrorArgs *args) {
    free(args->error);
    errors--;
}

static void error_message(ErrorArgs *args) {
    args->message = args->error->text;
    args->message_size = strlen(args->error->text);
}

static Error *error_get_code(ErrorArgs *args) {
    (void)args;
    return NULL;
}

static Error *create(CreateArgs *args) {
    args->profiler = data;
    return answer("refuse-create", 'c');
}

static Error *destroy(Args *args) {
    (void)args;
    return answer("refuse-destroy", 'x');
}

static Error *start(Args *args) {
    (void)args;
    return answer("refuse-start", 's');
}

static Error *stop(Args *args) {
    (void)args;
    return answer("refuse-stop", 't');
}

static Error *collect(Args *args) {
    Error *error = answer("refuse-collect", 'd');
    const size_t bytes = strlen(data);
    if (peculiar("swapped")) {
        args->buffer = (void *)bytes;
        args->bytes = (size_t)data;
        return error;
    }
    if (args->buffer != NULL) {
        memcpy(args->buffer, data, args->bytes);
    } else {
        args->bytes = bytes + (peculiar("owned") ? 0 : 1); // one more for the second call
    }
    if (peculiar("owned")) {
        args->buffer = data;
    }
    return error;
}

static struct {
    size_t struct_size;
    void *priv;
    void *functions[8];
} api;
static struct {
    Base base;
    void *api;
    int64_t context;
} profiler = {{40, 1, NULL}, &api, 0};
static Base other = {24, 3, &profiler};
static struct {
    size_t struct_size;
    Base *extensions;
} pjrt = {16, &other};

int fake_pjrt_errors(void) { return errors; }

void *GetPjrtApi(void) {
    void *functions[] = {error_destroy, error_message, error_get_code, create, destroy, start, stop, collect};
    memcpy(api.functions, functions, sizeof functions);
    api.struct_size = peculiar("small") ? 72 : 80;
    other.next = peculiar("none") ? NULL : &profiler;
    return &pjrt;
}
