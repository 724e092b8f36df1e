/* A libcupti without a GPU: the real ABI of every function that the collector uses.
 *
 * Theory of operation
 *   The "CUDA API" is the fake_* functions. A call writes its records into the current buffer (requested from
 *   the registered callback when there is none); device times follow each other on a stream, so a timeline
 *   looks real. A thread of the library's own ("fake-cupti") hands full buffers to the completed callback, a
 *   flush hands over the current one on the caller's thread, as CUPTI does. Records have the exact sizes and
 *   offsets of CUDA 13.0 (kernel records of 216 bytes) or, with a version below 130000, of 12.8 (208 bytes).
 *
 *   One mutex guards everything, and it is held while a buffer is requested, as in CUPTI; callbacks for
 *   completed buffers and subscribers run without it.
 *
 *   Faults are programmed with fake_set, or for a whole process with KINETO_FAKE_CUPTI=key=value,key=value.
 */
#define _GNU_SOURCE
#include "fake_internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* Numbers and names as in CUDA 13's headers. */
static const struct call {
    uint32_t domain;
    uint32_t cbid;
    const char *name;
} CALLS[] = {
    {DOMAIN_RUNTIME, 10, "cudaGetLastError_v3020"},
    {DOMAIN_RUNTIME, 17, "cudaGetDevice_v3020"},
    {DOMAIN_RUNTIME, 41, "cudaMemcpyAsync_v3020"},
    {DOMAIN_RUNTIME, 51, "cudaMemsetAsync_v3020"},
    {DOMAIN_RUNTIME, 131, "cudaStreamSynchronize_v3020"},
    {DOMAIN_RUNTIME, 211, "cudaLaunchKernel_v7000"},
    {DOMAIN_RUNTIME, 165, "cudaDeviceSynchronize_v3020"},
    {DOMAIN_RUNTIME, 311, "cudaGraphLaunch_v10000"},
    {DOMAIN_RUNTIME, 138, "cudaEventQuery_v3020"},
    {DOMAIN_RUNTIME, 20, "cudaMalloc_v3020"},
    {DOMAIN_DRIVER, 304, "cuCtxGetCurrent"},
    {DOMAIN_DRIVER, 307, "cuLaunchKernel"},
    {DOMAIN_DRIVER, 514, "cuGraphLaunch"},
};
#define CBID_OF_NEXT_YEAR 807u
struct fake fake = {.mutex = PTHREAD_MUTEX_INITIALIZER, .filled_some = PTHREAD_COND_INITIALIZER, .version = 130001};

_Thread_local int fake_in_exit;

void fake_lock(void) { pthread_mutex_lock(&fake.mutex); }
void fake_unlock(void) { pthread_mutex_unlock(&fake.mutex); }

/* ---- buffers and records ---- */

static void hand_over(struct filled filled) {
    const completed_fn completed = fake.completed;
    fake.handing_over++;
    fake_unlock();
    if (completed != NULL) {
        completed(NULL, 0, filled.buffer, filled.size, filled.valid);
    }
    fake_lock();
    fake.handing_over--;
}

static void *run_thread(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "fake-cupti");
    fake_lock();
    for (;;) {
        while (fake.queue_head == fake.queue_tail) {
            pthread_cond_wait(&fake.filled_some, &fake.mutex);
        }
        hand_over(fake.queue[fake.queue_head++ % QUEUE]);
    }
    return NULL;
}

static void queue_current(void) {
    if (!fake.thread_runs) {
        pthread_t thread;
        fake.thread_runs = pthread_create(&thread, NULL, run_thread, NULL) == 0;
    }
    fake.queue[fake.queue_tail++ % QUEUE] = *fake_current();
    memset(fake_current(), 0, sizeof(struct filled));
    pthread_cond_signal(&fake.filled_some);
}

static size_t kernel_bytes(void) { return (fake.version >= 130000 ? 216 : 208) + (size_t)fake.extra_kernel_bytes; }

static size_t record_bytes(uint32_t kind) {
    switch (kind) {
    case MEMCPY: return sizeof(struct copy);
    case MEMSET: return sizeof(struct fill);
    case DRIVER:
    case RUNTIME: return sizeof(struct api);
    case KERNEL: return kernel_bytes();
    case OVERHEAD: return sizeof(struct overhead);
    case SYNC: return sizeof(struct sync);
    default: return 0;
    }
}

static void drop(void) {
    fake.dropped++;
    fake.dropped_total++;
}

static bool make_room(size_t bytes) {
    struct filled *own = fake_current();
    if (own->buffer != NULL && own->size - own->valid < bytes) {
        queue_current();
    }
    if (own->buffer == NULL && fake.requested != NULL && fake.queue_tail - fake.queue_head < QUEUE) {
        size_t records = 0;
        own->valid = 0;
        fake.requested(&own->buffer, &own->size, &records);
    }
    return own->buffer != NULL && own->size >= bytes;
}

