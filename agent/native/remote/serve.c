/* The collector for a process without Python: serves its functions by packets. serve.h defines the packets.
 *
 * Theory of operation
 *   A dedicated thread calls kc_serve with its end of a socket and stays until the other end is closed or sends LEAVE:
 *   one packet, one call, one answer. The decisions (which libcupti, which activities, how long) are made at the other
 *   end, in a process of the daemon.
 *
 *   End of the socket: a recording in progress is ended like a capture: stop, detach, close. So the death of a daemon
 *   leaves a process as it was.
 *
 *   Fork: a child has no such thread; it closes the descriptor, otherwise the daemon would not see our end. Exit: the
 *   handler waits for the command in progress, and no other is started: vendor libraries are about to be torn down. It
 *   runs before the collector's own exit handler, because it is registered again after kc_prepare has registered that
 *   one.
 *
 *   A program may close descriptors that it did not open and reuse the number. The number is checked before each use,
 *   and abandoned if it is not our socket any more.
 *
 * Threads: a dedicated thread of the target, created by the daemon, with signals blocked. at_exit runs on the thread
 *   that exits.
 * Blocks: the thread sleeps in recvmsg between packets and blocks as the collector's functions do. at_exit waits for
 *   the command in progress, up to its limit.
 */
#define _GNU_SOURCE
#include "remote/serve.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "common/own_threads.h"
#include "cupti/cuda_devices.h"
#include "cupti/collector.h"

#define THREAD_NAME "kineto-agent"
#define BUFFER_BYTES_LEAST 4096u
#define BUFFER_BYTES_MOST (1u << 30)
#define KINDS_LIMIT 16u
#define PATH_LIMIT 4096u
#define LIMIT_MS_MOST 30000u
#define STOP_LIMIT_MS 2000u /* as in sources/cupti/gpu_activities.py */
#define DETACH_LIMIT_MS 1000u
#define DETACH_VERSION 24u
#define EXIT_LIMIT_S 1

