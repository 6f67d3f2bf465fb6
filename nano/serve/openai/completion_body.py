"""CompletionBody: POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nano.errors import InvalidRequest
from nano.serve.openai.body import MAX_CHOICES, GenerationBody, Integers, Strings
from nano.serve.openai.parameters import applied, neutral, refused

Prompts = str | Strings | Integers | Annotated[list[Integers], Field(fail_fast=True)]


class CompletionBody(GenerationBody):
    prompt: Prompts = applied("a text, token ids, or a list of either", ...)
    echo: bool | None = applied("true or false: the text begins with the prompt")
    logprobs: int | None = applied("-1 to the server's max_logprobs")

    best_of: Literal[1] | None = neutral(
        "1, with n = 1", "all n completions are returned, and no more are made"
    )

    suffix: None = refused("the model continues a text, it does not fill in")
    prompt_embeds: None = refused("prompts are texts or token ids")

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is all that is wanted: echo with max_tokens=0."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids. Raises `InvalidRequest` for none or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt must not be empty, got []", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        n = 1 if self.n is None else self.n
        if len(prompt) * n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt times n must be at most {MAX_CHOICES} in one call, got {len(prompt)} "
                f"prompts with n = {n}",
                "prompt",
            )
        return prompt

    def sampling_values(self) -> dict[str, Any]:
        values = super().sampling_values()
        n = 1 if self.n is None else self.n
        if self.best_of is not None and n > self.best_of:
            raise InvalidRequest(f"best_of must be at least n ({n}), got 1", "best_of")
        if self.scores_only:
            values["max_tokens"] = 1  # computed, and left out of the answer
        if self.logprobs is None:
            return values
        values["logprobs"] = self.logprobs
        if self.echo:
            if self.stream and n > 1:
                # The prompt's log probabilities come with the first completion only.
                raise InvalidRequest("echo with logprobs and n > 1 is not streamed", "echo")
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    def spelling(self) -> dict[str, str]:
        names = super().spelling()
        if self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        return names
