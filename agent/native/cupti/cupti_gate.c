/* Theory of operation
 *
 * CUPTI has one subscriber, one pair of buffer callbacks and one set of enabled kinds for a whole process. Any other
 * user (XLA's profiler, TensorFlow's, onnxruntime's, torch's CUPTI monitor, Python code with cupti-python or ctypes)
 * has precedence. Such a tool has looked up CUPTI's functions by itself, perhaps long before us, so only the functions
 * themselves can show its use: those that begin to use CUPTI get a gate (call_site.c). The tool's own thread passes it
 * before the call has done anything and before CUPTI has taken a lock for it. There our recording ends, and then the
 * call goes on as if nothing had happened.
 *
 * Not counted are our own calls (gate_ours_begin), and those of NVIDIA's libraries, which use each other.
 *
 * Gates stay: removing them would take as many stores again, and between recordings they show whether others have
 * activities enabled. An unused gate costs nothing, since no launch passes one. Kineto's activities are not counted:
 * its own state is more precise (sources/torch/kineto_state.py).
 *
 *     IDLE -> ARMED -> YIELDING -> YIELDED -> IDLE
 *
 * Threads: the gates are entered on any thread of the program that calls a gated function of CUPTI; the rest runs on
 *   the agent's and on the dedicated one of device_drain.c.
 * Blocks: at any gate, a thread waits for our call of the driver (cupti_gate.h says why), 0.2 s at most, and once if it
 *   does not return. At an armed gate it waits until our recording has ended, too, another 0.2 s at most: if it went on
 *   sooner, two users would be inside CUPTI. gate_settle, gate_driver_begin and gate_disarm wait on our threads, 0.4 s at
 *   most.
 */
#define _GNU_SOURCE
#include "cupti/cupti_gate.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cupti/callback_tables.h"
#include "patching/call_site.h"
#include "common/wake.h"

#define SITES_OF_ONE 4u
#define SITES_MOST 96u
#define RANGES_MOST 64u
#define SETTLE_NS 50000000LL        /* for a call that passed a gate just before it was armed */
#define SETTLE_LIMIT_NS 400000000LL /* if its thread gets no CPU time */
#define SETTLE_LOOK_NS 2000000L
#define CALL_CPU_NS 20000u        /* the least CPU time of a call once it has passed its gate */
#define WAIT_LIMIT_NS 200000000LL /* for another thread that yields: collector.c's limit */

enum state { IDLE, ARMED, YIELDING, YIELDED };
enum effect { BEGINS, ENABLES, DISABLES, ENDS };

/* With `needed`: if there is no gate here, CUPTI may be used unnoticed. */
static const struct gated {
    const char *name;
    enum effect effect;
    bool needed;
} GATED[] = {
    {"cuptiSubscribe", BEGINS, true},
    {"cuptiSubscribe_v2", BEGINS, true},
    {"cuptiActivityRegisterCallbacks", BEGINS, true},
    {"cuptiActivityRegisterCallbacks_v2", BEGINS, true},
    {"cuptiActivityEnable", ENABLES, true},
    {"cuptiActivityEnable_v2", ENABLES, true},
    {"cuptiActivityEnableContext", ENABLES, true},
    {"cuptiActivityEnableAndDump", ENABLES, true},
    {"cuptiActivityEnableAndDump_v2", ENABLES, true},
    {"cuptiActivityDisable", DISABLES, false},
    {"cuptiActivityDisable_v2", DISABLES, false},
    {"cuptiActivityDisableContext", DISABLES, false},
    {"cuptiFinalize", ENDS, false},
    {"cuptiActivityConfigurePCSampling", BEGINS, false},
    {"cuptiPCSamplingEnable", BEGINS, false},
    {"cuptiEventGroupEnable", BEGINS, false},
    {"cuptiProfilerInitialize", BEGINS, false},
    {"cuptiPmSamplingEnable", BEGINS, false},
    {"cuptiRangeProfilerEnable", BEGINS, false},
    {"cuptiSassMetricsEnable", BEGINS, false},
};
#define GATED_COUNT (sizeof GATED / sizeof *GATED)

struct gate {
    const struct gated *gated;
    uint32_t depth;
};

struct range {
    uintptr_t begin, end;
    bool torch;
};

struct ranges {
    struct range of[RANGES_MOST];
    uint32_t count;
};

