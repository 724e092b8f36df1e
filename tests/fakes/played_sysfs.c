/* LD_PRELOAD: what /sys has of GPUs is what $PLAYED_SYSFS has, for processes that look nowhere else. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const PLAYED_PARTS[] = {"/sys/class/drm", "/sys/class/kfd", "/sys/module/amdgpu"};

static const char *played(const char *path, char *room, size_t size) {
    const char *root = getenv("PLAYED_SYSFS");
    for (size_t part = 0; path != NULL && root != NULL && part < sizeof PLAYED_PARTS / sizeof *PLAYED_PARTS; part++) {
        if (strncmp(path, PLAYED_PARTS[part], strlen(PLAYED_PARTS[part])) == 0 &&
            snprintf(room, size, "%s%s", root, path + 4) < (int)size) {
            return room;
        }
    }
    return path;
}

#define NEXT(name) (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PLAYED(path) \
    char room[4096]; \
    path = played(path, room, sizeof room)

static mode_t mode_of(int flags, va_list arguments) { return (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0; }

#define OPENS(name)                              \
    int name(const char *path, int flags, ...) { \
        va_list arguments;                       \
        va_start(arguments, flags);              \
        mode_t mode = mode_of(flags, arguments); \
        va_end(arguments);                       \
        PLAYED(path);                            \
        return (NEXT(name))(path, flags, mode);  \
    }

#define STATS(name, type)                     \
    int name(const char *path, type *found) { \
        PLAYED(path);                         \
        return (NEXT(name))(path, found);     \
    }

OPENS(open)
OPENS(open64)
STATS(stat, struct stat)
STATS(stat64, struct stat64)
STATS(lstat, struct stat)
STATS(lstat64, struct stat64)

DIR *opendir(const char *path) {
    PLAYED(path);
    return (NEXT(opendir))(path);
}

ssize_t readlink(const char *path, char *found, size_t size) {
    PLAYED(path);
    return (NEXT(readlink))(path, found, size);
}
