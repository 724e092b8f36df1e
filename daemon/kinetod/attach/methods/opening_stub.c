/* Opens an extension module of the standard library, or a file, without the GIL, for the agent's thread.
 *
 *     python daemon/native/generate_stub_code.py
 *
 * compiles it into the bytes of opening_code.py, which are copied into the target beside python_stub.c. It is a Python
 * function: native(path, symbol, address, bytes, number[, spec, name, file, modules]). Its `self` is a bytes object
 * that holds two marks and then the address of python_stub.c's argument, since the layout of objects differs.
 *
 * Python's own imports call dlopen while holding the GIL. dlopen waits for the loader's lock, which another thread may
 * hold for seconds while it runs the constructors of a library; if one of these takes the GIL, both deadlock. Here the
 * library is opened without the GIL, and the module is then created as Python would: by its init function. Where Python
 * keeps modules for a later import (those that cannot be created twice, up to 3.12), it gets this one.
 *
 * In a child that was forked while a library was being opened, the loader believes that it is still opening one, and
 * aborts the process at its next check. A call with an empty path repairs that, and adds the warning filters (hush) if
 * the number is not 0, or removes them. The fork hook of the bootstrap makes this call, and the loader once the agent
 * has filters.
 *
 * A file is read completely, in one call: its descriptor is moved to the high end at once and compared before it is
 * closed.
 */
#include "python_stub.h"
#include "common/system_call.h"

static void *call(struct python_argument *given, void *arguments);
static void *hush(struct python_argument *given);

/* First in the file: the bytes begin here. */
void *opening(const unsigned long *self, void *arguments) {
    while (self[0] != OPENING_MARK || self[1] != OPENING_MARK_2) {
        self++;
    }
    struct python_argument *given = (struct python_argument *)self[2];
    return arguments != 0 ? call(given, arguments) : hush(given);
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
        return BAD_DESCRIPTOR; /* the program has closed it, and may have reused the number */
    }
    (void)system_call(SYS_CLOSE, file, 0, 0, 0);
    return got < 0 ? got : (long)done;
}

/* Adds the filters for the fork warning to the interpreter's list, or removes them. They consist of strings alone, so
 * that no Python code runs here or when the interpreter reads them. If the module or the list has an unusual type, it
 * does nothing. */
static __attribute__((noinline)) void *hush(struct python_argument *given) {
    void *hushed = given->hushed, *filters = 0;
    const int puts = hushed == 0;
    int failed = 0;
    if (!puts) {
        filters = given->item(hushed, 0);
    } else if (given->category != 0) {
        void *modules = given->system(given->modules_name);
        void *module = modules != 0 ? given->value(modules, given->warnings_name + 1) : 0; /* "warnings" */
        module = module != 0 || modules == 0 ? module : given->value(modules, given->warnings_name);
        void *contents = module != 0 ? given->contents(module) : 0;
        filters = contents != 0 ? given->value(contents, given->filters_name) : 0;
        hushed = filters == 0 ? 0
                              : given->build(given->hushed_format, filters, given->ignore, given->fork_warnings[0],
                                             *given->category, given->none, 0, given->ignore, given->fork_warnings[1],
                                             *given->category, given->none, 0);
        failed = hushed == 0;
    }
    for (long i = 1; hushed != 0 && i <= FORK_CALLS; i++) {
        void *filter = given->item(hushed, i);
        const long at = puts ? 0 : given->index(filters, filter);
        failed |= at < 0 || (puts ? given->insert(filters, at, filter) : given->remove(filters, at)) != 0;
    }
    if (failed) {
        given->clear();
    }
    if (!puts) {
        given->decref(hushed);
        hushed = 0;
    }
    given->hushed = hushed;
    return 0;
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
        if ((given->hushed != 0) != (number != 0)) {
            hush(given);
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
        return given->new_dict(); /* nothing to return */
    }
    void *made = init();
    if (made == 0) {
        return 0;
    }
    if (given->definition(made) != 0) { /* already a module */
        return given->keep == 0 || given->keep(made, name, file, modules) >= 0 ? made : 0;
    }
    given->clear();
    void *definition = made;
    made = given->from_definition(definition, spec, API_VERSION);
    return made == 0 || given->execute(made, definition) >= 0 ? made : 0;
}
