/* The collector's thread and the daemon's half of its channel in one program, for machines that only an emulator has.
 *
 *   stub_alone CODE LIBRARY
 *
 * Runs the machine code of the file CODE on a thread, finds its channel, sends LIBRARY in a memfd and prints the packet
 * that comes back, and how many descriptors are open more than at first (our own end among them).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "collector_stub.h"

#define CODE_BYTES 4096

static void *read_code(const char *path) {
    void *place = mmap(NULL, CODE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (read(fd, place, CODE_BYTES) <= 0 || mprotect(place, CODE_BYTES, PROT_READ | PROT_EXEC) != 0) {
        exit(2);
    }
    close(fd);
    __builtin___clear_cache((char *)place, (char *)place + CODE_BYTES);
    return place;
}

static int look(int *open_ones) {
    int found = -1;
    DIR *folder = opendir("/proc/self/fd");
    *open_ones = 0;
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char path[300], name[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        if (readlink(path, name, sizeof name - 1) > 0) {
            ++*open_ones;
            (void)sscanf(name, "/memfd:kineto-1700000000000000007-%d", &found);
        }
    }
    closedir(folder);
    return found;
}

static void send_library(int channel, const char *path) {
    char buffer[4096];
    const int from = open(path, O_RDONLY | O_CLOEXEC), to = memfd_create("library", MFD_CLOEXEC);
    for (ssize_t got = read(from, buffer, sizeof buffer); got > 0; got = read(from, buffer, sizeof buffer)) {
        if (write(to, buffer, (size_t)got) != got) {
            exit(2);
        }
    }
    close(from);
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.header), &to, sizeof to);
    struct iovec part = {.iov_base = "K", .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (sendmsg(channel, &message, 0) != 1) {
        exit(2);
    }
    close(to);
}

int main(int argc, char **argv) {
    struct collector_argument argument = {.open = dlopen,
                                          .symbol = dlsym,
                                          .error = dlerror,
                                          .self = pthread_self,
                                          .detach = pthread_detach,
                                          .wait_ms = 10000,
                                          .channel = "kineto-1700000000000000007-",
                                          .path = "/proc/self/fd/",
                                          .name = "kc_serve"};
    int before, after, theirs;
    char packet[600];
    pthread_t thread;
    void *(*run)(void *);
    void *code = argc == 3 ? read_code(argv[1]) : NULL;
    memcpy(&run, &code, sizeof run);
    (void)look(&before);
    if (code == NULL || pthread_create(&thread, NULL, run, &argument) != 0) {
        return 2;
    }
    while ((theirs = look(&after)) < 0) {
        usleep(1000);
    }
    const int channel = dup(theirs);
    send_library(channel, argv[2]);
    const ssize_t got = recv(channel, packet, sizeof packet - 1, 0);
    packet[got > 0 ? got : 0] = 0;
    while (recv(channel, packet + sizeof packet - 1, 1, 0) > 0) {
    }
    (void)look(&after);
    printf("%s %d\n", packet, after - before);
    return 0;
}
