/* See switch_thread.h.
 *
 * Threads: the one that has the collector's turn calls; the two functions run on a thread of ours, with signals
 *   blocked.
 * Blocks: as long as the two functions do.
 */
#define _GNU_SOURCE
#include "pti/switch_thread.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/own_threads.h"
#include "common/wake.h"

enum { STEP_ON = 1, STEP_OFF = 2 };

static struct {
    switch_function on, off;
    pthread_t thread;
    bool runs;
    struct wake asks, answers;
    uint32_t asked, answered;
} self;

static void tell(struct wake *wake, uint32_t *word, uint32_t step) {
    __atomic_store_n(word, step, __ATOMIC_SEQ_CST);
    wake_post(wake);
}

static void await(struct wake *wake, const uint32_t *word, uint32_t step) {
    while (!wake_await(wake, word, step, INT64_MAX / 2)) {
    }
}

static void *run(void *unused) {
    (void)unused;
    self.on();
    tell(&self.answers, &self.answered, STEP_ON);
    await(&self.asks, &self.asked, STEP_OFF);
    self.off();
    return NULL;
}

int switch_on(switch_function on, switch_function off) {
    sigset_t before;
    self.on = on;
    self.off = off;
    self.asked = self.answered = 0;
    block_signals(&before);
    const int error = pthread_create(&self.thread, NULL, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return error;
    }
    self.runs = true;
    (void)pthread_setname_np(self.thread, "kineto-pti");
    await(&self.answers, &self.answered, STEP_ON);
    return 0;
}

void switch_off(void) {
    if (self.runs) {
        self.runs = false;
        tell(&self.asks, &self.asked, STEP_OFF);
        (void)pthread_join(self.thread, NULL);
    }
}