/* With the mutex held. `record` may be shorter or longer than what the layout stores. */
void fake_put(uint32_t kind, const void *record, size_t have) {
    if (!fake.enabled[kind]) {
        return;
    }
    const bool wide = kind == KERNEL && fake.one_wide_kernel > 0;
    const size_t bytes = record_bytes(kind) + (wide ? 8 : 0);
    if (fake.drop_next > 0 || !make_room(bytes)) {
        fake.drop_next -= fake.drop_next > 0;
        drop();
        return;
    }
    struct filled *own = fake_current();
    uint8_t *place = own->buffer + own->valid;
    memset(place, 0, bytes);
    memcpy(place, record, have < bytes ? have : bytes);
    if (kind == KERNEL) {
        place[7] = wide ? 0x5a : 0; /* high byte of the registers: lets cuptiActivityGetNextRecord see it */
        fake.one_wide_kernel -= wide;
    }
    fake_stamp(kind, place);
    own->valid += bytes;
    fake.written[kind]++;
}

/* ---- CUPTI ---- */

/* Each of the real library's begins with a call of its own, too. */
__attribute__((noinline)) static void begin(void) {
    __atomic_fetch_add(&fake.entered, 1, __ATOMIC_SEQ_CST);
    fake_wait_ms(&fake.enter_delay_ms);
}

static int64_t own_time_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Whether no thread launches while this one runs for so long. Time without a processor says nothing. */
static bool is_quiet(unsigned (*launched)(void)) {
    static const int64_t LONG_ENOUGH_NS = 200000;
    const unsigned before = launched();
    for (const int64_t begin = own_time_ns(); own_time_ns() - begin < LONG_ENOUGH_NS;) {
        if (launched() != before) {
            return false;
        }
    }
    return true;
}

/* As for a lock of the driver, which threads that launch without a pause leave to nobody else. */
static void wait_for_launches(void) {
    unsigned (*launched)(void) = NULL;
    void *driver = fake.starved == 0 ? NULL : dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver != NULL) {
        *(void **)&launched = dlsym(driver, "fake_driver_launched");
    }
    while (launched != NULL && __atomic_load_n(&fake.starved, __ATOMIC_RELAXED) != 0 && !is_quiet(launched)) {
        usleep(500);
    }
}

int cuptiGetVersion(uint32_t *version) {
    *version = (uint32_t)fake.version;
    return 0;
}

int cuptiGetTimestamp(uint64_t *timestamp) {
    *timestamp = fake_now_ns();
    return 0;
}

int cuptiGetResultString(int result, const char **text) {
    switch (result) {
    case 0: *text = "CUPTI_SUCCESS"; return 0;
    case 12: *text = "CUPTI_ERROR_MAX_LIMIT_REACHED"; return 0;
    case 15: *text = "CUPTI_ERROR_NOT_INITIALIZED"; return 0;
    case 35: *text = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"; return 0;
    case 39: *text = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"; return 0;
    case 999: *text = "CUPTI_ERROR_UNKNOWN"; return 0;
    default: return 1;
    }
}

int cuptiGetCallbackName(uint32_t domain, uint32_t cbid, const char **name) {
    if (fake.names_result != 0) {
        return (int)fake.names_result;
    }
    if (fake.newer_than_driver != 0 && domain == DOMAIN_DRIVER && cbid == CBID_OF_NEXT_YEAR) {
        *name = "cuLaunchOfNextYear";
        return 0;
    }
    static char made_up[DOMAINS][CBIDS][24]; /* calls of no interest */
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        if (CALLS[i].domain == domain && CALLS[i].cbid == cbid) {
            *name = CALLS[i].name;
            return 0;
        }
    }
    const uint32_t most = domain == DOMAIN_RUNTIME ? 522 : domain == DOMAIN_DRIVER ? 806 : 0;
    if (cbid == 0 || cbid > most) {
        return 1;
    }
    snprintf(made_up[domain][cbid], sizeof made_up[domain][cbid], "cu%sOther%u_v1",
             domain == DOMAIN_RUNTIME ? "da" : "", cbid);
    *name = made_up[domain][cbid];
    return 0;
}

int cuptiSetThreadIdType(uint32_t type) { return type == 1 ? 0 : 1; }

int cuptiActivityRegisterCallbacks(requested_fn requested, completed_fn completed) {
    begin();
    if (requested == NULL || completed == NULL) {
        return 1;
    }
    fake_lock();
    fake.misused += fake.kineto;
    fake.requested = requested;
    fake.completed = completed;
    fake_unlock();
    return 0;
}

