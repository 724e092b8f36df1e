/* The vendors that the kit knows: those in this library, and plug-ins. */
#ifndef KINETO_KIT_VENDORS_H
#define KINETO_KIT_VENDORS_H

#include <stddef.h>

#include "kit/vendor.h"

/* Finds a vendor of this library by name, or a plug-in by the path (with a slash) of its shared library, which stays
 * loaded. NULL with a text if there is none. */
const struct kit_vendor *vendors_find(const char *name, char *error, size_t error_bytes);

#endif
