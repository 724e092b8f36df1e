/* Intel's PTI as a vendor of the kit. */
#ifndef KINETO_PTI_VENDOR_H
#define KINETO_PTI_VENDOR_H

#include "kit/vendor.h"

extern const struct kit_vendor PTI_VENDOR;

#endif
