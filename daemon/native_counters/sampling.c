/* One GPU's sampling. A thread of kinetod-counters starts it, decodes, and ends it; it blocks in CUPTI, in the lock
 * `setup` while another GPU is being started or ended, and in kn_ring_wait between two decodings.
 *
 * Theory of operation
 *     The hardware fills a buffer (KEEP_LATEST: old samples are overwritten when nobody fetches them). Every poll decodes
 *     what is there into an image of `samples` places, four times as many as one poll brings, since an image that is too
 *     small loses all that does not fit. Initialising it anew costs as much as its size, so it is bounded in bytes, too;
 *     the polls come closer then.
 *
 *     A decoding that stops for another reason than the end of the records is no error: there is nothing more, or little.
 *     A second decoding follows at once only if the image was half full, and decoding takes half of the time at most:
 *     when the samples come faster than that, they are lost and counted, instead of more of a core being used.
 *
 *     The configuration must live until the end, because CUPTI keeps the pointer. The first sample covers the time since
 *     an earlier reset and is left out. cuptiProfilerDeInitialize is never called: it is not counted, and the process ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cupti_library.h"
#include "sample_ring.h"

#define SAMPLES_LEAST 64u
#define SAMPLES_MOST 8192u
#define POLLS_IN_IMAGE 4u
#define LAST_DECODINGS_MOST 256u

struct kn_session {
    struct kn_library *library;
    kn_writer *writer;
    kn_request request; /* its metrics are our copies */
    char *names[KN_METRICS_MOST];
    void *host;
    uint8_t *config;
    size_t config_bytes;
    void *object; /* CUpti_PmSampling_Object; NULL: not enabled, or disabled again */
    uint8_t *image;
    size_t image_bytes;
    uint32_t samples; /* in the image */
    bool running, first_seen;
    uint64_t last_end;
    double values[KN_METRICS_MOST];
    float row[KN_METRICS_MOST];
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int call(const struct kn_session *session, cupti_function function, const char *name, void *parameters,
                kn_failure *failure) {
    int result = function(parameters);
    return result == CUPTI_OK ? 0 : kn_fail_cupti(session->library, failure, result, name);
}
#define CALL(session, name, parameters, failure) call(session, (session)->library->name, #name, parameters, failure)

static int clear_image(struct kn_session *session, kn_failure *failure) {
    struct image_init_parameters clear = {
        .bytes = sizeof clear, .object = session->object, .image_bytes = session->image_bytes, .image = session->image};
    return CALL(session, cuptiPmSamplingCounterDataImageInitialize, &clear, failure);
}

/* As many samples as four polls bring, in no more bytes than allowed; fewer samples mean closer polls. */
static int make_image(struct kn_session *session, kn_failure *failure) {
    kn_request *request = &session->request;
    uint64_t wanted = POLLS_IN_IMAGE * (request->poll_ns / request->interval_ns + 1);
    uint64_t samples = wanted < SAMPLES_LEAST ? SAMPLES_LEAST : wanted > SAMPLES_MOST ? SAMPLES_MOST : wanted;
    for (;; samples /= 2) {
        struct data_size_parameters size = {.bytes = STRUCT_BYTES(data_size_parameters, image_bytes),
                                            .object = session->object,
                                            .names = request->metrics,
                                            .count = request->metric_count,
                                            .samples = (uint32_t)samples};
        if (CALL(session, cuptiPmSamplingGetCounterDataSize, &size, failure)) {
            return -1;
        }
        session->image_bytes = size.image_bytes;
        if (size.image_bytes <= request->image_bytes_most || samples <= SAMPLES_LEAST) {
            break;
        }
    }
    session->samples = (uint32_t)samples;
    uint64_t poll_most = samples * request->interval_ns / POLLS_IN_IMAGE;
    request->poll_ns = request->poll_ns < poll_most ? request->poll_ns : poll_most;
    if ((session->image = malloc(session->image_bytes)) == NULL) {
        return kn_fail(failure, KN_SYSTEM, ENOMEM, "malloc", strerror(ENOMEM));
    }
    return clear_image(session, failure);
}

