"""nano through `LLM.generate`. Its prefix cache is off, like everybody's here."""

from job import Job, measure

from nano import LLM, SamplingParams


def main() -> None:
    job = Job.read()
    settings = {"enable_prefix_caching": False, "max_model_len": 4608, "threads": job.threads}
    with LLM(job.model, **(settings | {"startup": "compiled-first"} | job.options)) as llm:

        def generate(prompts: list[list[int]], new_tokens: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
            for output in llm.generate(prompts, params, use_tqdm=False):
                assert len(output.outputs[0].token_ids) == new_tokens, output

        measure(job, generate)


if __name__ == "__main__":
    main()
