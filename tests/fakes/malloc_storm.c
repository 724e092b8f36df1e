/* A program whose threads do nothing but malloc and free; one of them loads and unloads a library all the time.
 *
 *   malloc_storm THREADS PARKED
 *
 * Besides THREADS of those (the main thread is one) PARKED threads sleep. Checks every byte that it frees and ends
 * with 1 if one is wrong. Prints "ready".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 64u
#define MOST_BYTES 4096u
#define LOAD_EVERY 2000u

struct block {
    uint8_t *data;
    size_t bytes;
};

static void check(const struct block *block, uint8_t value) {
    for (size_t i = 0; i < block->bytes; i++) {
        if (block->data[i] != value) {
            fprintf(stderr, "a byte has changed\n");
            exit(1);
        }
    }
}

static void *storm(void *number) {
    struct block blocks[BLOCKS] = {{0}};
    unsigned int seed = (unsigned int)(uintptr_t)number;
    const uint8_t value = (uint8_t)(seed + 1);
    for (uint64_t round = 0;; round++) {
        struct block *block = &blocks[(unsigned int)rand_r(&seed) % BLOCKS];
        check(block, value);
        free(block->data);
        block->bytes = (unsigned int)rand_r(&seed) % MOST_BYTES + 1;
        block->data = malloc(block->bytes);
        memset(block->data, value, block->bytes);
        if ((uintptr_t)number == 1 && round % LOAD_EVERY == 0) {
            void *library = dlopen("libm.so.6", RTLD_NOW);
            if (library != NULL) {
                dlclose(library);
            }
        }
    }
    return NULL;
}

static void *park(void *unused) {
    (void)unused;
    poll(NULL, 0, -1);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t thread;
    for (int i = argc == 3 ? atoi(argv[2]) : 0; i > 0; i--) {
        (void)pthread_create(&thread, NULL, park, NULL);
    }
    for (intptr_t i = argc == 3 ? atoi(argv[1]) - 1 : 0; i > 0; i--) {
        (void)pthread_create(&thread, NULL, storm, (void *)i);
    }
    printf("ready\n");
    fflush(stdout);
    storm(NULL);
}
