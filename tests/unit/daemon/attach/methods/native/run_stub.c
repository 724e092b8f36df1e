/* Runs machine code that it reads on a thread of its own, as a live attach would.
 *
 * Prints "ready", then reads from standard input two byte strings, each after its length (u32): the code, and what
 * the thread gets a pointer to. Every further line is repeated on standard output; "wipe" unmaps both before.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGES_BYTES 8192

static uint8_t *read_string(int protection) {
    uint32_t bytes;
    uint8_t *place = mmap(NULL, PAGES_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED || fread(&bytes, sizeof bytes, 1, stdin) != 1 || bytes > PAGES_BYTES ||
        fread(place, 1, bytes, stdin) != bytes || mprotect(place, PAGES_BYTES, protection) != 0) {
        exit(2);
    }
    return place;
}

int main(void) {
    char line[16];
    pthread_t thread;
    setvbuf(stdin, NULL, _IONBF, 0);
    printf("ready\n");
    fflush(stdout);
    uint8_t *code = read_string(PROT_READ | PROT_EXEC);
    uint8_t *argument = read_string(PROT_READ | PROT_WRITE);
    void *(*run)(void *);
    memcpy(&run, &code, sizeof run);
    if (pthread_create(&thread, NULL, run, argument) != 0) {
        return 2;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "wipe\n") == 0) {
            munmap(code, PAGES_BYTES);
            munmap(argument, PAGES_BYTES);
        }
        printf("%s", line);
        fflush(stdout);
    }
    return 0;
}
