// nano::paged_attention_bfloat16: over a cache of bfloat16. A file for each type: a model needs one, and what is
// not compiled is not waited for.
#include "paged_attention.h"

NANO_PAGED_ATTENTION("paged_attention_bfloat16", BFloat16)
