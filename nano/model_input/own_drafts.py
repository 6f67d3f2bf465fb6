"""OwnDrafts: the drafts that a worker made and keeps, for a plan that was made before them."""

import dataclasses

from nano.step import DRAFT_ON_DEVICE, StepPlan


class OwnDrafts:
    """Of the last step, by request. Those of requests that are not in a plan are dropped."""

    def __init__(self) -> None:
        self._token_ids: dict[str, list[int]] = {}

    def keep(self, request_ids: list[str], token_ids: list[list[int]]) -> None:
        """What was proposed after a step: parallel lists."""
        self._token_ids = {r: drafts for r, drafts in zip(request_ids, token_ids) if drafts}

    def fill_in(self, plan: StepPlan) -> tuple[StepPlan, dict[str, list[int]]]:
        """The plan with drafts in place of DRAFT_ON_DEVICE, as many as there are, and these drafts.

        `plan` itself, which its maker may still look at, stays as it is.
        """
        found = {}
        for request_id, drafts in plan.draft_token_ids.items():
            if drafts[0] == DRAFT_ON_DEVICE:
                found[request_id] = self._token_ids.get(request_id, [])[: len(drafts)]
        if not found:
            return plan, found
        num_scheduled, filled = dict(plan.num_scheduled_tokens), dict(plan.draft_token_ids)
        for request_id, drafts in found.items():
            num_scheduled[request_id] -= len(filled.pop(request_id)) - len(drafts)
            if drafts:
                filled[request_id] = drafts
        plan = dataclasses.replace(plan, num_scheduled_tokens=num_scheduled, draft_token_ids=filled)
        return plan, found
