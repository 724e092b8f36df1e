/* See launch_hold.h.
 *
 * Theory of operation
 *   CUPTI's first call takes 10 to 19 ms and looks at the device at its end. A program that queues a second of work at
 *   once has done so by then, and its launches wait for that second (measured: 62 to 824 ms). Held back for as long as
 *   the call takes, they wait for that only.
 *
 *   A launch has more arguments than registers hold, so what is in between keeps all registers and jumps.
 *
 * Threads: the functions in between run on whatever thread launches; the rest on the agent's.
 * Blocks: who launches waits while launches are held, HOLD_NS at most, all launches of a thread together.
 */
#define _GNU_SOURCE
#include "cupti/launch_hold.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "common/wake.h"
#include "cupti/driver_slots.h"

#if defined(__x86_64__)

#define HOLD_NS 100000000LL
#define LAUNCHES 6

static const char *const NAMES[LAUNCHES] = {"cuLaunchKernel",        "cuLaunchKernel_ptsz", "cuLaunchKernelEx",
                                            "cuLaunchKernelEx_ptsz", "cuGraphLaunch",       "cuGraphLaunch_ptsz"};

static struct {
    uint32_t held;
    int64_t until_ns;
    struct wake released;
    void **slots[LAUNCHES];
} hold;

/* Named in the instructions below. */
__attribute__((visibility("hidden"), used)) void *kineto_launch_originals[LAUNCHES];
__attribute__((visibility("hidden"), used)) void kineto_launch_waits(void);

void kineto_launch_waits(void) {
    if (__atomic_load_n(&hold.held, __ATOMIC_SEQ_CST) != 0) {
        const int64_t until_ns = __atomic_load_n(&hold.until_ns, __ATOMIC_SEQ_CST);
        (void)wake_await(&hold.released, &hold.held, 0, until_ns - clock_ns(CLOCK_MONOTONIC));
    }
}

#define IN_BETWEEN(number)                                                                   \
    __attribute__((naked)) static void in_##number(void) {                                   \
        __asm__("push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9; push %rax;" \
                "call kineto_launch_waits;"                                                  \
                "pop %rax; pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi;"        \
                "jmp *kineto_launch_originals+8*" #number "(%rip)");                         \
    }
IN_BETWEEN(0)
IN_BETWEEN(1)
IN_BETWEEN(2)
IN_BETWEEN(3)
IN_BETWEEN(4)
IN_BETWEEN(5)

static void (*const OURS[LAUNCHES])(void) = {in_0, in_1, in_2, in_3, in_4, in_5};

/* What leads to somebody who came after us is left: he may lead on to us. */
static void place(uint32_t i) {
    void *found = hold.slots[i] == NULL ? NULL : __atomic_load_n(hold.slots[i], __ATOMIC_SEQ_CST);
    if (found != NULL && (kineto_launch_originals[i] == NULL || kineto_launch_originals[i] == found)) {
        __atomic_store_n(&kineto_launch_originals[i], found, __ATOMIC_SEQ_CST);
        __atomic_store_n(hold.slots[i], *(void *const *)&OURS[i], __ATOMIC_SEQ_CST);
    }
}

void launches_hold(void *cuda) {
    for (uint32_t i = 0; i < LAUNCHES; i++) { /* takes some of the moment: before it counts */
        hold.slots[i] = driver_slot(dlsym(cuda, NAMES[i]));
    }
    __atomic_store_n(&hold.until_ns, clock_ns(CLOCK_MONOTONIC) + HOLD_NS, __ATOMIC_SEQ_CST);
    __atomic_store_n(&hold.held, 1, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        place(i);
    }
}

void launches_release(void) {
    for (uint32_t i = LAUNCHES; i-- > 0;) { /* two names may lead to one slot */
        if (hold.slots[i] != NULL) {
            void *ours = *(void *const *)&OURS[i];
            (void)__atomic_compare_exchange_n(hold.slots[i], &ours, kineto_launch_originals[i], false, __ATOMIC_SEQ_CST,
                                              __ATOMIC_SEQ_CST);
            hold.slots[i] = NULL;
        }
    }
    __atomic_store_n(&hold.held, 0, __ATOMIC_SEQ_CST);
    wake_post(&hold.released);
}

#else /* no decoder for this architecture */

void launches_hold(void *cuda) { (void)cuda; }

void launches_release(void) {}

#endif
