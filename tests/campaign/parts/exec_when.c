/* A thread without Python that waits for one byte and then executes a program: no lock of the interpreter is in its way. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct wish {
    int fd;
    char **argv;
};

static void *wait_and_exec(void *argument) {
    struct wish *wish = argument;
    char byte;
    if (read(wish->fd, &byte, 1) == 1) {
        execv(wish->argv[0], wish->argv);
    }
    _exit(5);
}

int exec_when(int fd, char **argv) {
    pthread_t thread;
    struct wish *wish = malloc(sizeof *wish);
    wish->fd = fd;
    wish->argv = argv;
    return pthread_create(&thread, NULL, wait_and_exec, wish);
}
