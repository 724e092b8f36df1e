/* Whose buffer callbacks CUPTI has. */
#ifndef KINETO_LISTENER_H
#define KINETO_LISTENER_H

#include "cupti/cupti_api.h"

/* The address of the callback for requested buffers; 0: none, ours, or it cannot be told. Whoever was registered before
 * is registered afterwards. Between recordings of ours. */
uint64_t listener_registered(const struct cupti_api *api);
/* Registers again who was found by the last listener_registered, if it was somebody: he may have done so once, for all
 * that he will ever record. When CUPTI has none of our buffers. */
void listener_restore(const struct cupti_api *api);

#endif
