/* The start routine of a native thread that runs Python source, aarch64.
   x0: a table of pthread_self, pthread_detach, PyGILState_Ensure, PyRun_SimpleString, PyGILState_Release, source */

        .set SELF, 0
        .set ENSURE, 16
        .set RELEASE, 32
        .set SOURCE, 40

        .text
        hint    #34                             // bti c: libraries may be protected so, and it lies in one
        stp     x29, x30, [sp, #-32]!
        mov     x29, sp
        stp     x19, x20, [sp, #16]
        mov     x19, x0
        ldp     x9, x20, [x19, #SELF]
        blr     x9
        blr     x20                             // pthread_detach(pthread_self())
        ldp     x9, x20, [x19, #ENSURE]
        blr     x9
        mov     x9, x20
        mov     w20, w0
        ldr     x0, [x19, #SOURCE]
        blr     x9
        ldr     x9, [x19, #RELEASE]
        mov     w0, w20
        blr     x9
        mov     x0, #0
        ldp     x19, x20, [sp, #16]
        ldp     x29, x30, [sp], #32
        ret
        brk     #1
        .section .note.GNU-stack,"",%progbits
