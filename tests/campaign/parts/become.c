/* become UID PROGRAM ARGUMENT...: runs a program as another user, as sudo does. Set-user-id root. */
#define _GNU_SOURCE
#include <grp.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 3) {
        return 2;
    }
    uid_t uid = (uid_t)strtoul(argv[1], NULL, 10);
    if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)) {
        return 3;
    }
    execv(argv[2], argv + 2);
    return 4;
}