static int begin(struct kn_session *session, kn_failure *failure) {
    kn_request *request = &session->request;
    uint64_t passes;
    if (kn_host_open(session->library, request->device, request->metrics, request->metric_count, &session->host,
                     failure) ||
        kn_configuration(session->library, session->host, &session->config, &session->config_bytes, &passes, failure)) {
        return -1;
    }
    if (passes != 1) {
        return kn_fail(failure, KN_SYSTEM, EINVAL, "cuptiProfilerHostGetNumOfPasses",
                       "these metrics cannot be measured in one pass");
    }
    struct enable_parameters enable = {.bytes = sizeof enable, .device = request->device};
    if (CALL(session, cuptiPmSamplingEnable, &enable, failure)) {
        return -1;
    }
    session->object = enable.object;
    struct config_parameters config = {.bytes = sizeof config,
                                       .object = session->object,
                                       .config_bytes = session->config_bytes,
                                       .config = session->config,
                                       .buffer_bytes = request->hardware_buffer_bytes,
                                       .interval = request->interval,
                                       .trigger = request->by_clock ? TRIGGER_BY_CLOCK : TRIGGER_BY_TIME,
                                       .append = KEEP_LATEST};
    if (CALL(session, cuptiPmSamplingSetConfig, &config, failure) || make_image(session, failure)) {
        return -1;
    }
    struct object_parameters start = {.bytes = sizeof start, .object = session->object};
    if (CALL(session, cuptiPmSamplingStart, &start, failure)) {
        return -1;
    }
    session->running = true;
    return 0;
}

/* The sample at this place of the image becomes a row. */
static int take_sample(struct kn_session *session, size_t index, kn_failure *failure) {
    struct sample_info_parameters info = {.bytes = sizeof info,
                                          .object = session->object,
                                          .image = session->image,
                                          .image_bytes = session->image_bytes,
                                          .index = index};
    if (CALL(session, cuptiPmSamplingCounterDataGetSampleInfo, &info, failure)) {
        return -1;
    }
    if (!session->first_seen) {
        session->first_seen = true;
        session->last_end = info.end;
        return 0;
    }
    if (info.start < session->last_end && session->last_end - info.start < session->request.interval_ns / 2) {
        info.start = session->last_end; /* the clock that converts the GPU's times was adjusted in between */
    }
    if (info.end <= info.start || info.start < session->last_end) {
        atomic_fetch_add_explicit(&session->writer->ring->disordered, 1, memory_order_relaxed);
        return 0;
    }
    if (info.start - session->last_end >= session->request.interval_ns / 2) { /* they abut otherwise */
        kn_ring_note_gap(session->writer, info.start - session->last_end);
    }
    session->last_end = info.end;
    struct evaluate_parameters evaluate = {.bytes = sizeof evaluate,
                                           .host = session->host,
                                           .image = session->image,
                                           .image_bytes = session->image_bytes,
                                           .index = index,
                                           .names = session->request.metrics,
                                           .count = session->request.metric_count,
                                           .values = session->values};
    if (CALL(session, cuptiProfilerHostEvaluateToGpuValues, &evaluate, failure)) {
        return -1;
    }
    for (uint32_t i = 0; i < session->request.metric_count; i++) {
        session->row[i] = (float)session->values[i];
    }
    kn_ring_put(session->writer, (int64_t)info.start, (int64_t)info.end, session->row);
    return 0;
}

/* One decoding. *full: there is or was more than the image takes comfortably. *found: samples in it. */
static int decode(struct kn_session *session, bool *full, size_t *found, kn_failure *failure) {
    struct decode_parameters asked = {.bytes = STRUCT_BYTES(decode_parameters, overflow),
                                      .object = session->object,
                                      .image = session->image,
                                      .image_bytes = session->image_bytes};
    if (CALL(session, cuptiPmSamplingDecodeData, &asked, failure)) {
        return -1;
    }
    kn_ring *ring = session->writer->ring;
    atomic_fetch_add_explicit(&ring->decodings, 1, memory_order_relaxed);
    if (asked.overflow != 0) {
        atomic_fetch_add_explicit(&ring->overflows, 1, memory_order_relaxed);
    }
    if (asked.stop_reason == STOP_COUNTER_DATA_FULL) {
        kn_ring_note_full(session->writer);
    }
    struct data_info_parameters info = {
        .bytes = sizeof info, .image = session->image, .image_bytes = session->image_bytes};
    if (CALL(session, cuptiPmSamplingGetCounterDataInfo, &info, failure)) {
        return -1;
    }
    *found = info.completed;
    *full = asked.stop_reason == STOP_COUNTER_DATA_FULL || info.completed >= session->samples / 2;
    for (size_t i = 0; i < info.completed; i++) {
        if (take_sample(session, i, failure)) {
            return -1;
        }
    }
    return info.completed > 0 ? clear_image(session, failure) : 0;
}

