/* What the agent's thread opens, without the GIL: an extension module of the standard library, or a file.
 *
 *     python daemon/native/generate_stub_code.py
 *
 * compiles it into the bytes of opening_code.py, which are copied into the target beside python_stub.c. It is a function
 * of Python: native(path, symbol, address, bytes, number[, spec, name, file, modules]). Its `self` are bytes in which
 * the address of the argument of python_stub.c stands behind two marks, since the layout of objects differs.
 *
 * Python's own imports call dlopen with the GIL in hand. dlopen waits for the loader's lock, which another thread may
 * have for seconds while it runs the constructors of a library; if one of these takes the GIL, neither goes on for
 * good. Here the library is opened without the GIL, and the module is then made from it as Python would make it: by
 * its init function. Where Python keeps what was made for a later import (modules that cannot be made twice, up to
 * 3.12), it is given it.
 *
 * In a child that was forked while a library was being opened, the loader takes itself to be at work for ever, and ends
 * the process when it next looks. An empty path mends that; the fork hook of the bootstrap asks for it.
 *
 * A file is read whole, in one call: its descriptor is moved to the high end at once and compared before it is closed.
 */
#include "python_stub.h"
#include "common/system_call.h"

static void *call(struct python_argument *given, void *arguments);

/* First in the file: the bytes begin here. */
void *opening(const unsigned long *self, void *arguments) {
    while (self[0] != OPENING_MARK || self[1] != OPENING_MARK_2) {
        self++;
    }
    return call((struct python_argument *)self[2], arguments);
}

#define OPEN_NOW 2 /* RTLD_NOW */
#define AT_FDCWD (-100L)
#define CLOEXEC 02000000L
#define DUPFD_CLOEXEC 1030L
#define BAD_DESCRIPTOR (-9L) /* EBADF */
#define API_VERSION 1013     /* of modules; the same in every Python 3 */

struct file_status {
    unsigned long device, inode, more[16];
};

/* Returns the number of bytes, or an error number below 0. */
static __attribute__((noinline)) long read_file(const char *path, char *data, unsigned long size,
                                                unsigned long number) {
    struct file_status before, after;
    unsigned long done = 0;
    long got = 1;
    long file = system_call(SYS_OPENAT, AT_FDCWD, (long)path, CLOEXEC, 0);
    if (file < 0) {
        return file;
    }
    const long high = system_call(SYS_FCNTL, file, DUPFD_CLOEXEC, (long)number, 0);
    if (high >= 0) {
        (void)system_call(SYS_CLOSE, file, 0, 0, 0);
        file = high;
    }
    if (system_call(SYS_FSTAT, file, (long)&before, 0, 0) != 0) {
        return BAD_DESCRIPTOR;
    }
    while (got > 0 && done < size) {
        got = system_call(SYS_READ, file, (long)data + (long)done, (long)(size - done), 0);
        done += got > 0 ? (unsigned long)got : 0;
    }
    if (system_call(SYS_FSTAT, file, (long)&after, 0, 0) != 0 || after.device != before.device ||
        after.inode != before.inode) {
        return BAD_DESCRIPTOR; /* the program has closed it, and may use the number itself */
    }
    (void)system_call(SYS_CLOSE, file, 0, 0, 0);
    return got < 0 ? got : (long)done;
}

static __attribute__((noinline)) void *call(struct python_argument *given, void *arguments) {
    const char *path = 0, *symbol = 0;
    unsigned long address = 0, size = 0, number = 0;
    void *spec = 0, *name = 0, *file = 0, *modules = 0;
    if (!given->parse(arguments, given->format, &path, &symbol, &address, &size, &number, &spec, &name, &file,
                      &modules)) {
        return 0;
    }
    if (*path == 0) {
        if (given->loader_state != 0) {
            *given->loader_state = 0; /* RT_CONSISTENT */
        }
        return given->new_dict();
    }
    void *(*init)(void) = 0;
    void *state = given->turns.release();
    if (symbol == 0) {
        *(long *)address = read_file(path, (char *)address + sizeof(long), size, number);
    } else {
        void *library = given->open(path, OPEN_NOW);
        init = library != 0 ? (void *(*)(void))given->symbol(library, symbol) : 0;
    }
    given->turns.restore(state);
    if (init == 0) {
        return given->new_dict(); /* nothing */
    }
    void *made = init();
    if (made == 0) {
        return 0;
    }
    if (given->definition(made) != 0) { /* a module already */
        return given->keep == 0 || given->keep(made, name, file, modules) >= 0 ? made : 0;
    }
    given->clear();
    void *definition = made;
    made = given->from_definition(definition, spec, API_VERSION);
    return made == 0 || given->execute(made, definition) >= 0 ? made : 0;
}
