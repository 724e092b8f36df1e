// How PyTorch's profiler (Kineto's plug-in for Intel GPUs) uses PTI: buffers of its own for each session, callbacks set
// anew, and a look-up of each returned buffer among those that it lent. Kineto does not check that look-up: a buffer of
// somebody else ends the program. Here it is counted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BUFFER_BYTES (4u << 20)
#define BUFFERS_MOST 256u
#define KINDS 16u

static const uint32_t views[] = {1, 8, 9};

static struct {
    int (*set_callbacks)(void (*)(unsigned char **, size_t *), void (*)(unsigned char *, size_t, size_t));
    int (*enable)(uint32_t);
    int (*disable)(uint32_t);
    int (*flush)(void);
    int (*next)(uint8_t *, size_t, void **);
    pthread_mutex_t lock;
    unsigned char *lent[BUFFERS_MOST];
    uint64_t counts[KINDS];
    int foreign;
} self = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void requested(unsigned char **buffer, size_t *size) {
    pthread_mutex_lock(&self.lock);
    for (uint32_t i = 0; i < BUFFERS_MOST; i++) {
        if (self.lent[i] == NULL) {
            *buffer = self.lent[i] = malloc(BUFFER_BYTES);
            *size = BUFFER_BYTES;
            break;
        }
    }
    pthread_mutex_unlock(&self.lock);
}

static void completed(unsigned char *buffer, size_t size, size_t used) {
    (void)size;
    pthread_mutex_lock(&self.lock);
    uint32_t at = 0;
    while (at < BUFFERS_MOST && self.lent[at] != buffer) {
        at++;
    }
    if (at == BUFFERS_MOST) {
        self.foreign++;
    } else {
        void *record = NULL;
        while (used > 0 && self.next(buffer, used, &record) == 0) {
            uint32_t kind;
            memcpy(&kind, record, sizeof kind);
            self.counts[kind % KINDS]++;
        }
        self.lent[at] = NULL;
        free(buffer);
    }
    pthread_mutex_unlock(&self.lock);
}

static void *find(void *library, const char *name) { return dlsym(library, name); }

// A session begins. 0, or what PTI answered; -1: no such library.
int xpupti_begin(const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    if (library == NULL) {
        return -1;
    }
    *(void **)&self.set_callbacks = find(library, "ptiViewSetCallbacks");
    *(void **)&self.enable = find(library, "ptiViewEnable");
    *(void **)&self.disable = find(library, "ptiViewDisable");
    *(void **)&self.flush = find(library, "ptiFlushAllViews");
    *(void **)&self.next = find(library, "ptiViewGetNextRecord");
    memset(self.counts, 0, sizeof self.counts);
    int result = self.set_callbacks(requested, completed);
    for (uint32_t i = 0; i < sizeof views / sizeof views[0] && result == 0; i++) {
        result = self.enable(views[i]);
    }
    return result;
}

// It ends, and leaves its buffers with PTI, as one that is dropped does.
int xpupti_leave(void) {
    int result = 0;
    for (uint32_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        result = result != 0 ? result : self.disable(views[i]);
    }
    return result;
}

// It ends; the records by their kind.
int xpupti_end(uint64_t *counts, uint32_t kinds) {
    int result = xpupti_leave();
    result = result != 0 ? result : self.flush();
    memcpy(counts, self.counts, sizeof counts[0] * (kinds < KINDS ? kinds : KINDS));
    return result;
}

// Buffers that came back and were not lent by a session.
int xpupti_foreign(void) { return self.foreign; }

// Buffers that have not come back.
int xpupti_lent(void) {
    int count = 0;
    pthread_mutex_lock(&self.lock);
    for (uint32_t i = 0; i < BUFFERS_MOST; i++) {
        count += self.lent[i] != NULL;
    }
    pthread_mutex_unlock(&self.lock);
    return count;
}
