/* Drives the collector while another user of CUPTI comes at any moment, in one program, for the sanitizers.
 *
 *   drive_cupti_gate LIBCUPTI [dense|full|none]
 *
 * The other user looked CUPTI's functions up before us. Whatever our captures do, each of his calls succeeds and he gets
 * all of his kernels. In between a child is forked that uses CUPTI's functions, too. Exits with 0 if that is so.
 * Nobody is kept waiting for long: where the machine gives our threads no time in its limits, he goes on
 * beside our recording. His subscription is refused then, until that capture is over, and it knows that he came.
 * If there is no more room around the library than in a JAX program (`dense`), or only its own (`full`: some calls
 * may then have no gate), he comes but once. If there is not even that (`none`), a recording says so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "dense.h"
#include "cupti/collector.h"
#include "cupti/cupti_gate.h"
#include "kit/collector.h"
#include "patching/code_space.h"
#include "common/wake.h"

extern struct kit_collector cupti_collector;

#define CAPTURES 60
#define SETTLE_NS 50000000LL /* cupti_gate.c */
#define WAIT_LIMIT_NS 200000000LL
#define MULTIPLE_SUBSCRIBERS 39
#define HELD_UP_MS 30    /* less than a recording waits for whoever came before it */
#define CLOSE_TRIES 2000 /* of 10 ms */
#define VISITS_MOST 20
#define KERNELS 100u
#define KERNEL_BYTES 216u
#define KERNEL_KIND 10u
#define BUFFER_BYTES (256u << 10)

static const char *library_path;
static int (*fake_set)(const char *, long);
static void (*launch_many)(const char *, uint32_t, uint64_t, uint32_t);
static uint32_t (*set_memory)(uint64_t, uint64_t, uint32_t);
static uint64_t (*entered)(void);

static struct {
    int (*subscribe)(void **, void (*)(void *, uint32_t, uint32_t, const void *), void *);
    int (*unsubscribe)(void *);
    int (*listen)(void (*)(uint8_t **, size_t *, size_t *), void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    int (*enable)(uint32_t);
    int (*disable)(uint32_t);
    int (*flush)(uint32_t);
} cupti;

static bool scarce; /* the room for gates */
static atomic_bool goes_on;
static atomic_uint sessions;
static atomic_uint captures_begun;
static unsigned refused_late, last_refusal; /* how often, and after how many captures had begun */
static uint8_t buffer_of_his[1 << 16] __attribute__((aligned(8)));
static atomic_bool lent;
static atomic_uint got_bytes;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void look_up(void) {
    void *library = dlopen(library_path, RTLD_NOW | RTLD_GLOBAL);
    CHECK(library != NULL);
    *(void **)&fake_set = symbol(library, "fake_set");
    *(void **)&launch_many = symbol(library, "fake_launch_many");
    *(void **)&set_memory = symbol(library, "fake_memset");
    *(void **)&entered = symbol(library, "fake_entered");
    *(void **)&cupti.subscribe = symbol(library, "cuptiSubscribe");
    *(void **)&cupti.unsubscribe = symbol(library, "cuptiUnsubscribe");
    *(void **)&cupti.listen = symbol(library, "cuptiActivityRegisterCallbacks");
    *(void **)&cupti.enable = symbol(library, "cuptiActivityEnable");
    *(void **)&cupti.disable = symbol(library, "cuptiActivityDisable");
    *(void **)&cupti.flush = symbol(library, "cuptiActivityFlushAll");
}

/* ---- the other user ---- */

static void wants_buffer(uint8_t **buffer, size_t *size, size_t *records) {
    *buffer = atomic_exchange(&lent, true) ? NULL : buffer_of_his;
    *size = *buffer == NULL ? 0 : sizeof buffer_of_his;
    *records = 0;
}

static void returns_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    if (buffer == buffer_of_his) {
        atomic_fetch_add(&got_bytes, (unsigned)valid);
        atomic_store(&lent, false);
    }
}

static void on_call(void *user, uint32_t domain, uint32_t call, const void *data) {
    (void)user, (void)domain, (void)call, (void)data;
}

/* True if he has it; else we were not given the time to let go, in this capture or in what is left of it, or he lost the
 * CPU for longer than anybody is waited for between his gate and CUPTI's taking notice of him. */
static bool subscribe_himself(void **subscriber) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    const bool known = refused_late > 0 && atomic_load(&captures_begun) == last_refusal;
    const int result = cupti.subscribe(subscriber, on_call, NULL);
    if (result == 0) {
        return true;
    }
    CHECK(result == MULTIPLE_SUBSCRIBERS);
    CHECK(known || clock_ns(CLOCK_MONOTONIC) - begin >= SETTLE_NS);
    last_refusal = atomic_load(&captures_begun);
    refused_late++;
    return false;
}

