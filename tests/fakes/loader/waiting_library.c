/* A library whose constructor tells that it runs, waits, and takes the GIL: descriptors in KINETO_CONSTRUCTOR. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);

__attribute__((constructor)) static void begin(void) {
    int tells = -1, waits = -1;
    char byte = 'x';
    (void)sscanf(getenv("KINETO_CONSTRUCTOR"), "%d %d", &tells, &waits);
    (void)!write(tells, &byte, 1);
    (void)!read(waits, &byte, 1);
    PyGILState_Release(PyGILState_Ensure());
}
