"""A custom logits processor for servers in tests."""

import torch

from nano import LogitsProcessor


class Always(LogitsProcessor):
    """`always=token`: nothing else is sampled."""

    def new_req_logits_processor(self, params):
        token_id = (params.extra_args or {}).get("always")
        if token_id is None:
            return None

        def process(prompt_ids, output_ids, logits):
            return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([token_id]), 0.0)

        return process
