// nano::paged_attention_paired: over a cache of bfloat16, multiplying in bfloat16.
#include "attention_pairs.h"
#include "paged_attention.h"

NANO_PAGED_ATTENTION("paged_attention_paired", Paired)