int cuptiActivityEnableDriverApi(uint32_t call, uint8_t on) {
    (void)call;
    (void)on;
    fake_lock();
    fake.single_calls++;
    fake_unlock();
    return 0;
}

int cuptiActivityEnable(uint32_t kind) {
    begin();
    fake_take_time();
    if (kind >= KINDS) {
        return 21;
    }
    if (fake.refuse_result != 0 && (fake.refuse_kind == (long)kind || fake.refuse_kind == 0)) {
        return (int)fake.refuse_result;
    }
    fake_lock();
    /* The real library then loses the kernels of a thread that is launching. */
    fake.misused += fake.kineto || ((kind == MEMCPY || kind == MEMSET) && !fake.enabled[KERNEL]);
    fake.enabled[kind] = 1;
    fake.hooked = true;
    fake_unlock();
    return 0;
}

int cuptiActivityDisable(uint32_t kind) {
    begin();
    if (kind >= KINDS) {
        return 21;
    }
    fake_lock();
    fake.misused += fake.kineto;
    fake.enabled[kind] = 0;
    fake_unlock();
    return 0;
}

/* Blocks until every buffer is with the client, like CUPTI. */
int cuptiActivityFlushAll(uint32_t flag) {
    if (flag == 1) {
        fake_wait_ms(&fake.flush_delay_ms);
    }
    fake_lock();
    if (fake.completed == NULL) {
        fake_unlock();
        return 7;
    }
    if (fake.hold_a_buffer > 0 && fake_current()->buffer == NULL) {
        (void)make_room(1);
    }
    while (fake.queue_head != fake.queue_tail || fake.handing_over > 0) {
        if (fake.queue_head != fake.queue_tail) {
            hand_over(fake.queue[fake.queue_head++ % QUEUE]);
        } else {
            fake_unlock();
            usleep(50);
            fake_lock();
        }
    }
    for (uint32_t i = 0; i < THREADS && fake.hold_a_buffer == 0; i++) {
        const struct filled filled = fake.current[i];
        if (filled.buffer != NULL) {
            memset(&fake.current[i], 0, sizeof filled);
            hand_over(filled);
        }
    }
    fake_unlock();
    return 0;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
    (void)context;
    (void)stream;
    fake_lock();
    *dropped = fake.dropped;
    fake.dropped = 0;
    fake_unlock();
    return 0;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, void **record) {
    uint8_t *next = buffer;
    if (*record != NULL) {
        uint32_t kind;
        memcpy(&kind, *record, sizeof kind);
        const uint8_t *bytes = *record;
        next = (uint8_t *)*record + record_bytes(kind) + (kind == KERNEL && bytes[7] == 0x5a ? 8 : 0);
    }
    if (next >= buffer + valid) {
        return 12;
    }
    *record = next;
    return 0;
}

int cuptiSubscribe(void **subscriber, callback_fn callback, void *user) {
    begin();
    fake_wait_ms(&fake.subscribe_delay_ms);
    wait_for_launches();
    if (fake.subscribe_result != 0) {
        return (int)fake.subscribe_result;
    }
    fake_lock();
    const bool taken = fake.callback != NULL;
    if (!taken) {
        /* The real library makes its tables now, while its hooks already read them: CUDA calls crash. */
        fake.misused += fake.hooked && !fake.had_subscriber;
        fake.had_subscriber = true;
        fake.callback = callback;
        fake.callback_user = user;
        *subscriber = &fake;
    }
    fake_unlock();
    return taken ? 39 : 0;
}

static void forget_subscriber(void) {
    fake.callback = NULL;
    memset(fake.domain_on, 0, sizeof fake.domain_on);
    memset(fake.call_on, 0, sizeof fake.call_on);
}

int cuptiUnsubscribe(void *subscriber) {
    if (subscriber != &fake) {
        return 1;
    }
    fake_lock();
    forget_subscriber();
    fake_unlock();
    return 0;
}

int cuptiEnableDomain(uint32_t enable, void *subscriber, uint32_t domain) {
    if (subscriber != &fake || domain >= DOMAINS) {
        return 1;
    }
    fake_lock();
    fake.domain_on[domain] = enable != 0;
    memset(fake.call_on[domain], 0, CBIDS);
    fake_unlock();
    return 0;
}

int cuptiEnableCallback(uint32_t enable, void *subscriber, uint32_t domain, uint32_t cbid) {
    const bool unknown = domain == DOMAIN_DRIVER && cbid == CBID_OF_NEXT_YEAR; /* to the driver */
    if (subscriber != &fake || domain >= DOMAINS || cbid >= CBIDS || unknown) {
        return 1;
    }
    fake_lock();
    fake.call_on[domain][cbid] = enable != 0;
    fake_unlock();
    return 0;
}

