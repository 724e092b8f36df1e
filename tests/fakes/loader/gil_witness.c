/* Preloaded into a Python program: writes into the file that GIL_WITNESS names which call of the loader, or opening of
 * a file, a thread of ours (kineto-...) makes with the GIL in hand. Calls by address and of the kernel pass it by; /proc
 * is the kernel's memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int (*holds_gil)(void);
static void *(*real_dlopen)(const char *, int);
static void *(*real_dlsym)(void *, const char *);

__attribute__((constructor)) static void begin(void) {
    const char *versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    for (int i = 0; i < 3 && (real_dlopen == NULL || real_dlsym == NULL); i++) {
        *(void **)&real_dlopen = dlvsym(RTLD_NEXT, "dlopen", versions[i]);
        *(void **)&real_dlsym = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    }
    *(void **)&holds_gil = real_dlsym(RTLD_DEFAULT, "PyGILState_Check");
}

static void witness(const char *call, const char *name) {
    char thread[16] = "", line[600];
    (void)prctl(PR_GET_NAME, thread);
    if (strncmp(thread, "kineto-", 7) != 0 || (name != NULL && strncmp(name, "/proc/", 6) == 0) || holds_gil == NULL ||
        !holds_gil()) {
        return;
    }
    const int length = snprintf(line, sizeof line, "%s %s %.500s\n", thread, call, name != NULL ? name : "");
    const int file = (int)syscall(SYS_openat, AT_FDCWD, getenv("GIL_WITNESS"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file >= 0) {
        (void)!write(file, line, (size_t)length);
        close(file);
    }
}

void *dlopen(const char *path, int mode) {
    witness("dlopen", path);
    return real_dlopen(path, mode);
}

void *dlsym(void *library, const char *name) {
    if (real_dlsym == NULL) {
        begin();
    }
    witness("dlsym", name);
    return real_dlsym(library, name);
}

static int opened(const char *path, int flags, va_list more) {
    witness("open", path);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, va_arg(more, unsigned int));
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int file = opened(path, flags, more);
    va_end(more);
    return file;
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int file = opened(path, flags, more);
    va_end(more);
    return file;
}
