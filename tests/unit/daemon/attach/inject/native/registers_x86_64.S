/* Fills every register, the flags, the red zone and the vector registers, spins (or, with an argument, waits in
   poll), and ends with status 3 when any of it is not as it was. Else it runs until it is killed. */

        .set SYS_poll, 7
        .set NAP_MS, 20
        .set SPINS, 3000000

        .macro  fill
        movq    %rsp, %rax
        .set    word, 0
        .rept   16                              /* the red zone, from its lowest word */
        movq    $0x5a5a0000 + word, word*8-128(%rax)
        .set    word, word+1
        .endr
        vmovdqu pattern(%rip), %ymm0
        .irp    n, 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15
        vpaddq  ones(%rip), %ymm0, %ymm\n
        .endr
        ldmxcsr odd_mxcsr(%rip)
        fninit
        fldcw   odd_fpucw(%rip)
        fldpi
        movq    $0x1111111111111111, %rbx
        movq    $0x2222222222222222, %rbp
        movq    $0x8888888888888888, %r8
        movq    $0x9999999999999999, %r9
        movq    $0xaaaaaaaaaaaaaaaa, %r10
        movq    $0xcccccccccccccccc, %r12
        movq    $0xdddddddddddddddd, %r13
        movq    $0xeeeeeeeeeeeeeeee, %r14
        movq    %rsp, %r15
        .endm

        .macro  same register, value
        movabsq $\value, %rax
        cmpq    %rax, \register
        jne     changed
        .endm

        .macro  check
        cmpq    %rsp, %r15
        jne     changed
        same    %rbx, 0x1111111111111111
        same    %rbp, 0x2222222222222222
        same    %r8, 0x8888888888888888
        same    %r9, 0x9999999999999999
        same    %r10, 0xaaaaaaaaaaaaaaaa
        same    %r12, 0xcccccccccccccccc
        same    %r13, 0xdddddddddddddddd
        same    %r14, 0xeeeeeeeeeeeeeeee
        .set    word, 0
        .rept   16
        cmpq    $0x5a5a0000 + word, word*8-128(%rsp)
        jne     changed
        .set    word, word+1
        .endr
        vmovdqu %ymm0, found(%rip)
        .irp    n, 0,8,16,24
        movq    pattern+\n(%rip), %rax
        cmpq    found+\n(%rip), %rax
        jne     changed
        .endr
        vpaddq  ones(%rip), %ymm0, %ymm0
        .irp    n, 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15
        vpcmpeqb %ymm0, %ymm\n, %ymm\n
        vpmovmskb %ymm\n, %eax
        cmpl    $-1, %eax
        jne     changed
        .endr
        stmxcsr found(%rip)
        movl    odd_mxcsr(%rip), %eax
        cmpl    found(%rip), %eax
        jne     changed
        fnstcw  found(%rip)
        movw    odd_fpucw(%rip), %ax
        cmpw    found(%rip), %ax
        jne     changed
        fldpi
        fcompp
        fnstsw  %ax
        testw   $0x4000, %ax                    /* C3: the two were equal */
        jz      changed
        .endm

        .text
        .globl  main
main:
        pushq   %rbx                            /* aligns the stack */
        cmpl    $1, %edi
        jg      nap
spin:
        fill
        movq    $0x3333333333333333, %rdx
        movq    $0x4444444444444444, %rsi
        movq    $0x6666666666666666, %rdi
        movq    $0xbbbbbbbbbbbbbbbb, %r11
        movl    $SPINS, %ecx
        std                                     /* flags that nobody else would set */
        stc
1:      decl    %ecx                            /* leaves CF alone */
        jnz     1b
        jnc     changed
        pushfq
        popq    %rax
        cld
        movq    $0x5a5a000f, -8(%rsp)           /* was overwritten by pushfq */
        testl   $0x400, %eax
        jz      changed
        same    %rdx, 0x3333333333333333
        same    %rsi, 0x4444444444444444
        same    %rdi, 0x6666666666666666
        same    %r11, 0xbbbbbbbbbbbbbbbb
        check
        jmp     spin
nap:
        fill
        movl    $SYS_poll, %eax
        xorl    %edi, %edi
        xorl    %esi, %esi
        movl    $NAP_MS, %edx
        syscall
        testq   %rax, %rax                      /* neither -EINTR nor anything else */
        jnz     changed
        cmpq    $NAP_MS, %rdx
        jne     changed
        check
        jmp     nap
changed:
        cld
        movl    $3, %edi
        call    exit@PLT

        .data
        .balign 32
pattern: .quad  0x0123456789abcdef, 0xfedcba9876543210, 0x0f1e2d3c4b5a6978, 0x1122334455667788
ones:   .quad   1, 1, 1, 1
found:  .quad   0, 0, 0, 0
odd_mxcsr: .long 0x7f80                         /* rounds towards zero */
odd_fpucw: .word 0x0f7f
        .section .note.GNU-stack,"",@progbits
