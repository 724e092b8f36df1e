/* Forks at every moment of an arena's life: while its memfd is being made, before anybody has the arena, and after its
 * end. No child may have the descriptor, not even one whose memory is from later than its descriptors: a fork copies
 * these first. Linked with --wrap=fcntl,close.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/arena.h"

static int moments, kept;

int __real_fcntl(int fd, int command, long argument);
int __real_close(int fd);

static int has_memfd(void) {
    char path[32], name[64];
    for (int fd = 0; fd < 128; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const ssize_t got = readlink(path, name, sizeof name);
        if (got > 7 && memcmp(name, "/memfd:", 7) == 0) {
            return 1;
        }
    }
    return 0;
}

static void fork_now(void) {
    int status;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        _exit(has_memfd());
    }
    waitpid(child, &status, 0);
    moments++;
    kept += status != 0;
}

int __wrap_fcntl(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    const long argument = va_arg(more, long);
    va_end(more);
    fork_now();
    const int result = __real_fcntl(fd, command, argument);
    fork_now();
    return result;
}

int __wrap_close(int fd) {
    static int inside;
    if (!inside++) {
        fork_now();
    }
    inside--;
    return __real_close(fd);
}

/* The table as it was before the memfd got its last number, or was closed; the memory is from after that. */
static void fork_with_number(int source, int number) {
    const int in_use = dup2(source, number);
    __real_close(source);
    fork_now();
    __real_close(in_use);
}

int main(void) {
    struct arena first, second, third;
    const char *step = "";
    if (arena_create(&first, 2, 4096, 4096, &step) != 0 || arena_create(&second, 2, 4096, 4096, &step) != 0) {
        return 2;
    }
    fork_now();
    arena_destroy(&first);
    fork_now();
    arena_destroy(&second);
    if (arena_create(&third, 2, 4096, 4096, &step) != 0) {
        return 2;
    }
    fork_with_number(dup(third.fd), third.first_fd);
    const int copy = dup(third.fd), number = third.fd;
    arena_destroy(&third);
    fork_with_number(copy, number);
    printf("%d of %d children, %d left\n", kept, moments, has_memfd());
    return 0;
}