static struct {
    const void *library; /* the library whose gates are placed */
    char missing[160];
    struct gate gates[SITES_MOST];
    struct call_site sites[SITES_MOST];
    uint32_t count;
    struct ranges ranges[2];
    _Atomic uint32_t ranges_used; /* which of the two */
    void (*give_way)(void);
    uint32_t state;
    struct wake yielded;
    _Atomic int64_t time_ns;
    _Atomic uint64_t caller;
    _Atomic(const char *) function;
    _Atomic uint32_t in_use;
    _Atomic bool uncounted;  /* some calls that disable go unnoticed */
    _Atomic bool ended;      /* the last call of another tool disabled its last activity */
    _Atomic int64_t last_ns; /* monotonic: when another tool last came */
    _Atomic uint32_t last_thread;
    _Atomic uint64_t last_cpu_ns; /* that thread's, at that time */
    _Atomic(pid_t) ours;
    _Atomic(pid_t) finalizes; /* our detach's thread, which may be that of any CUDA call */
    cupti_result (*finalize)(void);
    _Atomic uint32_t driver_calls; /* of ours, in progress */
    struct wake driver_returned;
    _Atomic bool driver_stands; /* somebody has waited in vain for it to return */
    _Atomic bool dead;
} gate;

/* ---- callers ---- */

static bool is_torch(const char *name) { return strncmp(name, "libtorch", strlen("libtorch")) == 0; }

static bool is_vendors(const char *name) {
    return strncmp(name, "libcupti.so", strlen("libcupti.so")) == 0 ||
           strncmp(name, "libnvperf_", strlen("libnvperf_")) == 0 ||
           strncmp(name, "libcuda.so", strlen("libcuda.so")) == 0;
}

static int note_range(struct dl_phdr_info *info, size_t size, void *table) {
    (void)size;
    struct ranges *ranges = table;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *name = slash == NULL ? info->dlpi_name : slash + 1;
    const bool torch = is_torch(name);
    for (unsigned i = 0; (torch || is_vendors(name)) && i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X) != 0 && ranges->count < RANGES_MOST) {
            const uintptr_t begin = info->dlpi_addr + part->p_vaddr;
            ranges->of[ranges->count++] = (struct range){begin, begin + part->p_memsz, torch};
        }
    }
    return 0;
}

static const struct range *range_of(uintptr_t address) {
    const struct ranges *ranges = &gate.ranges[atomic_load(&gate.ranges_used)];
    for (uint32_t i = 0; i < ranges->count; i++) {
        if (address >= ranges->of[i].begin && address < ranges->of[i].end) {
            return &ranges->of[i];
        }
    }
    return NULL;
}

/* Libraries may have been loaded since the last time. */
static void look_at_libraries(void) {
    const uint32_t used = atomic_load(&gate.ranges_used), next = !used;
    memset(&gate.ranges[next], 0, sizeof gate.ranges[next]);
    (void)dl_iterate_phdr(note_range, &gate.ranges[next]);
    if (memcmp(&gate.ranges[next], &gate.ranges[used], sizeof gate.ranges[next]) != 0) { /* a caller may read it now */
        atomic_store(&gate.ranges_used, next);
    }
}

/* ---- the gates, on the callers' threads ---- */

static uint32_t state_now(void) { return __atomic_load_n(&gate.state, __ATOMIC_SEQ_CST); }

