/* A compiled "inference server" without Python and without a GPU: it launches kernels on the fake libcupti all the time.
 *
 *   fake_cuda_program [SOCKET COLLECTOR]
 *
 * With arguments, a thread of its own calls kc_serve of the library COLLECTOR with the inherited descriptor SOCKET;
 * without, nobody has prepared it. It prints "ready" after its first kernels and answers each line on its standard
 * input: "counts" by "launched N finalized N misused N", "threads" by their names, "fork" by the pid of a child that
 * waits for the end of its own standard input, "pause" and "resume" by their names, "set KEY VALUE" (fake_set) by itself. It exits with 0 at "exit" and at
 * the end of its input. A second thread sleeps in poll(2), as servers have them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_cupti.h"

int cuDeviceGetCount(int *count); /* links libcuda */

static const char *collector;

static void *run_collector(void *socket) {
    int (*serve)(int);
    void *library = dlopen(collector, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    *(void **)&serve = dlsym(library, "kc_serve");
    (void)serve((int)(intptr_t)socket);
    return NULL;
}

static void *sleep_in_poll(void *unused) {
    (void)unused;
    poll(NULL, 0, -1);
    return NULL;
}

static void start(void *(*run)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, argument) != 0) {
        exit(1);
    }
}

static void list_threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry = readdir(tasks); entry != NULL; entry = readdir(tasks)) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file != NULL) {
            if (fgets(name, sizeof name, file) != NULL) {
                name[strcspn(name, "\n")] = 0;
                printf("%s ", name);
            }
            fclose(file);
        }
    }
    closedir(tasks);
    printf("\n");
}

static void fork_child(void) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        char byte;
        while (read(0, &byte, 1) > 0) {
        }
        _exit(0);
    }
    printf("%d\n", child);
}

/* False at the end. */
static bool obey(char *line, uint64_t launched, bool *paused) {
    char key[32];
    long value;
    line[strcspn(line, "\n")] = 0;
    if (strcmp(line, "counts") == 0) {
        printf("launched %llu finalized %llu misused %llu\n", (unsigned long long)launched,
               (unsigned long long)fake_finalized(), (unsigned long long)fake_misused());
    } else if (strcmp(line, "threads") == 0) {
        list_threads();
    } else if (strcmp(line, "fork") == 0) {
        fork_child();
    } else if (strcmp(line, "pause") == 0 || strcmp(line, "resume") == 0) {
        *paused = line[0] == 'p';
        printf("%s\n", line);
    } else if (sscanf(line, "set %31s %ld", key, &value) == 2) {
        printf("%s\n", fake_set(key, value) == 0 ? line : "unknown");
    } else {
        return false;
    }
    fflush(stdout);
    return true;
}

int main(int argc, char **argv) {
    int devices;
    uint64_t launched = 0;
    bool paused = false;
    char line[64];
    struct pollfd input = {.fd = 0, .events = POLLIN};
    (void)cuDeviceGetCount(&devices);
    setvbuf(stdin, NULL, _IONBF, 0);
    start(sleep_in_poll, NULL);
    if (argc == 3) {
        collector = argv[2];
        start(run_collector, (void *)(intptr_t)atoi(argv[1]));
    }
    for (;;) {
        if (!paused) {
            fake_launch_many("void infer<float>(float const*)", 4, 1000, 0);
            launched += 4;
        }
        if (launched == 4 && !paused) {
            printf("ready\n");
            fflush(stdout);
        }
        if (poll(&input, 1, 1) > 0 && (fgets(line, sizeof line, stdin) == NULL || !obey(line, launched, &paused))) {
            return 0;
        }
    }
}
