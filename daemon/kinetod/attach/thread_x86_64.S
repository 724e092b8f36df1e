/* The start routine of a native thread that runs Python source, x86-64.
   rdi: a table of pthread_self, pthread_detach, PyGILState_Ensure, PyRun_SimpleString, PyGILState_Release, source */

        .set SELF, 0
        .set DETACH, 8
        .set ENSURE, 16
        .set RUN, 24
        .set RELEASE, 32
        .set SOURCE, 40

        .text
        pushq   %rbx
        subq    $16, %rsp
        movq    %rdi, %rbx
        call    *SELF(%rbx)
        movq    %rax, %rdi
        call    *DETACH(%rbx)
        call    *ENSURE(%rbx)
        movl    %eax, 8(%rsp)
        movq    SOURCE(%rbx), %rdi
        call    *RUN(%rbx)
        movl    8(%rsp), %edi
        call    *RELEASE(%rbx)
        xorl    %eax, %eax
        addq    $16, %rsp
        popq    %rbx
        ret
        int3
        .section .note.GNU-stack,"",@progbits
