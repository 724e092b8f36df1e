/* See node_table.h.
 *
 * Threads: those of the program that capture, one after the other.
 * Blocks: in malloc.
 */
#include "graphs/node_table.h"

#include <stdlib.h>
#include <string.h>

#define NODES_MOST (1u << 17)
#define OPS_MOST (1u << 17)
#define TEXT_BYTES_MOST (8u << 20)
#define FIRST_ROOM 256u
#define FIRST_PLACES 1024u

/* Makes room for `count` elements, doubling the size. False: the table is full. */
static bool reserve(struct node_table *table, void **elements, size_t *room, size_t count, size_t size, size_t most) {
    if (count <= *room) {
        return true;
    }
    size_t wanted = *room == 0 ? FIRST_ROOM : *room;
    while (wanted < count) {
        wanted *= 2;
    }
    void *grown = count > most ? NULL : realloc(*elements, wanted * size);
    if (grown == NULL) {
        table->full = true;
        return false;
    }
    *elements = grown;
    *room = wanted;
    return true;
}

static uint64_t hash(const uint8_t *data, size_t bytes) {
    uint64_t value = 0xCBF29CE484222325u; /* FNV-1a */
    for (size_t i = 0; i < bytes; i++) {
        value = (value ^ data[i]) * 0x100000001B3u;
    }
    return value ^ value >> 32;
}

static uint32_t length_at(const struct node_table *table, uint32_t place) {
    uint32_t length;
    memcpy(&length, table->texts + place, sizeof length);
    return length;
}

/* The slot that has this text, or the free one where it belongs. */
static uint32_t *slot_of(const struct node_table *table, const void *data, size_t bytes) {
    for (size_t i = hash(data, bytes) & (table->place_count - 1);; i = (i + 1) & (table->place_count - 1)) {
        const uint32_t place = table->places[i];
        if (place == NODE_TABLE_NONE ||
            (length_at(table, place) == bytes && memcmp(table->texts + place + sizeof(uint32_t), data, bytes) == 0)) {
            return &table->places[i];
        }
    }
}

/* Keeps at most half of the slots in use. */
static bool reserve_places(struct node_table *table) {
    if (table->place_count > 2 * table->text_count) {
        return true;
    }
    const size_t wanted = table->place_count == 0 ? FIRST_PLACES : table->place_count * 2;
    uint32_t *before = table->places;
    uint32_t *places = malloc(wanted * sizeof *places);
    if (places == NULL) {
        table->full = true;
        return false;
    }
    memset(places, 0xFF, wanted * sizeof *places);
    const size_t count = table->place_count;
    table->places = places;
    table->place_count = wanted;
    for (size_t i = 0; i < count; i++) {
        if (before[i] != NODE_TABLE_NONE) {
            *slot_of(table, table->texts + before[i] + sizeof(uint32_t), length_at(table, before[i])) = before[i];
        }
    }
    free(before);
    return true;
}

uint32_t node_table_text(struct node_table *table, const void *data, size_t bytes) {
    const uint32_t length = (uint32_t)bytes;
    if (table->full || !reserve_places(table)) {
        return NODE_TABLE_NONE;
    }
    uint32_t *slot = slot_of(table, data, bytes);
    if (*slot != NODE_TABLE_NONE) {
        return *slot;
    }
    const size_t end = table->text_bytes + sizeof length + bytes;
    void *texts = table->texts;
    if (!reserve(table, &texts, &table->texts_room, end, 1, TEXT_BYTES_MOST)) {
        return NODE_TABLE_NONE;
    }
    table->texts = texts;
    const uint32_t place = (uint32_t)table->text_bytes;
    memcpy(table->texts + place, &length, sizeof length);
    memcpy(table->texts + place + sizeof length, data, bytes);
    table->text_bytes = end;
    table->text_count++;
    *slot = place;
    return place;
}

uint32_t node_table_op(struct node_table *table, const struct op_record *op) {
    void *ops = table->ops;
    if (table->full || !reserve(table, &ops, &table->ops_room, table->op_count + 1, sizeof *op, OPS_MOST)) {
        return NODE_TABLE_NONE;
    }
    table->ops = ops;
    table->ops[table->op_count] = *op;
    return (uint32_t)table->op_count++;
}

void node_table_add(struct node_table *table, size_t count, uint32_t op) {
    void *owners = table->owners;
    if (table->full || !reserve(table, &owners, &table->nodes_room, count, sizeof *table->owners, NODES_MOST)) {
        return;
    }
    table->owners = owners;
    while (table->nodes < count) {
        table->owners[table->nodes++] = op;
    }
}

void node_table_claim(struct node_table *table, const void *node, uint32_t op) {
    void *claims = table->claims;
    const size_t count = table->claim_count + 1;
    if (!table->full && reserve(table, &claims, &table->claims_room, count, sizeof *table->claims, NODES_MOST)) {
        table->claims = claims;
        table->claims[table->claim_count++] = (struct node_claim){node, op};
    }
}

static int by_node(const void *left, const void *right) {
    const uintptr_t a = (uintptr_t)((const struct node_claim *)left)->node;
    const uintptr_t b = (uintptr_t)((const struct node_claim *)right)->node;
    return (a > b) - (a < b);
}

void node_table_settle(struct node_table *table, void *const *nodes) {
    if (table->claim_count == 0) {
        return;
    }
    qsort(table->claims, table->claim_count, sizeof *table->claims, by_node);
    for (size_t i = 0; i < table->nodes; i++) {
        const struct node_claim wanted = {.node = nodes[i]};
        const struct node_claim *found = bsearch(&wanted, table->claims, table->claim_count, sizeof wanted, by_node);
        if (found != NULL) {
            table->owners[i] = found->op;
        }
    }
}

void node_table_forget(struct node_table *table) { memset(table, 0, sizeof *table); }

void node_table_clear(struct node_table *table) {
    free(table->owners);
    free(table->ops);
    free(table->claims);
    free(table->texts);
    free(table->places);
    node_table_forget(table);
}

uint8_t *node_table_packed(const struct node_table *table, const struct node_record *nodes, size_t *bytes) {
    const size_t node_bytes = table->nodes * sizeof *nodes;
    const size_t op_bytes = table->op_count * sizeof *table->ops;
    struct node_table_head head = {.magic = "KGRAPH01",
                                   .bytes = sizeof head + node_bytes + op_bytes + table->text_bytes,
                                   .nodes = (uint32_t)table->nodes,
                                   .ops = (uint32_t)table->op_count,
                                   .text_bytes = (uint32_t)table->text_bytes};
    uint8_t *packed = table->full ? NULL : malloc(head.bytes);
    if (packed == NULL) {
        return NULL;
    }
    *bytes = head.bytes;
    memcpy(packed, &head, sizeof head);
    memcpy(packed + sizeof head, nodes, node_bytes);
    if (op_bytes > 0) {
        memcpy(packed + sizeof head + node_bytes, table->ops, op_bytes);
    }
    if (table->text_bytes > 0) {
        memcpy(packed + sizeof head + node_bytes + op_bytes, table->texts, table->text_bytes);
    }
    return packed;
}
