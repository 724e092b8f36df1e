/* What a redirected thread runs, x86-64; trampoline.py has the assembled bytes and the theory of operation.

   Constant code: nothing in it depends on the process or the attach. At entry:
     rbx = rsp   parameters, 16-byte aligned (offsets below); everything under them is free stack
     rbp         15 saved registers, flags and rip, ending 128 bytes below the thread's own stack pointer */

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
        .set XSAVE_MASK, 128
        .set NONCE_ECHO, 136
        .set PAYLOAD, 144

        .set MAILBOX_NONCE, 0
        .set MAILBOX_STATUS, 8
        .set MAILBOX_RESULT, 16
        .set MAILBOX_PAYLOAD, 64
        .set DONE, 1
        .set UNINITIALISED, 2

        .set SAVED_RAX, 112
        .set SAVED_RIP, 128
        .set RED_ZONE, 128
        .set PAGE, 4096

        .set SYS_mmap, 9
        .set SYS_munmap, 11
        .set SYS_rt_sigprocmask, 14
        .set SYS_rt_sigpending, 127
        .set SIG_SETMASK, 2
        .set EINTR, 4
        .set READ_WRITE, 3
        .set PRIVATE_ANONYMOUS_NOREPLACE, 0x100022

        .text
trampoline:
        cld
        movl    $SYS_rt_sigprocmask, %eax
        movl    $SIG_SETMASK, %edi
        leaq    FULL_MASK(%rbx), %rsi
        xorl    %edx, %edx
        movl    $8, %r10d
        syscall

        movl    $SYS_mmap, %eax
        movq    REGION(%rbx), %rdi
        movq    REGION_SIZE(%rbx), %rsi
        movl    $READ_WRITE, %edx
        movl    $PRIVATE_ANONYMOUS_NOREPLACE, %r10d
        movq    $-1, %r8
        xorl    %r9d, %r9d
        syscall
        cmpq    REGION(%rbx), %rax
        jne     unmapped
        movq    %rax, %r12

        movl    XSAVE_MASK(%rbx), %eax          /* system calls have not touched the vector registers */
        movl    XSAVE_MASK+4(%rbx), %edx
        xsave64 PAGE(%r12)

        leaq    PAYLOAD(%rbx), %rsi
        leaq    MAILBOX_PAYLOAD(%r12), %rdi
        movq    PAYLOAD_SIZE(%rbx), %rcx
        rep movsb

        movq    CHECK(%rbx), %rax
        testq   %rax, %rax
        jz      checked
        call    *%rax
        movl    $UNINITIALISED, %ecx
        testl   %eax, %eax
        jz      called
checked:
        movq    ARGUMENTS(%rbx), %rdi
        movq    ARGUMENTS+8(%rbx), %rsi
        movq    ARGUMENTS+16(%rbx), %rdx
        movq    ARGUMENTS+24(%rbx), %rcx
        xorl    %eax, %eax
        call    *FUNCTION(%rbx)
        movq    %rax, MAILBOX_RESULT(%r12)
        movl    $DONE, %ecx
called:
        movq    %rcx, MAILBOX_STATUS(%r12)

        movl    XSAVE_MASK(%rbx), %eax
        movl    XSAVE_MASK+4(%rbx), %edx
        xrstor64 PAGE(%r12)

        movl    $SYS_munmap, %eax
        leaq    PAGE(%r12), %rdi
        movq    REGION_SIZE(%rbx), %rsi
        subq    $PAGE, %rsi
        syscall
        movq    NONCE(%rbx), %rax
        movq    %rax, MAILBOX_NONCE(%r12)       /* last: the mailbox is complete */
        jmp     leave

unmapped:                                       /* the answer can only lie here on the stack */
        movq    %rax, ERROR(%rbx)
        movq    NONCE(%rbx), %rax
        movq    %rax, NONCE_ECHO(%rbx)

leave:  cmpq    $0, SEE_SIGNALS(%rbx)
        je      restore
        movl    $SYS_rt_sigpending, %eax
        leaq    PENDING(%rbx), %rdi
        movl    $8, %esi
        syscall
        movq    OLD_MASK(%rbx), %rax
        notq    %rax
        andq    PENDING(%rbx), %rax
        jz      restore
        movq    $-EINTR, SAVED_RAX(%rbp)        /* a signal came during the wait: it interrupts the call, as it would have */
        movq    PC_INTERRUPTED(%rbx), %rax
        movq    %rax, SAVED_RIP(%rbp)

restore:
        movq    %rbp, %rsp                      /* what lies above is safe from signal handlers */
        movl    $SYS_rt_sigprocmask, %eax
        movl    $SIG_SETMASK, %edi
        leaq    OLD_MASK(%rbx), %rsi
        xorl    %edx, %edx
        movl    $8, %r10d
        syscall
        popq    %r15
        popq    %r14
        popq    %r13
        popq    %r12
        popq    %r11
        popq    %r10
        popq    %r9
        popq    %r8
        popq    %rbp
        popq    %rbx
        popq    %rdx
        popq    %rcx
        popq    %rsi
        popq    %rdi
        popq    %rax
        popfq
        ret     $RED_ZONE                       /* rip and rsp at once, without a register or a literal */
        int3
        .section .note.GNU-stack,"",@progbits
