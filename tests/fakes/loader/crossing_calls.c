/* Functions by CUPTI's names whose calls cross a block of 16 bytes, each after 1, 2 or 3 bytes of the displacement.
 * NO_SPARE: no room between them, and none after 3 bytes, which only room before the callee would do for.
 */

#define FUNCTION(name, nops)                                                                                         \
    ".p2align 4\n.globl " name "\n.type " name ", @function\n" name ":\n.fill " nops ", 1, 0x90\ncall callee\nret\n" \
    ".size " name ", .-" name "\n"
/* One after which there is room for a jump. */
#define SPARE(name) \
    ".p2align 4\n.globl " name "\n.type " name ", @function\n" name ":\nret\n.size " name ", .-" name "\n"

#ifdef NO_SPARE
#define SPARES
#define AFTER_3(name) FUNCTION(name, "2")
#else
#define SPARES SPARE("spare_1") SPARE("spare_2") SPARE("spare_3") SPARE("spare_4")
#define AFTER_3(name) FUNCTION(name, "12")
#endif

__asm__(".text\n.p2align 12\n.fill 512, 1, 0xcc\ncallee:\nxor %eax, %eax\nret\n" SPARES FUNCTION(
    "cuptiActivityRegisterCallbacks", "14") FUNCTION("cuptiSubscribe", "13") AFTER_3("cuptiActivityEnable")
            FUNCTION("cuptiSubscribe_v2", "14") FUNCTION("cuptiActivityEnableContext", "13")
                AFTER_3("cuptiActivityEnableAndDump") FUNCTION("cuptiActivityDisable", "14")
                    FUNCTION("cuptiActivityDisableContext", "13") FUNCTION("cuptiFinalize", "2")
        /* The rest of the last page is then too far away for those that keep 2 bytes. */
        ".p2align 4\n.fill 0x11000, 1, 0xcc\n");
