// A libpti_view of a version that nobody knows. Whatever else of it is called ends the program.
#include <stdint.h>
#include <stdlib.h>

const char *ptiVersionString(void) { return "9.0.0"; }

#define ENDS(name) \
    int32_t name(void) { abort(); }

ENDS(ptiViewMemoryTypeToString)
ENDS(ptiViewGPULocalAvailable)
ENDS(ptiViewSetCallbacks)
ENDS(ptiViewEnable)
ENDS(ptiViewDisable)
ENDS(ptiFlushAllViews)
ENDS(ptiViewGetNextRecord)
ENDS(ptiViewGetApiIdName)
ENDS(ptiViewEnableDriverApi)
ENDS(ptiViewEnableDriverApiClass)
ENDS(ptiViewEnableRuntimeApiClass)
