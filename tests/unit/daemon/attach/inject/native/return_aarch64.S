/* Runs the aarch64 trampoline on a frame that the test has built, and ends with status 0 when it came back with all
   registers as the frame says, having called `callee` once. No C library: the test knows the addresses.

   text + 0x000 _start   + 0x200 callee   + 0x400 resumed   + 0x1000 the trampoline   + 0x2000 the frame */

        .set SYS_exit, 93
        .set SYS_mmap, 222
        .set STACK, 0x20000000
        .set STACK_SIZE, 0x10000
        .set FAILED, 3

        .text
        .globl  _start
_start: mov     x8, #SYS_mmap
        mov     x0, #STACK
        mov     x1, #STACK_SIZE
        mov     x2, #3
        mov     x3, #0x32                       // MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED
        mov     x4, #-1
        mov     x5, #0
        svc     #0
        ldr     x0, =frame
        ldr     x1, =FRAME_ADDRESS
        mov     x3, x1
        ldr     x2, =frame_end
1:      ldr     x4, [x0], #8
        str     x4, [x1], #8
        cmp     x0, x2
        b.lo    1b
        mov     x19, x3
        ldr     x20, =SAVED_ADDRESS
        mov     sp, x3
        ldr     x9, =trampoline
        br      x9
        .ltorg

        .org    0x200
callee: cmp     x0, #11                         // its arguments
        b.ne    changed
        cmp     x3, #14
        b.ne    changed
        .irp    n, 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18
        mov     x\n, #0
        .endr
        .irp    n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
        movi    v\n\().2d, #0
        .endr
        msr     fpcr, xzr
        mov     x0, #7
        ret

        .org    0x400
resumed:
        b.ne    changed                         // the frame sets Z
        .irp    n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30
        cmp     x\n, #(\n + 100)
        b.ne    changed
        .endr
        mov     x0, sp
        ldr     x1, =STACK_POINTER
        cmp     x0, x1
        b.ne    changed
        .irp    n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
        umov    x1, v\n\().d[0]
        cmp     x1, #(\n + 200)
        b.ne    changed
        umov    x1, v\n\().d[1]
        cmp     x1, #(\n + 300)
        b.ne    changed
        .endr
        mrs     x1, fpcr
        cmp     x1, #(3 << 22)                  // rounds towards zero
        b.ne    changed
        ldr     x0, =REGION
        ldr     x1, [x0]
        ldr     x2, =NONCE
        cmp     x1, x2
        b.ne    changed
        ldr     x1, [x0, #8]                    // done
        cmp     x1, #1
        b.ne    changed
        ldr     x1, [x0, #16]                   // the callee's result
        cmp     x1, #7
        b.ne    changed
        ldrb    w1, [x0, #64]                   // the payload
        cmp     w1, #'p'
        b.ne    changed
        mov     x0, #0
        b       leave
changed:
        mov     x0, #FAILED
leave:  mov     x8, #SYS_exit
        svc     #0
        .ltorg

        .org    0x1000
trampoline:
        .incbin "trampoline.bin"
        .org    0x2000
frame:  .incbin "frame.bin"
        .balign 8
frame_end:
        .section .note.GNU-stack,"",%progbits
