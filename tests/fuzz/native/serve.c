/* The collector's server: packets of a daemon, one after the other, then the end of the socket.
 *
 * A packet is two bytes of length and that many bytes. The fake libcupti stands in for every library that OPEN names;
 * sizes and waits that are allowed are made small, so that an input takes milliseconds.
 */
#define _GNU_SOURCE
#include "remote/serve.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "cupti/collector.h"

#define PACKETS_MOST 24
#define SMALL_BYTES 65536u
#define WAIT_MS 2u

static void tame(struct serve_request *request, uint8_t *argument, size_t bytes) {
    struct kc_config config;
    uint32_t limit;
    if (request->command == SERVE_PREPARE && bytes == sizeof config) {
        memcpy(&config, argument, sizeof config);
        config.buffer_limit_bytes %= 1u << 20;
        config.prefault_bytes %= 1u << 20;
        if (config.buffer_bytes <= 1u << 30 && config.buffer_bytes > SMALL_BYTES) {
            config.buffer_bytes = SMALL_BYTES;
        }
        if (config.strings_bytes <= 1u << 30 && config.strings_bytes > SMALL_BYTES) {
            config.strings_bytes = SMALL_BYTES;
        }
        memcpy(argument, &config, sizeof config);
    }
    if ((request->command == SERVE_STOP || request->command == SERVE_DETACH) && bytes == sizeof limit) {
        memcpy(&limit, argument, sizeof limit);
        limit = limit < WAIT_MS ? limit : WAIT_MS;
        memcpy(argument, &limit, sizeof limit);
    }
}

static int send_one(int fd, const uint8_t *data, size_t bytes) {
    uint8_t packet[SERVE_PACKET_BYTES + 64];
    struct serve_request request;
    size_t length = bytes < sizeof packet ? bytes : sizeof packet;
    if (length) {
        memcpy(packet, data, length);
    }
    if (length >= sizeof request) {
        memcpy(&request, packet, sizeof request);
        if (request.command == SERVE_OPEN && length > sizeof request) {
            memcpy(packet + sizeof request, FAKE_CUPTI, sizeof FAKE_CUPTI - 1);
            length = sizeof request + sizeof FAKE_CUPTI - 1;
        }
        tame(&request, packet + sizeof request, length - sizeof request);
    }
    return send(fd, packet, length, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

static void *serving(void *fd) {
    kc_serve(*(int *)fd);
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int ends[2];
    pthread_t thread;
    expect(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "no socket");
    input_set(data, size);
    for (int sent = 0; sent < PACKETS_MOST && input.left > 2; sent++) {
        size_t bytes = next(65536);
        bytes = bytes < input.left ? bytes : input.left;
        if (!send_one(ends[0], input.at, bytes)) {
            break;
        }
        input_set(input.at + bytes, input.left - bytes);
    }
    shutdown(ends[0], SHUT_WR);
    expect(pthread_create(&thread, NULL, serving, &ends[1]) == 0, "no thread");
    pthread_join(thread, NULL);
    char answer[SERVE_PACKET_BYTES];
    char control[CMSG_SPACE(sizeof(int))];
    for (;;) {
        struct iovec part = {answer, sizeof answer};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(ends[0], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got <= 0) {
            break;
        }
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_type == SCM_RIGHTS) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
            close(descriptor);
        }
        struct serve_answer head;
        memcpy(&head, answer, sizeof head);
        expect((size_t)got == sizeof head + head.result_bytes + head.text_bytes, "an answer of another length");
    }
    close(ends[0]);
    return 0;
}