/* False if we were not given the time to get out of his way. */
static bool profile_himself(void) {
    void *subscriber = NULL;
    atomic_store(&got_bytes, 0);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    if (!subscribe_himself(&subscriber)) {
        return false;
    }
    CHECK(cupti.listen(wants_buffer, returns_buffer) == 0);
    CHECK(cupti.enable(KERNEL_KIND) == 0);
    const bool late = clock_ns(CLOCK_MONOTONIC) - begin >= SETTLE_NS;
    launch_many("his", KERNELS, 10, 1);
    CHECK(cupti.disable(KERNEL_KIND) == 0);
    CHECK(cupti.flush(1) == 0);
    const bool whole = atomic_load(&got_bytes) == KERNELS * KERNEL_BYTES;
    CHECK(whole || late);
    CHECK(cupti.unsubscribe(subscriber) == 0);
    atomic_fetch_add(&sessions, whole);
    return whole;
}

static void *profile_now_and_then(void *unused) {
    (void)unused;
    bool whole = true;
    for (unsigned round = 0; atomic_load(&goes_on) && (whole || !atomic_load(&lent)); round++) {
        whole = profile_himself();
        usleep(60000 + 7000 * (round % 23));
    }
    return NULL;
}

static void *call_cuda(void *unused) {
    (void)unused;
    while (atomic_load(&goes_on)) {
        set_memory(1, 1, 0);
        usleep(200);
    }
    return NULL;
}

/* ---- ours ---- */

static void prepare(void) {
    char error[256] = "";
    atomic_fetch_add(&captures_begun, 1);
    uint32_t version = 0;
    CHECK(kc_open(library_path, &version, error, sizeof error) == 0);
    const struct kc_config config = {.buffer_limit_bytes = 64ull * BUFFER_BYTES,
                                     .buffer_bytes = BUFFER_BYTES,
                                     .strings_bytes = 64u << 10,
                                     .prefault_bytes = BUFFER_BYTES,
                                     .flush_period_ms = 2,
                                     .kernel_name_offset = 104,
                                     .may_decline = 1};
    CHECK(kc_prepare(&config, error, sizeof error) >= 0);
    CHECK(kc_keep_calls(2, "cudaMem*\0", 10) == 0);
}

static bool start(void) {
    const uint32_t kinds[] = {KERNEL_KIND, 2};
    int32_t results[2], subscribed = -1;
    char error[256] = "";
    if (kc_subscribe(&subscribed) != 0 || kc_start(kinds, 2, results, error, sizeof error) != 0) {
        return false;
    }
    (void)kc_record_calls(error, sizeof error);
    return true;
}

static struct kc_others others(void) {
    struct kc_others found;
    CHECK(kc_others(&found) == 0);
    CHECK(found.unnoticed[0] == 0 || (scarce && strstr(found.unnoticed, "cuptiSubscribe") == NULL));
    return found;
}

/* Whoever comes does not wait for our last flush beyond the limit: it may be under way. */
static void end_capture(bool flush_goes_on) {
    int result = kc_close();
    for (int tries = 0; result != 0 && flush_goes_on && tries < CLOSE_TRIES; tries++) {
        usleep(10000);
        result = kc_close();
    }
    CHECK(result == 0);
}

/* True if somebody came. */
static bool capture(int number) {
    struct kc_stop_result stopped = {.timed_out = 0};
    struct kc_detach_result detached;
    prepare();
    if (start()) {
        usleep(1000 * (unsigned)(number * 7 % 40));
        CHECK(kc_stop(20000, &stopped) == 0);
        if (others().time_ns == 0) {
            (void)kc_detach(100, &detached);
        }
    }
    const bool gave_way = others().time_ns != 0;
    end_capture(stopped.timed_out != 0);
    return gave_way;
}

/* False if our threads got no processor in time to let go: he knows that then, or his records went astray. */
static bool a_visitor_ends_the_recording(void) {
    struct kc_stop_result stopped;
    prepare();
    CHECK(start());
    CHECK(others().time_ns == 0);
    launch_many("ours", 5, 10, 1);
    const bool whole = profile_himself();
    const struct kc_others visit = others();
    CHECK(visit.time_ns != 0 && strcmp(visit.function, "cuptiSubscribe") == 0);
    CHECK(visit.caller - (uintptr_t)profile_himself < 4096);
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(stopped.counts.records == 5 || stopped.timed_out);
    end_capture(stopped.timed_out != 0);
    return whole;
}

static void *profile_once(void *unused) {
    (void)unused;
    (void)profile_himself(); /* checks that he has it, unless nobody got the time to let go */
    return NULL;
}

/* Between his coming through the gate, which was not armed then, and CUPTI's taking notice of him. */
static void he_is_waited_for_who_came_just_before(void) {
    pthread_t visitor;
    const uint64_t before = entered();
    CHECK(fake_set("enter_delay_ms", HELD_UP_MS) == 0);
    CHECK(pthread_create(&visitor, NULL, profile_once, NULL) == 0);
    while (entered() == before) {
        usleep(100);
    }
    CHECK(fake_set("enter_delay_ms", 0) == 0);
    (void)capture(0);
    pthread_join(visitor, NULL);
}

static void *close_ours(void *code) {
    *(int *)code = kc_close();
    return NULL;
}