static struct {
    _Atomic bool running;
    _Atomic bool forked; /* this is a child forked from a process that was being served */
    bool hooked;         /* the fork handler is registered */
    bool exit_hooked;    /* the exit handler is registered, after the collector's */
    _Atomic bool exiting;
    pthread_mutex_t working; /* held during a command; for good once the process exits */
    _Atomic int fd;          /* -1: none */
    dev_t device;            /* identity of fd when we got it */
    ino_t inode;
    uint32_t version; /* of CUPTI, 0: not opened */
    uint8_t request[SERVE_PACKET_BYTES + 1] __attribute__((aligned(8)));
    char text[SERVE_TEXT_BYTES];
} serve = {.working = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

struct answer {
    int code;
    uint32_t bytes;
    int descriptor; /* -1: none */
    union {
        uint32_t number;
        int32_t result;
        int32_t results[KINDS_LIMIT];
        struct kc_counts counts;
        struct kc_stop_result stopped;
        struct kc_detach_result detached;
        struct device_facts device;
        struct kc_others others;
        struct kc_drain_result drained;
    } as;
};

struct argument {
    const uint8_t *data; /* a NUL follows */
    size_t bytes;
};

/* ---- fork and exit ---- */

static bool is_ours(int fd) {
    struct stat now;
    return fd >= 0 && fstat(fd, &now) == 0 && now.st_dev == serve.device && now.st_ino == serve.inode;
}

static void in_forked_child(void) {
    const int fd = atomic_exchange(&serve.fd, -1);
    if (atomic_load(&serve.running)) {
        atomic_store(&serve.forked, true);
        if (is_ours(fd)) {
            close(fd);
        }
    }
}

static void at_exit(void) {
    if (atomic_load(&serve.forked) || !atomic_load(&serve.running) || atomic_exchange(&serve.exiting, true)) {
        return;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_LIMIT_S;
    (void)pthread_mutex_timedlock(&serve.working, &until);
}

/* ---- the socket ---- */

/* Returns the bytes of the next packet; 0 at the end. recvmsg: a seccomp filter that admits the agent allows it. */
static size_t receive(void) {
    for (;;) {
        const int fd = atomic_load(&serve.fd);
        struct iovec part = {.iov_base = serve.request, .iov_len = SERVE_PACKET_BYTES};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        if (!is_ours(fd)) {
            return 0;
        }
        const ssize_t got = recvmsg(fd, &message, 0);
        if (got >= 0 || errno != EINTR) {
            return got > 0 && (message.msg_flags & MSG_TRUNC) == 0 ? (size_t)got : 0;
        }
    }
}

static void attach_descriptor(struct msghdr *message, void *control, size_t control_bytes, int descriptor) {
    message->msg_control = control;
    message->msg_controllen = control_bytes;
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
}

static bool reply(const struct serve_request *request, struct answer *answer) {
    struct serve_answer header = {.magic = SERVE_ANSWER_MAGIC,
                                  .command = request->command,
                                  .sequence = request->sequence,
                                  .code = answer->code,
                                  .result_bytes = answer->bytes,
                                  .text_bytes = (uint32_t)strnlen(serve.text, sizeof serve.text)};
    struct iovec parts[] = {{.iov_base = &header, .iov_len = sizeof header},
                            {.iov_base = &answer->as, .iov_len = header.result_bytes},
                            {.iov_base = serve.text, .iov_len = header.text_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = sizeof parts / sizeof *parts};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    if (answer->descriptor >= 0) {
        attach_descriptor(&message, &control, sizeof control, answer->descriptor);
    }
    for (;;) {
        const int fd = atomic_load(&serve.fd);
        if (!is_ours(fd)) {
            return false;
        }
        if (sendmsg(fd, &message, MSG_NOSIGNAL) >= 0) {
            return true;
        }
        if (errno != EINTR) {
            return false;
        }
    }
}

/* ---- the commands ---- */

static bool has_bytes(struct argument argument, size_t bytes, struct answer *answer) {
    if (argument.bytes == bytes) {
        return true;
    }
    snprintf(serve.text, sizeof serve.text, "a request with %zu bytes of argument instead of %zu", argument.bytes,
             bytes);
    answer->code = KC_ORDER;
    return false;
}

static uint32_t first_word(struct argument argument) {
    uint32_t word;
    memcpy(&word, argument.data, sizeof word);
    return word;
}

static uint32_t limit_ms(struct argument argument) {
    const uint32_t limit = first_word(argument);
    return limit < LIMIT_MS_MOST ? limit : LIMIT_MS_MOST;
}

static void refuse(struct answer *answer, const char *why) {
    snprintf(serve.text, sizeof serve.text, "%s", why);
    answer->code = KC_ORDER;
}

static void do_abi(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->as.number = kc_abi();
    answer->bytes = sizeof answer->as.number;
}

static void do_open(struct argument argument, struct answer *answer) {
    if (argument.bytes == 0 || argument.bytes >= PATH_LIMIT || memchr(argument.data, 0, argument.bytes) != NULL) {
        refuse(answer, "not a path of a library");
        return;
    }
    answer->code = kc_open((const char *)argument.data, &answer->as.number, serve.text, sizeof serve.text);
    answer->bytes = sizeof answer->as.number;
    serve.version = answer->code == 0 ? answer->as.number : 0;
}

static void do_prepare(struct argument argument, struct answer *answer) {
    struct kc_config config;
    if (!has_bytes(argument, sizeof config, answer)) {
        return;
    }
    memcpy(&config, argument.data, sizeof config);
    if (config.buffer_bytes < BUFFER_BYTES_LEAST || config.buffer_bytes > BUFFER_BYTES_MOST ||
        config.strings_bytes > BUFFER_BYTES_MOST || config.buffer_bytes % BUFFER_BYTES_LEAST != 0 ||
        config.strings_bytes % BUFFER_BYTES_LEAST != 0) {
        refuse(answer, "sizes of buffers out of range");
        return;
    }
    const int made = kc_prepare(&config, serve.text, sizeof serve.text);
    answer->code = made < 0 ? made : 0;
    answer->descriptor = made;
    if (made >= 0 && !serve.exit_hooked) {
        serve.exit_hooked = atexit(at_exit) == 0;
    }
}

static void do_keep_calls(struct argument argument, struct answer *answer) {
    const uint32_t domain_bytes = sizeof(uint32_t);
    const char *patterns = (const char *)argument.data + domain_bytes;
    const size_t bytes = argument.bytes - domain_bytes;
    if (argument.bytes <= domain_bytes || patterns[bytes - 1] != 0 || (bytes > 1 && patterns[bytes - 2] != 0)) {
        refuse(answer, "a list of calls without an end");
        return;
    }
    answer->code = kc_keep_calls(first_word(argument), patterns, bytes);
}

static void do_subscribe(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->as.result = -1;
    answer->code = kc_subscribe(&answer->as.result);
    answer->bytes = sizeof answer->as.result;
}

static void do_record_calls(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->code = kc_record_calls(serve.text, sizeof serve.text);
}

static void do_yield(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->code = kc_yield();
}

static void do_start(struct argument argument, struct answer *answer) {
    uint32_t kinds[KINDS_LIMIT];
    const uint32_t count = (uint32_t)(argument.bytes / sizeof *kinds);
    if (argument.bytes > sizeof kinds || argument.bytes % sizeof *kinds != 0) {
        refuse(answer, "not a list of activity kinds");
        return;
    }
    memcpy(kinds, argument.data, argument.bytes);
    answer->code = kc_start(kinds, count, answer->as.results, serve.text, sizeof serve.text);
    answer->bytes = count * (uint32_t)sizeof *answer->as.results;
}

static void do_counts(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->code = kc_counts(&answer->as.counts);
    answer->bytes = sizeof answer->as.counts;
}

static void do_stop(struct argument argument, struct answer *answer) {
    if (has_bytes(argument, sizeof(uint32_t), answer)) {
        answer->code = kc_stop(limit_ms(argument), &answer->as.stopped);
        answer->bytes = sizeof answer->as.stopped;
    }
}

static void do_detach(struct argument argument, struct answer *answer) {
    if (has_bytes(argument, sizeof(uint32_t), answer)) {
        answer->code = kc_detach(limit_ms(argument), &answer->as.detached);
        answer->bytes = sizeof answer->as.detached;
    }
}

static void do_close(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->code = kc_close();
}

static void do_result_text(struct argument argument, struct answer *answer) {
    if (has_bytes(argument, sizeof(int32_t), answer)) {
        kc_result_text((int32_t)first_word(argument), serve.text, sizeof serve.text);
    }
}

static void do_device(struct argument argument, struct answer *answer) {
    int32_t attributes[DEVICE_ATTRIBUTES];
    const size_t bytes = argument.bytes - sizeof(uint32_t);
    if (argument.bytes < sizeof(uint32_t) || bytes > sizeof attributes || bytes % sizeof *attributes != 0) {
        refuse(answer, "not a list of device attributes");
        return;
    }
    memcpy(attributes, argument.data + sizeof(uint32_t), bytes);
    device_describe(first_word(argument), attributes, (uint32_t)(bytes / sizeof *attributes), &answer->as.device);
    answer->bytes = sizeof answer->as.device;
}

static void do_others(struct argument argument, struct answer *answer) {
    (void)argument;
    answer->code = kc_others(&answer->as.others);
    answer->bytes = sizeof answer->as.others;
}

static void do_drain(struct argument argument, struct answer *answer) {
    struct kc_drain_wish wish;
    if (has_bytes(argument, sizeof wish, answer)) {
        memcpy(&wish, argument.data, sizeof wish);
        wish.stream_count = 0;
        answer->code = kc_drain(&wish, NULL, &answer->as.drained);
        answer->bytes = sizeof answer->as.drained;
    }
}

static void end_recording(void) {
    struct kc_stop_result stopped;
    struct kc_detach_result detached;
    (void)kc_stop(STOP_LIMIT_MS, &stopped);
    if (serve.version >= DETACH_VERSION) {
        (void)kc_detach(DETACH_LIMIT_MS, &detached); /* refused if there is nothing to detach */
    }
    (void)kc_close();
}

static void do_leave(struct argument argument, struct answer *answer) {
    (void)argument;
    (void)answer;
    end_recording();
}

static void (*const COMMANDS[])(struct argument, struct answer *) = {
    [SERVE_ABI] = do_abi,
    [SERVE_OPEN] = do_open,
    [SERVE_PREPARE] = do_prepare,
    [SERVE_KEEP_CALLS] = do_keep_calls,
    [SERVE_SUBSCRIBE] = do_subscribe,
    [SERVE_RECORD_CALLS] = do_record_calls,
    [SERVE_YIELD] = do_yield,
    [SERVE_START] = do_start,
    [SERVE_COUNTS] = do_counts,
    [SERVE_STOP] = do_stop,
    [SERVE_DETACH] = do_detach,
    [SERVE_CLOSE] = do_close,
    [SERVE_RESULT_TEXT] = do_result_text,
    [SERVE_DEVICE] = do_device,
    [SERVE_LEAVE] = do_leave,
    [SERVE_OTHERS] = do_others,
    [SERVE_DRAIN] = do_drain,
};

/* Serves one packet; false at the end. */
static bool serve_one(size_t bytes) {
    struct serve_request request;
    struct answer answer;
    memset(&answer, 0, sizeof answer);
    answer.descriptor = -1;
    if (bytes < sizeof request) {
        return false;
    }
    memcpy(&request, serve.request, sizeof request);
    if (request.magic != SERVE_REQUEST_MAGIC) {
        return false;
    }
    serve.request[bytes] = 0;
    serve.text[0] = 0;
    if (request.command == 0 || request.command >= sizeof COMMANDS / sizeof *COMMANDS) {
        refuse(&answer, "unknown command");
    } else {
        const struct argument argument = {serve.request + sizeof request, bytes - sizeof request};
        COMMANDS[request.command](argument, &answer);
    }
    return reply(&request, &answer) && request.command != SERVE_LEAVE;
}

/* ---- exported ---- */

static bool greet(int code, const char *text) {
    const struct serve_request request = {.command = SERVE_ABI};
    struct answer answer = {.code = code, .descriptor = -1, .bytes = sizeof(uint32_t), .as.number = kc_abi()};
    snprintf(serve.text, sizeof serve.text, "%s", text);
    return reply(&request, &answer);
}

static bool take_socket(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) {
        return false;
    }
    serve.device = status.st_dev;
    serve.inode = status.st_ino;
    atomic_store(&serve.fd, fd);
    return true;
}

static void serve_until_end(void) {
    bool goes_on = greet(0, "");
    while (goes_on) {
        const size_t bytes = receive();
        pthread_mutex_lock(&serve.working); /* forever, once the process exits */
        goes_on = bytes > 0 && serve_one(bytes);
        if (!goes_on) {
            end_recording();
        }
        pthread_mutex_unlock(&serve.working);
    }
}

int kc_serve(int fd) {
    if (atomic_load(&serve.forked)) {
        close(fd);
        return KC_FORKED;
    }
    if (atomic_exchange(&serve.running, true)) {
        close(fd);
        return KC_ORDER;
    }
    block_signals(NULL);
    prctl(PR_SET_NAME, THREAD_NAME);
    if (!serve.hooked) {
        serve.hooked = pthread_atfork(NULL, NULL, in_forked_child) == 0;
    }
    const bool taken = take_socket(fd);
    if (taken) {
        serve_until_end();
        fd = atomic_exchange(&serve.fd, -1);
        if (is_ours(fd)) {
            close(fd);
        }
    }
    serve.version = 0;
    atomic_store(&serve.running, false);
    return taken ? 0 : KC_SYSTEM;
}
