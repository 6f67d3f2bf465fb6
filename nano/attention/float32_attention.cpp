// nano::paged_attention_float32: over a cache of float32. A file for each type: a model needs one, and what is
// not compiled is not waited for.
#include "paged_attention.h"

NANO_PAGED_ATTENTION("paged_attention_float32", float)