/* A callback that is inside keeps our memory from being given back; he comes and does not wait for that. */
static void he_passes_while_our_memory_is_given_back(void) {
    pthread_t closer;
    void *subscriber = NULL;
    struct kc_stop_result stopped;
    int code = -1;
    prepare();
    CHECK(start());
    CHECK(kc_stop(20000, &stopped) == 0);
    struct pool *pool = &cupti_collector.pool;
    CHECK(pool_enter(pool) != NULL);
    CHECK(pthread_create(&closer, NULL, close_ours, &code) == 0);
    while (__atomic_load_n(&pool->arena, __ATOMIC_SEQ_CST) != NULL) {
        usleep(100);
    }
    CHECK(cupti.subscribe(&subscriber, on_call, NULL) == 0);
    CHECK(gate_visit().time_ns == 0); /* his way was free */
    CHECK(cupti.unsubscribe(subscriber) == 0);
    pool_leave(pool);
    CHECK(pthread_join(closer, NULL) == 0 && code == 0);
}

static atomic_bool driver_called;

static void *enable_and_disable(void *unused) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    (void)unused;
    CHECK(cupti.enable(KERNEL_KIND) == 0);
    CHECK(!atomic_load(&driver_called) || clock_ns(CLOCK_MONOTONIC) - begin >= WAIT_LIMIT_NS);
    CHECK(cupti.disable(KERNEL_KIND) == 0);
    return NULL;
}

/* Neither while it is in progress nor just before. */
static void nobody_enters_during_our_call_of_the_driver(void) {
    pthread_t visitor;
    int64_t may_wait_ns = 10 * SETTLE_NS;
    gate_driver_begin(&may_wait_ns, NULL, NULL);
    atomic_store(&driver_called, true);
    CHECK(pthread_create(&visitor, NULL, enable_and_disable, NULL) == 0);
    usleep(5000);
    atomic_store(&driver_called, false);
    gate_driver_end();
    CHECK(pthread_join(visitor, NULL) == 0);
    const int64_t before = clock_ns(CLOCK_MONOTONIC);
    (void)enable_and_disable(NULL);
    gate_driver_begin(&may_wait_ns, NULL, NULL);
    CHECK(clock_ns(CLOCK_MONOTONIC) - before >= SETTLE_NS);
    gate_driver_end();
    CHECK(may_wait_ns < 10 * SETTLE_NS);
}

static void a_forked_child_passes(void) {
    prepare();
    CHECK(start());
    const pid_t child = fork();
    if (child == 0) {
        _exit(cupti.enable(KERNEL_KIND) == 0 && cupti.disable(KERNEL_KIND) == 0 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(others().time_ns == 0);
    CHECK(kc_close() == 0);
}

/* The last byte of each: it counts from there. */
static void use_up(void) {
    struct room rooms[64];
    const uint32_t count = room_in_library((void *)cupti.subscribe, 1, rooms, 64);
    CHECK(count > 1);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *last = (uint8_t *)rooms[i].end - 1; /* NOLINT */
        CHECK(mprotect(last - (uintptr_t)last % 4096, 4096, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
        *last ^= 1;
    }
    CHECK(room_in_library((void *)cupti.subscribe, 1, rooms, 64) == 1 && rooms[0].begin == rooms[0].end);
}

static void a_lack_of_room_is_said(void) {
    struct kc_others found;
    struct kc_stop_result stopped;
    prepare();
    CHECK(kc_others(&found) == 0);
    CHECK(strstr(found.unnoticed, "no free addresses left near CUPTI's cuptiSubscribe, ") != NULL);
    CHECK(start());
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(kc_close() == 0);
}

int main(int count, char **arguments) {
    pthread_t other, caller;
    int gave_way = 0;
    CHECK(count >= 2);
    library_path = arguments[1];
    look_up();
    CHECK(fake_set("version", 130001) == 0);
    if (count > 2) {
        Dl_info info;
        scarce = strcmp(arguments[2], "full") == 0;
        CHECK(dladdr((void *)cupti.subscribe, &info) != 0);
        dense_make(info.dli_fbase, strcmp(arguments[2], "dense") == 0 ? DENSE_HOLE_COUNT : 0);
        if (strcmp(arguments[2], "none") == 0) {
            use_up();
            a_lack_of_room_is_said();
            return 0;
        }
    }
    for (int visits = 1; !a_visitor_ends_the_recording(); visits++) {
        CHECK(visits < VISITS_MOST && !atomic_load(&lent));
    }
    a_forked_child_passes();
    if (count > 2) {
        return 0;
    }
    nobody_enters_during_our_call_of_the_driver();
    he_is_waited_for_who_came_just_before();
    he_passes_while_our_memory_is_given_back();
    atomic_store(&goes_on, true);
    CHECK(pthread_create(&other, NULL, profile_now_and_then, NULL) == 0);
    CHECK(pthread_create(&caller, NULL, call_cuda, NULL) == 0);
    for (int i = 0; i < CAPTURES; i++) {
        gave_way += capture(i);
    }
    atomic_store(&goes_on, false);
    pthread_join(other, NULL);
    pthread_join(caller, NULL);
    CHECK(refused_late == 0 || gave_way > 0);
    printf("%d captures gave way, %u of his sessions are whole, %u came too late\n", gave_way, atomic_load(&sessions),
           refused_late);
    return 0;
}
