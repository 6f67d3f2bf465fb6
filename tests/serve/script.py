"""A custom logits processor for servers in tests: an answer that the test has written."""

import torch

from nano import LogitsProcessor


class Script(LogitsProcessor):
    """`script=[token, ...]`: these in turn, and nothing else; then what the model says."""

    def new_req_logits_processor(self, params):
        script = (params.extra_args or {}).get("script")
        if script is None:
            return None

        def process(prompt_ids, output_ids, logits):
            if len(output_ids) >= len(script):
                return logits
            token_id = torch.tensor(script[len(output_ids)])
            return torch.full_like(logits, -torch.inf).index_fill(0, token_id, 0.0)

        return process