int cuptiFinalize(void) {
    begin();
    fake_wait_ms(&fake.finalize_delay_ms);
    wait_for_launches();
    fake_lock();
    if (fake.finalize_result != 0) {
        fake_unlock();
        return (int)fake.finalize_result;
    }
    if (fake_in_exit == 0 || fake.kineto) {
        fake.misused++;
        fake_unlock();
        return 999;
    }
    fake.misused += fake.graph_recorded != 0; /* a later launch of that graph ends the program */
    memset(fake.enabled, 0, sizeof fake.enabled);
    if (fake.return_at_finalize != 0 && fake_current()->buffer != NULL) {
        hand_over(*fake_current());
    }
    memset(fake.current, 0, sizeof fake.current);
    fake.requested = NULL;
    fake.completed = NULL;
    forget_subscriber();
    for (; fake.drop_at_finalize > 0; fake.drop_at_finalize--) {
        drop();
    }
    fake.hooked = false;
    fake.finalized++;
    fake_unlock();
    return 0;
}

/* ---- controls ---- */

static const struct {
    const char *key;
    long *value;
} SETTINGS[] = {
    {"version", &fake.version},
    {"subscribe_result", &fake.subscribe_result},
    {"refuse_kind", &fake.refuse_kind}, /* 0: every kind */
    {"refuse_result", &fake.refuse_result},
    {"drop_next", &fake.drop_next},
    {"extra_kernel_bytes", &fake.extra_kernel_bytes},
    {"one_wide_kernel", &fake.one_wide_kernel},
    {"hold_a_buffer", &fake.hold_a_buffer},
    {"names_result", &fake.names_result},
    {"flush_delay_ms", &fake.flush_delay_ms},
    {"enable_delay_ms", &fake.enable_delay_ms},
    {"enter_delay_ms", &fake.enter_delay_ms},
    {"finalize_result", &fake.finalize_result},
    {"finalize_delay_ms", &fake.finalize_delay_ms},
    {"subscribe_delay_ms", &fake.subscribe_delay_ms},
    {"starved", &fake.starved},
    {"drop_at_finalize", &fake.drop_at_finalize},
    {"return_at_finalize", &fake.return_at_finalize},
    {"graph_recorded", &fake.graph_recorded},
    {"newer_than_driver", &fake.newer_than_driver},
    {"context", &fake.context},
    {"per_thread", &fake.per_thread},
};

int fake_set(const char *key, long value) {
    for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++) {
        if (strcmp(SETTINGS[i].key, key) == 0) {
            fake_lock();
            __atomic_store_n(SETTINGS[i].value, value, __ATOMIC_RELAXED);
            fake_unlock();
            return 0;
        }
    }
    return -1;
}

__attribute__((constructor)) static void set_from_environment(void) {
    const char *settings = getenv("KINETO_FAKE_CUPTI");
    if (settings == NULL) {
        return;
    }
    char *copy = strdup(settings);
    char *rest = copy;
    for (char *item = strtok_r(copy, ",", &rest); item != NULL; item = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(item, '=');
        if (value != NULL) {
            *value = 0;
            (void)fake_set(item, strtol(value + 1, NULL, 0));
        }
    }
    free(copy);
}

static uint64_t read_locked(const uint64_t *value) {
    fake_lock();
    const uint64_t result = *value;
    fake_unlock();
    return result;
}

uint64_t fake_written(uint32_t kind) { return kind < KINDS ? read_locked(&fake.written[kind]) : 0; }
uint64_t fake_single_calls(void) { return read_locked(&fake.single_calls); }
uint64_t fake_entered(void) { return __atomic_load_n(&fake.entered, __ATOMIC_RELAXED); }
int fake_is_enabled(uint32_t kind) { return kind < KINDS && fake.enabled[kind]; }
uint64_t fake_dropped(void) { return read_locked(&fake.dropped_total); }
uint64_t fake_finalized(void) { return read_locked(&fake.finalized); }
void fake_unregister(void) {
    fake_lock();
    fake.requested = NULL;
    fake.completed = NULL;
    fake.misused = 0; /* by those before */
    fake_unlock();
}

int fake_subscribed(void) {
    fake_lock();
    const bool subscribed = fake.callback != NULL;
    fake_unlock();
    return subscribed;
}

uint64_t fake_misused(void) { return read_locked(&fake.misused); }

int fake_attached(void) {
    fake_lock();
    int attached = fake.requested != NULL;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        attached |= fake.enabled[kind];
    }
    fake_unlock();
    return attached;
}
