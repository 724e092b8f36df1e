/* The protocol between kc_serve and its client (daemon/kinetod/attach/channel/remote_collector.py).
 *
 * One packet each way on a SOCK_SEQPACKET socket, native byte order: the two are on one machine. A request is a header
 * and the command's argument; its answer has the same command and sequence, then `result_bytes` of the command's
 * result, then `text_bytes` of text (the reason of a failure, no NUL). A descriptor comes with the answer to PREPARE
 * only. The server begins with a greeting: an answer to ABI with sequence 0.
 *
 *   command       argument                     result
 *   ABI           -                            u32 KC_ABI
 *   OPEN          path, no NUL                 u32 version of CUPTI
 *   PREPARE       kc_config                    -, with the arena's descriptor
 *   KEEP_CALLS    u32 domain, patterns         -
 *   SUBSCRIBE     -                            i32 CUPTI's result
 *   RECORD_CALLS  -                            -
 *   YIELD         -                            -
 *   START         u32 kinds[]                  i32 results[]
 *   COUNTS        -                            kc_counts
 *   STOP          u32 limit, ms                kc_stop_result
 *   DETACH        u32 limit, ms                kc_detach_result
 *   CLOSE         -                            -
 *   RESULT_TEXT   i32 CUPTI's result           -, the text is the result
 *   DEVICE        u32 index, i32 attributes[]  device_facts
 *   LEAVE         -                            -; the server has ended everything and goes
 *   OTHERS        -                            kc_others
 *   DRAIN         kc_drain_wish, no streams    kc_drain_result
 */
#ifndef KINETO_SERVE_H
#define KINETO_SERVE_H

#include <stdint.h>

#define SERVE_REQUEST_MAGIC 0x5152534bu /* "KSRQ" */
#define SERVE_ANSWER_MAGIC 0x4e41534bu  /* "KSAN" */
#define SERVE_PACKET_BYTES 8192u
#define SERVE_TEXT_BYTES 1024u

enum serve_command {
    SERVE_ABI = 1,
    SERVE_OPEN,
    SERVE_PREPARE,
    SERVE_KEEP_CALLS,
    SERVE_SUBSCRIBE,
    SERVE_RECORD_CALLS,
    SERVE_YIELD,
    SERVE_START,
    SERVE_COUNTS,
    SERVE_STOP,
    SERVE_DETACH,
    SERVE_CLOSE,
    SERVE_RESULT_TEXT,
    SERVE_DEVICE,
    SERVE_LEAVE,
    SERVE_OTHERS,
    SERVE_DRAIN,
};

struct serve_request {
    uint32_t magic;
    uint32_t command;
    uint32_t sequence;
};

struct serve_answer {
    uint32_t magic;
    uint32_t command;
    uint32_t sequence;
    int32_t code; /* 0 or a kc_error */
    uint32_t result_bytes;
    uint32_t text_bytes;
};

#endif
