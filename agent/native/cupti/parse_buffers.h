/* Reading returned buffers just far enough to publish them: record sizes, counts and kernel names. */
#ifndef KINETO_WALK_H
#define KINETO_WALK_H

#include "common/arena.h"
#include "cupti/cupti_api.h"
#include "cupti/kernel_names.h"

struct walker {
    const struct cupti_api *api;
    struct arena *arena;
    uint32_t kernel_name_offset;
    uint32_t sizes[ARENA_RECORD_KINDS]; /* bytes of one record by kind, 0: none seen */
    struct names names;
    uint64_t names_lost;        /* kernel names that did not fit the string table or could not be read */
    uint64_t irregular_records; /* in buffers whose records do not keep to one size per kind: dropped */
};

bool walker_init(struct walker *walker, const struct cupti_api *api, struct arena *arena, uint32_t kernel_name_offset);
void walker_free(struct walker *walker);
/* Takes one COMPLETED buffer: READY if it has records, else FREE. */
void walker_publish(struct walker *walker, uint32_t index);
/* Counts a spill buffer's records as dropped. */
void walker_drop(struct walker *walker, uint8_t *buffer, size_t valid);

#endif
