/* Whose buffer callbacks CUPTI has. */
#ifndef KINETO_LISTENER_H
#define KINETO_LISTENER_H

#include "cupti_api.h"

/* The address of the callback for requested buffers; 0: none, ours, or it cannot be told. Whoever was registered before
 * is registered afterwards. Between recordings of ours. */
uint64_t listener_registered(const struct cupti_api *api);

#endif
