/* Whether CUPTI may be detached from this process.
 *
 * Theory of operation
 *   A CUDA graph that was launched while CUPTI recorded GPU activities must not outlive cuptiFinalize: a later launch
 *   of it ends the program with CUDA_ERROR_LAUNCH_FAILED. Measured on an H200 with CUDA 13.0, 0.5 to 5 s afterwards:
 *   with kernels recorded, with copies and sets alone, in another recording than the last, after seconds of launches
 *   without any recording, with the device idle during cuptiFinalize (docs/measurements.md has the table). It is safe
 *   if no graph was launched during recording, whether or not graphs exist or earlier launches are still queued.
 *
 *   So cuptiFinalize must not be called in this process any more once - a graph was launched while we recorded GPU
 *     activities, which the subscriber's callbacks report, or - we recorded them without those callbacks (another tool
 *     had the subscriber), or - another tool has registered buffer callbacks since CUPTI was loaded: it may have
 *     recorded graphs.
 *
 *   buffer_callbacks.c finds the last in libcupti's data; if it finds nothing, nothing is concluded.
 *
 *   The answer holds for the life of the process, and a later agent loads its own copy of this library. So it is stored
 *   where every copy finds it: in the name of a memfd, one page of which stays mapped without access.
 *
 * Threads: the agent's; the launch of a graph is noted on the thread that makes it.
 * Blocks: noting a launch never does. The rest makes system calls and waits for nobody.
 */
#define _GNU_SOURCE
#include "cupti/detach_safety.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cupti/collector.h"
#include "cupti/buffer_callbacks.h"

#define MARK "kineto-cupti-stays-"
#define REASONS 3u
#define MAPS_BYTES 65536u

static struct {
    uint32_t graph_launched; /* since attachment_recording_begins */
    uint32_t reasons;        /* found by this library */
    bool others_known;       /* `reasons` includes those of other libraries */
} attachment;

static void mark(uint32_t reason) {
    char name[sizeof MARK + 10];
    if ((attachment.reasons & reason) != 0) {
        return;
    }
    attachment.reasons |= reason;
    (void)snprintf(name, sizeof name, MARK "%u", reason);
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) {
        return; /* this library still knows it */
    }
    if (ftruncate(fd, (off_t)bytes) == 0) {
        (void)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE, fd, 0);
    }
    close(fd);
}

/* Returns what earlier libraries have stored. A name may span two pieces that are read: the tail is kept. */
static uint32_t marks_in_maps(void) {
    uint32_t found = 0;
    char *text = malloc(MAPS_BYTES + 1);
    const int fd = text == NULL ? -1 : open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    size_t kept = 0;
    ssize_t got;
    while (fd >= 0 && (got = read(fd, text + kept, MAPS_BYTES - kept)) > 0) {
        const size_t bytes = kept + (size_t)got;
        text[bytes] = 0;
        for (const char *at = strstr(text, MARK); at != NULL; at = strstr(at + 1, MARK)) {
            for (uint32_t bit = 0; bit < REASONS; bit++) {
                found |= at[sizeof MARK - 1] == (char)('0' + (1 << bit)) ? 1u << bit : 0;
            }
        }
        kept = bytes < sizeof MARK ? bytes : sizeof MARK;
        memmove(text, text + bytes - kept, kept);
    }
    if (fd >= 0) {
        close(fd);
    }
    free(text);
    return found;
}

void attachment_begins(const struct cupti_api *api) {
    if (listener_registered(api) != 0) {
        mark(KC_STAY_USED_BEFORE);
    }
}

/* ---- graphs ---- */

void attachment_recording_begins(void) { __atomic_store_n(&attachment.graph_launched, 0, __ATOMIC_SEQ_CST); }

void attachment_recording_ends(bool watched) {
    if (!watched) {
        mark(KC_STAY_UNWATCHED);
    }
    if (__atomic_load_n(&attachment.graph_launched, __ATOMIC_SEQ_CST) != 0) {
        mark(KC_STAY_GRAPHS);
    }
}

void attachment_graph_launched(void) {
    /* Read first, so that threads which launch graphs do not contend for the word. */
    if (__atomic_load_n(&attachment.graph_launched, __ATOMIC_RELAXED) == 0) {
        __atomic_store_n(&attachment.graph_launched, 1, __ATOMIC_SEQ_CST);
    }
}

uint32_t attachment_must_stay(void) {
    if (!attachment.others_known) {
        attachment.others_known = true;
        attachment.reasons |= marks_in_maps();
    }
    return attachment.reasons;
}