static bool advance(uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(&gate.state, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void count_use(enum effect effect) {
    uint32_t now = atomic_load(&gate.in_use);
    uint32_t next;
    do {
        next = effect == ENDS ? 0 : effect == ENABLES ? now + 1 : effect == DISABLES && now > 0 ? now - 1 : now;
    } while (!atomic_compare_exchange_weak(&gate.in_use, &now, next));
    atomic_store(&gate.ended, next == 0 && (effect == DISABLES || effect == ENDS));
}

static void make_way(const struct gated *gated, uintptr_t caller) {
    if (advance(ARMED, YIELDING)) {
        atomic_store(&gate.caller, caller);
        atomic_store(&gate.function, gated->name);
        gate.give_way();
        atomic_store(&gate.time_ns, clock_ns(CLOCK_REALTIME)); /* last: a thread that sees it sees all */
        (void)advance(YIELDING, YIELDED);
        wake_post(&gate.yielded);
    } else if (state_now() == YIELDING) {
        (void)wake_await(&gate.yielded, &gate.state, YIELDED, WAIT_LIMIT_NS);
    }
}

static bool is_ours(void) {
    const pid_t thread = (pid_t)syscall(SYS_gettid);
    return atomic_load(&gate.ours) == thread || atomic_load(&gate.finalizes) == thread;
}

static void note_visit(void) {
    atomic_store(&gate.last_cpu_ns, (uint64_t)clock_ns(CLOCK_THREAD_CPUTIME_ID));
    atomic_store(&gate.last_thread, (uint32_t)syscall(SYS_gettid));
    atomic_store(&gate.last_ns, clock_ns(CLOCK_MONOTONIC));
}

static void await_driver(void) {
    if (!atomic_load(&gate.driver_stands) &&
        !wake_await(&gate.driver_returned, (const uint32_t *)&gate.driver_calls, 0, WAIT_LIMIT_NS)) {
        atomic_store(&gate.driver_stands, true);
    }
}

static void reached(void *user, const uint8_t *stack) {
    const int saved = errno;
    const struct gate *here = user;
    uintptr_t caller;
    memcpy(&caller, stack + here->depth, sizeof caller);
    const struct range *range = range_of(caller);
    const bool foreign = range == NULL || range->torch;
    if (foreign && !atomic_load(&gate.dead) && !is_ours()) {
        note_visit(); /* first: once this is seen, no call of ours begins */
        await_driver();
        if (range == NULL) {
            count_use(here->gated->effect);
        }
        if (here->gated->effect != DISABLES) {
            make_way(here->gated, caller);
        }
        note_visit(); /* CUPTI is entered only now */
    }
    errno = saved;
}

/* ---- placing them ---- */

static size_t bytes_of(const void *function) {
    Dl_info info;
    void *symbol = NULL;
    if (dladdr1(function, &info, &symbol, RTLD_DL_SYMENT) == 0 || symbol == NULL || info.dli_saddr != function) {
        return 0;
    }
    return ((const ElfW(Sym) *)symbol)->st_size;
}

static void find_gate(void *library, const struct gated *gated) {
    uint8_t *function = dlsym(library, gated->name);
    if (function == NULL) {
        return; /* this CUPTI lacks it */
    }
    const uint32_t room = SITES_MOST - gate.count;
    struct call_site *sites = &gate.sites[gate.count];
    const uint32_t found = call_sites_find(function, bytes_of(function), sites,
                                           room < SITES_OF_ONE ? room : SITES_OF_ONE);
    for (uint32_t i = 0; i < found; i++) {
        gate.gates[gate.count++] = (struct gate){gated, sites[i].depth};
    }
    if (found == 0 && gated->needed) {
        snprintf(gate.missing, sizeof gate.missing, "%s of this CUPTI begins with unknown instructions", gated->name);
    }
}

/* Notes the functions that have no gate for lack of room, if they matter. */
static void note_without_room(uint32_t first) {
    const char *last = NULL;
    int used = 0;
    for (uint32_t i = first; i < gate.count; i++) {
        const char *name = gate.gates[i].gated->name;
        const bool needed = gate.gates[i].gated->needed && gate.sites[i].stub == NULL;
        if (needed && name != last && used < (int)sizeof gate.missing) {
            used += snprintf(gate.missing + used, sizeof gate.missing - (size_t)used, "%s %s",
                             last == NULL ? "the program has no free addresses left near CUPTI's" : ",", name);
            last = name;
        }
        const enum effect effect = gate.gates[i].gated->effect;
        if (gate.sites[i].stub == NULL && (effect == DISABLES || effect == ENDS)) {
            atomic_store(&gate.uncounted, true);
        }
    }
}

static void redirect_from(uint32_t first) {
    void *users[SITES_MOST];
    for (uint32_t i = first; i < gate.count; i++) {
        users[i] = &gate.gates[i];
    }
    int error = call_sites_prepare(&gate.sites[first], &users[first], gate.count - first, reached);
    for (uint32_t i = first; i < gate.count && error == 0; i++) {
        error = gate.sites[i].stub == NULL ? 0 : call_site_redirect(&gate.sites[i], true);
        for (uint32_t back = first; back < i && error != 0; back++) {
            if (gate.sites[back].stub != NULL) {
                (void)call_site_redirect(&gate.sites[back], false);
            }
        }
    }
    if (error != 0) {
        snprintf(gate.missing, sizeof gate.missing, "this system does not let CUPTI's code be changed (%s)",
                 strerror(error));
    } else {
        note_without_room(first);
    }
}

/* Replaces api->finalize. */
static cupti_result finalize(void) {
    atomic_store(&gate.finalizes, (pid_t)syscall(SYS_gettid));
    const cupti_result result = gate.finalize();
    atomic_store(&gate.finalizes, 0);
    return result;
}

const char *gate_place(struct cupti_api *api, void (*give_way)(void)) {
    look_at_libraries();
    if (api->finalize != finalize) {
        gate.finalize = api->finalize;
        api->finalize = finalize;
    }
    if (gate.library != api->library) { /* another library's gates stay as they are */
        const uint32_t first = gate.count;
        const void *begin[] = {dlsym(api->library, "cuptiSubscribe"), dlsym(api->library, "cuptiSubscribe_v2")};
        (void)callback_tables_fill(begin, 2);
        gate.library = api->library;
        gate.give_way = give_way;
        gate.missing[0] = 0;
        for (size_t i = 0; i < GATED_COUNT; i++) {
            find_gate(api->library, &GATED[i]);
        }
        redirect_from(first);
    }
    return gate.missing;
}

void gate_arm(void) {
    atomic_store(&gate.time_ns, 0);
    __atomic_store_n(&gate.state, ARMED, __ATOMIC_SEQ_CST);
}

void gate_disarm(void) {
    if (!advance(ARMED, IDLE) && state_now() == YIELDING) {
        (void)wake_await(&gate.yielded, &gate.state, YIELDED, WAIT_LIMIT_NS);
    }
    __atomic_store_n(&gate.state, IDLE, __ATOMIC_SEQ_CST);
}

struct gate_visit gate_visit(void) {
    const int64_t time_ns = atomic_load(&gate.time_ns);
    return (struct gate_visit){time_ns, atomic_load(&gate.caller), atomic_load(&gate.function)};
}

/* Whether the thread that came last has not had the CPU since, as on a busy machine or under a CPU quota. */
static bool visitor_was_held_up(void) {
    uint64_t cpu_ns;
    return thread_cpu_ns(atomic_load(&gate.last_thread), &cpu_ns) &&
           cpu_ns < atomic_load(&gate.last_cpu_ns) + CALL_CPU_NS;
}

/* Whether the caller that came at `last` may still be inside CUPTI. */
static bool may_be_inside(int64_t last) {
    const int64_t ago = clock_ns(CLOCK_MONOTONIC) - last;
    return last != 0 && ago < SETTLE_LIMIT_NS &&
           (ago < SETTLE_NS || (atomic_load(&gate.last_ns) == last && visitor_was_held_up()));
}

void gate_settle(void) {
    const int64_t last = atomic_load(&gate.last_ns); /* later callers find the gates armed */
    const struct timespec pause = {.tv_nsec = SETTLE_LOOK_NS};
    while (may_be_inside(last)) {
        (void)nanosleep(&pause, NULL);
    }
}

void gate_driver_begin(int64_t *may_wait_ns, void (*waits)(void *), void *argument) {
    const struct timespec pause = {.tv_nsec = SETTLE_LOOK_NS};
    const int64_t begin = clock_ns(CLOCK_MONOTONIC), may_wait = *may_wait_ns;
    atomic_fetch_add(&gate.driver_calls, 1); /* first: either we see the caller, or the caller sees us */
    while (*may_wait_ns > 0 && may_be_inside(atomic_load(&gate.last_ns))) {
        gate_driver_end();
        if (waits != NULL) {
            waits(argument);
        }
        (void)nanosleep(&pause, NULL);
        atomic_fetch_add(&gate.driver_calls, 1);
        *may_wait_ns = may_wait - (clock_ns(CLOCK_MONOTONIC) - begin);
    }
}

void gate_driver_end(void) {
    if (atomic_fetch_sub(&gate.driver_calls, 1) == 1) {
        atomic_store(&gate.driver_stands, false);
        wake_post(&gate.driver_returned);
    }
}

uint32_t gate_in_use(void) { return atomic_load(&gate.uncounted) ? 0 : atomic_load(&gate.in_use); }

bool gate_ended(void) { return !atomic_load(&gate.uncounted) && atomic_load(&gate.ended); }

void gate_ours_begin(void) { atomic_store(&gate.ours, (pid_t)syscall(SYS_gettid)); }
void gate_ours_end(void) { atomic_store(&gate.ours, 0); }
void gate_kill(void) { atomic_store(&gate.dead, true); }
