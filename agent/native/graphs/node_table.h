/* The data of one graph under capture: operators, the operator of each node, texts. Bounded; one user at a time.
 *
 * kineto_agent/protocol/records.py describes its serialised form ("graph_nodes/1").
 */
#ifndef KINETO_NODE_TABLE_H
#define KINETO_NODE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NODE_TABLE_NONE UINT32_MAX

struct node_table_head {
    char magic[8];
    uint64_t bytes; /* of all: head, nodes, operators, texts */
    uint32_t nodes;
    uint32_t ops;
    uint32_t text_bytes;
    uint32_t flags;
};

struct node_record {
    uint32_t type; /* CUgraphNodeType */
    uint32_t op;   /* number of the operator; NODE_TABLE_NONE */
    uint32_t name; /* of the kernel: where its text begins; NODE_TABLE_NONE */
    uint32_t grid[3];
    uint32_t block[3];
};

struct op_record {
    uint32_t parent; /* number of the enclosing operator, which is smaller; NODE_TABLE_NONE */
    uint32_t name;
    uint32_t inputs; /* NODE_TABLE_NONE: not recorded */
    uint32_t scope;
};

/* A node of which only the driver's handle is known. */
struct node_claim {
    const void *node;
    uint32_t op;
};

struct node_table {
    uint32_t *owners; /* operator of each node */
    size_t nodes, nodes_room;
    struct op_record *ops;
    size_t op_count, ops_room;
    struct node_claim *claims;
    size_t claim_count, claims_room;
    uint8_t *texts; /* u32 length, bytes; each text once */
    size_t text_bytes, texts_room;
    uint32_t *places; /* of texts by hash, NODE_TABLE_NONE: free */
    size_t place_count, text_count;
    bool full; /* a limit was reached or memory refused: the table is useless */
};

/* Returns where the text begins; it is added if it is new. NODE_TABLE_NONE if there is no room. */
uint32_t node_table_text(struct node_table *table, const void *data, size_t bytes);
uint32_t node_table_op(struct node_table *table, const struct op_record *op);
/* Assigns the nodes from the last known one up to `count` to this operator. */
void node_table_add(struct node_table *table, size_t count, uint32_t op);
/* Assigns the node with this handle to this operator. */
void node_table_claim(struct node_table *table, const void *node, uint32_t op);
/* Resolves the nodes assigned by handle. nodes: the handles of all nodes, in their order. */
void node_table_settle(struct node_table *table, void *const *nodes);
/* Frees its memory. */
void node_table_clear(struct node_table *table);
/* Forgets its memory, for a child after a fork in the middle of a change. */
void node_table_forget(struct node_table *table);
/* Returns the serialised form, malloc'ed, with room for the nodes; NULL: no memory, or the table is full. */
uint8_t *node_table_packed(const struct node_table *table, const struct node_record *nodes, size_t *bytes);

#endif
