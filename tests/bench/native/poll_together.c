// Processes that poll a daemon at the same moment, each as its own libkineto does; and a bare server to compare with.
//
// usage: poll_together clients FOLDER PROCESSES ROUNDS PERIOD_MS   (FOLDER: "-" is the abstract name)
//        poll_together server FOLDER
// clients: one line for each poll: "round answered_us tries". answered_us: from the process's first attempt to send to
// the moment at which the answer can be read, or -1 if none comes within a second. A full queue is tried again as
// libkineto does: after 10 ms, 20 ms and so on.
// server: receives a datagram with its sender's credentials and answers that there is nothing, in two system calls.
// It prints a line when it can be reached, and ends with its standard input.

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 40, POLL_BYTES = 64, TRIES = 10, PATIENCE_MS = 1000, BEFORE_FIRST_MS = 300 };

struct outcome {
    int64_t answered_us;
    int tries;
};

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static void sleep_until_us(int64_t at_us) {
    struct timespec at = {at_us / 1000000, at_us % 1000000 * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL)) {
    }
}

// An abstract name has a zero at both ends, as libkineto makes it.
static socklen_t address_of(const char *folder, const char *name, struct sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int abstract = strcmp(folder, "-") == 0;
    char *path = address->sun_path;
    int length = abstract ? snprintf(path + 1, sizeof address->sun_path - 1, "%s", name) + 1
                          : snprintf(path, sizeof address->sun_path, "%s/%s", folder, name);
    return offsetof(struct sockaddr_un, sun_path) + length + 1;
}

static int bound(const char *folder, const char *name) {
    struct sockaddr_un address;
    socklen_t length = address_of(folder, name, &address);
    int sock = socket(AF_UNIX, SOCK_DGRAM, 0);
    if (sock < 0 || bind(sock, (struct sockaddr *)&address, length)) {
        perror("bind");
        exit(1);
    }
    return sock;
}

static struct outcome poll_once(int sock, const struct sockaddr_un *daemon, socklen_t length) {
    unsigned char request[POLL_BYTES] = {0}, answer[HEADER_BYTES + 4096];
    *(uint64_t *)request = POLL_BYTES - HEADER_BYTES;
    memcpy(request + 8, "req", 3);
    int32_t *body = (int32_t *)(request + HEADER_BYTES);
    body[0] = 3; // free
    body[1] = 2; // pids
    body[4] = getpid();
    body[5] = getppid();
    int64_t began_us = now_us();
    struct outcome outcome = {-1, 0};
    for (int64_t pause_us = 10000; outcome.tries++ < TRIES; pause_us *= 2) {
        if (sendto(sock, request, sizeof request, MSG_DONTWAIT, (const struct sockaddr *)daemon, length) >= 0) {
            struct pollfd ready = {sock, POLLIN, 0};
            if (poll(&ready, 1, PATIENCE_MS) == 1) {
                outcome.answered_us = now_us() - began_us;
                recv(sock, answer, sizeof answer, MSG_DONTWAIT);
            }
            break;
        }
        if (errno != EAGAIN && errno != ECONNREFUSED) {
            break;
        }
        sleep_until_us(now_us() + pause_us);
    }
    return outcome;
}

// Polls itself once, so that the first round measures the daemon and not this process's own page faults.
static void warm_up(int sock, const char *folder, const char *name) {
    struct sockaddr_un own;
    socklen_t length = address_of(folder, name, &own);
    poll_once(sock, &own, length);
}

static void client(const char *folder, int rounds, int64_t first_us, int64_t period_us, struct outcome *outcomes) {
    char name[64];
    snprintf(name, sizeof name, "dynoconfigclient%08x-0000-0000-0000-000000000000", getpid());
    int sock = bound(folder, name);
    warm_up(sock, folder, name);
    struct sockaddr_un daemon;
    socklen_t length = address_of(folder, "dynolog", &daemon);
    for (int round = 0; round < rounds; round++) {
        sleep_until_us(first_us + round * period_us);
        outcomes[round] = poll_once(sock, &daemon, length);
    }
    if (strcmp(folder, "-")) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", folder, name);
        unlink(path);
    }
}

static int clients(const char *folder, int processes, int rounds, int64_t period_us) {
    size_t size = sizeof(struct outcome) * processes * rounds;
    struct outcome *outcomes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t first_us = now_us() + BEFORE_FIRST_MS * 1000;
    for (int each = 0; each < processes; each++) {
        if (fork() == 0) {
            client(folder, rounds, first_us, period_us, outcomes + each * rounds);
            _exit(0);
        }
    }
    while (wait(NULL) > 0) {
    }
    for (int at = 0; at < processes * rounds; at++) {
        printf("%d %lld %d\n", at % rounds, (long long)outcomes[at].answered_us, outcomes[at].tries);
    }
    return 0;
}

static int server(const char *folder) {
    int sock = bound(folder, "dynolog"), on = 1;
    setsockopt(sock, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    puts("");
    fflush(stdout);
    struct pollfd ready[2] = {{sock, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    while (poll(ready, 2, -1) > 0 && !ready[1].revents) {
        struct sockaddr_un address;
        unsigned char request[4096], credentials[64], answer[HEADER_BYTES] = {0};
        memcpy(answer + 8, "req", 3);
        struct iovec content = {request, sizeof request};
        struct msghdr message = {&address, sizeof address, &content, 1, credentials, sizeof credentials, 0};
        while (recvmsg(sock, &message, MSG_DONTWAIT) >= 0) {
            sendto(sock, answer, sizeof answer, MSG_DONTWAIT, (struct sockaddr *)&address, message.msg_namelen);
            message.msg_namelen = sizeof address;
            message.msg_controllen = sizeof credentials;
        }
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count == 6 && strcmp(arguments[1], "clients") == 0) {
        return clients(arguments[2], atoi(arguments[3]), atoi(arguments[4]), atoll(arguments[5]) * 1000);
    }
    if (count == 3 && strcmp(arguments[1], "server") == 0) {
        return server(arguments[2]);
    }
    fputs("usage: poll_together clients FOLDER PROCESSES ROUNDS PERIOD_MS | server FOLDER\n", stderr);
    return 2;
}
