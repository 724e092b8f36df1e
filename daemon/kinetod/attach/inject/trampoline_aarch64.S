/* What a redirected thread runs, aarch64; trampoline.py has the assembled bytes and the theory of operation.

   Constant code: nothing in it depends on the process or the attach. At entry:
     x19 = sp    parameters, 16-byte aligned (offsets below); everything under them is free stack
     x20         a signal frame from which rt_sigreturn restores everything at once: general and vector registers,
                 flags, sp, pc and the signal mask */

        .set REGION, 0
        .set REGION_SIZE, 8
        .set PAYLOAD_SIZE, 16
        .set CHECK, 24
        .set FUNCTION, 32
        .set ARGUMENTS, 40
        .set OLD_MASK, 72
        .set FULL_MASK, 80
        .set ERROR, 88
        .set SEE_SIGNALS, 96
        .set PENDING, 104
        .set PC_INTERRUPTED, 112
        .set NONCE, 120
        .set NONCE_ECHO, 136
        .set PAYLOAD, 144

        .set MAILBOX_NONCE, 0
        .set MAILBOX_STATUS, 8
        .set MAILBOX_RESULT, 16
        .set MAILBOX_PAYLOAD, 64
        .set DONE, 1
        .set UNINITIALISED, 2

        .set FRAME_X0, 312
        .set FRAME_PC, 568
        .set PAGE, 4096

        .set SYS_rt_sigprocmask, 135
        .set SYS_rt_sigpending, 136
        .set SYS_rt_sigreturn, 139
        .set SYS_munmap, 215
        .set SYS_mmap, 222
        .set SIG_SETMASK, 2
        .set EINTR, 4
        .set READ_WRITE, 3

        .text
        mov     x8, #SYS_rt_sigprocmask
        mov     x0, #SIG_SETMASK
        add     x1, x19, #FULL_MASK
        mov     x2, #0
        mov     x3, #8
        svc     #0

        mov     x8, #SYS_mmap
        ldp     x0, x1, [x19, #REGION]
        mov     x2, #READ_WRITE
        mov     x3, #0x22                       // MAP_PRIVATE | MAP_ANONYMOUS
        movk    x3, #0x10, lsl #16              // MAP_FIXED_NOREPLACE
        mov     x4, #-1
        mov     x5, #0
        svc     #0
        ldr     x1, [x19, #REGION]
        cmp     x0, x1
        b.ne    unmapped
        mov     x21, x0

        ldr     x2, [x19, #PAYLOAD_SIZE]
        add     x0, x19, #PAYLOAD
        add     x1, x21, #MAILBOX_PAYLOAD
copy:   cbz     x2, copied
        ldrb    w3, [x0], #1
        strb    w3, [x1], #1
        sub     x2, x2, #1
        b       copy
copied:
        mov     x22, #UNINITIALISED
        ldr     x9, [x19, #CHECK]
        cbz     x9, checked
        blr     x9
        cbz     w0, called
checked:
        ldp     x0, x1, [x19, #ARGUMENTS]
        ldp     x2, x3, [x19, #ARGUMENTS+16]
        ldr     x9, [x19, #FUNCTION]
        blr     x9
        str     x0, [x21, #MAILBOX_RESULT]
        mov     x22, #DONE
called: str     x22, [x21, #MAILBOX_STATUS]

        mov     x8, #SYS_munmap
        add     x0, x21, #PAGE
        ldr     x1, [x19, #REGION_SIZE]
        sub     x1, x1, #PAGE
        svc     #0
        ldr     x0, [x19, #NONCE]
        stlr    x0, [x21]                       // last: the mailbox is complete
        b       leave

unmapped:                                       // the answer can only lie here on the stack
        str     x0, [x19, #ERROR]
        ldr     x0, [x19, #NONCE]
        str     x0, [x19, #NONCE_ECHO]

leave:  ldr     x0, [x19, #SEE_SIGNALS]
        cbz     x0, restore
        mov     x8, #SYS_rt_sigpending
        add     x0, x19, #PENDING
        mov     x1, #8
        svc     #0
        ldr     x0, [x19, #OLD_MASK]
        ldr     x1, [x19, #PENDING]
        bics    x0, x1, x0
        b.eq    restore
        mov     x0, #-EINTR                     // a signal came during the wait: it interrupts the call, as it would have
        str     x0, [x20, #FRAME_X0]
        ldr     x0, [x19, #PC_INTERRUPTED]
        str     x0, [x20, #FRAME_PC]

restore:
        mov     sp, x20
        mov     x8, #SYS_rt_sigreturn
        svc     #0
        brk     #1
        .section .note.GNU-stack,"",%progbits
