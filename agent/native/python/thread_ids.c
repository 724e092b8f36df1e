/* See thread_ids.h. Before 3.11 a thread state has no kernel thread id, only a pthread_t; in 3.11.0 and 3.11.1 a forked
 * child's main thread has its parent's. In glibc and musl the id is in the structure that pthread_t points to.
 *
 * Threads: the sampler's; ids_learn runs on the agent's, which reads its own structure.
 * Blocks: never.
 */
#define _GNU_SOURCE
#include "python/thread_ids.h"

#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SCAN_BYTES 2304u /* glibc's and musl's structures are about this long */

void ids_learn(struct thread_ids *ids, const struct memory *memory) {
    const uint64_t own = (uint64_t)pthread_self();
    const uint32_t tid = (uint32_t)syscall(SYS_gettid);
    uint32_t words[SCAN_BYTES / 4];
    uint32_t kept = 0;
    if (!memory_read(memory, words, own, sizeof words)) {
        return;
    }
    if (ids->learned == 0) {
        for (uint32_t i = 0; i < SCAN_BYTES / 4 && kept < IDS_OFFSETS_MOST; i++) {
            if (words[i] == tid) {
                ids->offsets[kept++] = 4 * i;
            }
        }
    } else {
        for (uint32_t i = 0; i < ids->count; i++) {
            if (words[ids->offsets[i] / 4] == tid) {
                ids->offsets[kept++] = ids->offsets[i];
            }
        }
    }
    ids->count = kept;
    ids->learned++;
}

uint32_t ids_tid(const struct thread_ids *ids, const struct memory *memory, uint64_t pthread) {
    uint32_t tid = 0;
    if (ids->count == 0 || pthread == 0 || !memory_read(memory, &tid, pthread + ids->offsets[0], sizeof tid)) {
        return 0;
    }
    return tid;
}
