/* The vendors that the kit knows: those in this library, and plug-ins. */
#ifndef KINETO_KIT_VENDORS_H
#define KINETO_KIT_VENDORS_H

#include <stddef.h>

#include "kit/vendor.h"

/* By the name of one in this library, or by the path, which has a slash, of a plug-in's shared library, which stays
 * loaded. NULL with a text if there is none that fits. */
const struct kit_vendor *vendors_find(const char *name, char *error, size_t error_bytes);

#endif