static int decode_until(struct kn_session *session, uint64_t end_ns, kn_failure *failure) {
    bool full;
    size_t found;
    do {
        if (decode(session, &full, &found, failure)) {
            return -1;
        }
    } while (full && now_ns() < end_ns);
    return 0;
}

static int32_t sample(struct kn_session *session, kn_failure *failure) {
    uint64_t poll_ns = session->request.poll_ns, began = now_ns();
    for (;;) {
        uint64_t now = now_ns();
        if (now - began >= session->writer->most_ns) {
            return KN_TOO_LONG;
        }
        if (decode_until(session, now + poll_ns / 2, failure)) {
            return KN_ERROR;
        }
        uint64_t spent = now_ns() - now;
        if (kn_ring_wait(session->writer, spent < poll_ns / 2 ? poll_ns - spent : poll_ns / 2)) {
            return KN_STOPPED;
        }
    }
}

/* What the hardware still has after the stop. */
static int decode_rest(struct kn_session *session, kn_failure *failure) {
    bool full;
    size_t found = 1;
    for (unsigned i = 0; i < LAST_DECODINGS_MOST && found > 0; i++) {
        if (decode(session, &full, &found, failure)) {
            return -1;
        }
    }
    return 0;
}

/* Gives the GPU's counters back. Keeps the first failure, if there was one. The caller has the lock `setup`. */
static int disable(struct kn_session *session, bool decodes, kn_failure *failure) {
    kn_failure later, *first = decodes ? failure : &later;
    struct object_parameters object = {.bytes = sizeof object, .object = session->object};
    int failed = 0;
    if (session->running) {
        session->running = false;
        failed = CALL(session, cuptiPmSamplingStop, &object, first);
        if (decodes && !failed) {
            failed = decode_rest(session, failure);
        }
    }
    if (session->object != NULL) {
        session->object = NULL;
        failed |= CALL(session, cuptiPmSamplingDisable, &object, failed ? &later : first);
    }
    return failed;
}

kn_session *kn_start(kn_library *library, const kn_request *request, kn_writer *writer, kn_failure *failure) {
    memset(failure, 0, sizeof *failure);
    bool sensible = request->metric_count > 0 && request->metric_count == writer->metrics && request->interval > 0 &&
                    request->interval_ns > 0 && request->poll_ns > 0;
    struct kn_session *session = sensible ? calloc(1, sizeof *session) : NULL;
    if (session == NULL) {
        kn_fail(failure, KN_SYSTEM, sensible ? ENOMEM : EINVAL, "kn_start", strerror(sensible ? ENOMEM : EINVAL));
        return NULL;
    }
    session->library = library;
    session->writer = writer;
    session->request = *request;
    session->request.metrics = (const char *const *)session->names;
    int failed = 0;
    for (uint32_t i = 0; i < request->metric_count && !failed; i++) {
        failed = (session->names[i] = strdup(request->metrics[i])) == NULL
                     ? kn_fail(failure, KN_SYSTEM, ENOMEM, "strdup", strerror(ENOMEM))
                     : 0;
    }
    pthread_mutex_lock(&library->setup);
    failed = failed || begin(session, failure);
    if (failed) {
        disable(session, false, failure);
    }
    pthread_mutex_unlock(&library->setup);
    if (failed) {
        kn_free(session);
        return NULL;
    }
    return session;
}

void kn_run(kn_session *session) {
    kn_failure failure = {0};
    int32_t end = sample(session, &failure);
    pthread_mutex_lock(&session->library->setup);
    if (disable(session, end != KN_ERROR, &failure)) {
        end = KN_ERROR;
    }
    pthread_mutex_unlock(&session->library->setup);
    kn_ring_end(session->writer, end, &failure);
}

void kn_free(kn_session *session) {
    kn_failure ignored;
    pthread_mutex_lock(&session->library->setup);
    disable(session, false, &ignored);
    kn_host_close(session->library, session->host);
    pthread_mutex_unlock(&session->library->setup);
    for (uint32_t i = 0; i < session->request.metric_count; i++) {
        free(session->names[i]);
    }
    free(session->config);
    free(session->image);
    free(session);
}
