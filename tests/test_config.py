"""Three ways to say one thing, all strict: keyword arguments, flags, recipes."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from nano.config import ENGINE_ARGS, EngineConfig, add_engine_arguments, config_from_arguments
from nano.errors import ConfigError
from nano.gpus import Gpu, Gpus
from nano.resolve import resolve
from tests.tiny import make_checkpoint


def parse(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return config_from_arguments(parser.parse_args(flags))


def test_keywords_flags_and_recipes_say_the_same(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\nmax_model_len = 99\n[kv_cache]\nenable_prefix_caching = false\n'
        'block_size = 8\n[scheduler]\ntoken_budget = 64\npolicy = "priority"\n'
    )
    by_keyword = EngineConfig.from_args(
        {
            "model": "m",
            "max_model_len": 99,
            "enable_prefix_caching": False,
            "block_size": 8,
            "max_num_batched_tokens": 64,
            "scheduling_policy": "priority",
        }
    )
    by_flag = parse(
        *("--model m --max-model-len 99 --no-enable-prefix-caching --block-size 8").split(),
        *("--max-num-batched-tokens 64 --scheduling-policy priority").split(),
    )
    assert by_keyword == by_flag == EngineConfig.from_toml(recipe) == parse("--config", str(recipe))


def test_flags_override_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[scheduler]\ntoken_budget = 64\nmax_num_requests = 3\n")
    config = parse("--config", str(recipe), "--max-num-batched-tokens", "32")
    assert config.scheduler.token_budget == 32
    assert config.scheduler.max_num_requests == 3


def test_capture_sizes_are_numbers_however_they_are_said(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[compile]\ncudagraph_capture_sizes = [1, 8]\n")
    by_flag = parse("--cudagraph-capture-sizes", "1", "8")
    assert by_flag.compile.cudagraph_capture_sizes == (1, 8)
    assert by_flag == EngineConfig.from_toml(recipe)
    assert by_flag == EngineConfig.from_args({"cudagraph_capture_sizes": [1, 8]})
    assert EngineConfig.from_sections(json.loads(json.dumps(by_flag.to_sections()))) == by_flag


def test_every_option_has_an_argument():
    options = {
        (section.name, option.name)
        for section in dataclasses.fields(EngineConfig)
        for option in dataclasses.fields(section.default_factory)
        if section.name != "speculative"  # one argument is all of it, and two are shorthands
    }
    arguments = [arg for arg in ENGINE_ARGS.values() if arg.section != "speculative"]
    assert {(arg.section, arg.field) for arg in arguments} == options


def test_speculation_is_configured_alike_by_every_way(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[speculative.proposers]]\nmethod = "ngram"\nnum_speculative_tokens = 3\n')
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    configs = [
        EngineConfig.from_args({"speculative_config": json.loads(text)}),
        EngineConfig.from_args({"speculative_model": "[ngram]", "num_speculative_tokens": 3}),
        EngineConfig.from_toml(recipe),
        parse("--speculative-config", text),
    ]
    assert configs[0].speculative.proposers[0].num_speculative_tokens == 3
    assert all(config == configs[0] for config in configs)
    assert (
        EngineConfig.from_sections(json.loads(json.dumps(configs[0].to_sections()))) == configs[0]
    )


def test_the_shipped_recipes_are_complete_and_valid():
    recipes = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        EngineConfig.from_toml(recipe)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 4}, "unknown engine argument 'max_num_seq'"),
        ({"prefill_chunk_size": 8, "long_prefill_token_threshold": 16}, "16 contradicts 8"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"block_size": "16"}, "block_size must be int, got '16'"),
        ({"block_size": True}, "block_size must be int, got True"),
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 1, got -1"),
        ({"dtype": "int8"}, "dtype must be 'auto' or 'float32'"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"scheduling_policy": "sjf"}, "policy must be 'fcfs' or 'priority', got 'sjf'"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be"),
        ({"kv_cache_dtype": "fp4"}, r"dtype must be 'auto' or .*'fp8_e4m3', got 'fp4'"),
        ({"attention_kv_split": "some"}, r"kv_split must be 'auto' or 'scheduler'.*got 'some'"),
        ({"cudagraph_capture_sizes": [4, 0]}, "cudagraph_capture_sizes must be at least 1, got 0"),
        ({"cudagraph_capture_sizes": [1.5]}, "cudagraph_capture_sizes must be a list of int"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name_value_and_limit(args, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_args(args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\n", r"unknown section \[modle\]; known: model"),
        ("[model]\npaht = 'x'\n", r"unknown option 'paht' in \[model\]"),
        ("[model]\npath = 3\n", "path must be str, got 3"),
        ("[model\n", "cannot read the recipe"),
        ("model = 'demo'\n", r"\[model\] must be a table of options, got 'demo'"),
        ("[[model]]\npath = 'demo'\n", r"\[model\] must be a table of options"),
        ("[model]\npath = '\xfc'\n", "cannot read the recipe.*utf-8"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, text, message):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text, encoding="latin-1")
    for overrides in ({}, {"dtype": "auto"}):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_toml(recipe, overrides)


def test_resolving_settles_what_files_tell(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    resolved = resolve(EngineConfig.from_args({"model": str(folder)}))
    assert resolved.model.path == str(folder)
    assert resolved.model.max_model_len == 512
    assert (resolved.model.dtype, resolved.compile.mode) == ("float32", "eager")
    assert (resolved.device.kind, resolved.scheduler.async_scheduling) == ("cpu", False)
    assert EngineConfig.from_sections(resolved.to_sections()) == resolved


def test_a_context_longer_than_the_model_is_refused_with_both_numbers(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    with pytest.raises(ConfigError, match="max_model_len 513 is more than 512"):
        resolve(EngineConfig.from_args({"model": str(folder), "max_model_len": 513}))


def test_a_shorter_sliding_window_caps_the_context_and_says_so(tmp_path, caplog):
    folder = make_checkpoint(tmp_path / "m", "mistral", sliding_window=100)
    with caplog.at_level("INFO", logger="nano"):
        resolved = resolve(EngineConfig.from_args({"model": str(folder), "max_model_len": 300}))
    assert resolved.model.max_model_len == 100
    assert "sliding" in caplog.text


def test_a_dtype_that_the_cpu_does_not_compute_is_refused(tmp_path):  # B123
    folder = make_checkpoint(tmp_path / "m")
    with pytest.raises(ConfigError, match="dtype=float16 is not computed on CPU"):
        resolve(EngineConfig.from_args({"model": str(folder), "dtype": "float16"}))


HOPPER, TURING, VOLTA = Gpu("H200", (9, 0)), Gpu("T4", (7, 5)), Gpu("V100", (7, 0))


@pytest.mark.parametrize(
    ("args", "gpus", "device", "dtype", "is_async", "said"),
    [
        ({}, (HOPPER,), "cuda", "bfloat16", True, "device: cuda (auto: there is a GPU, H200)"),
        ({}, (TURING, HOPPER), "cuda", "float16", True, "compute capability 7.5 has no units for"),
        ({}, (VOLTA,), "cpu", "float32", False, "V100 has compute capability 7.0, and"),
        ({}, (), "cpu", "float32", False, "device: cpu (auto: nobody looked)"),
        ({"device": "cuda:1"}, (TURING, HOPPER), "cuda:1", "bfloat16", True, "dtype: bfloat16"),
        ({"device": "cuda:1"}, (HOPPER,), "cuda:1", "bfloat16", True, "async scheduling: on"),
        ({"device": "MIG-7"}, (TURING,), "MIG-7", "float16", True, "dtype: float16 (auto on T4"),
        ({"dtype": "float32"}, (HOPPER,), "cuda", "float32", True, "async scheduling: on"),
        ({"async_scheduling": False}, (HOPPER,), "cuda", "bfloat16", False, "device: cuda"),
        ({"device": "cpu"}, None, "cpu", "float32", False, "async scheduling: off (auto on cpu"),
        ({"async_scheduling": True}, (), "cpu", "float32", True, "device: cpu"),
    ],
)
def test_what_a_gpu_decides(tmp_path, caplog, args, gpus, device, dtype, is_async, said):
    asked = []

    def find(name: str) -> Gpus:
        asked.append(name)
        return Gpus(gpus, "" if gpus else "nobody looked")

    folder = make_checkpoint(tmp_path / "m")
    with caplog.at_level("INFO", logger="nano"):
        resolved = resolve(EngineConfig.from_args({"model": str(folder)} | args), find)
    assert resolved.device.kind == device
    assert resolved.model.dtype == dtype
    assert resolved.scheduler.async_scheduling is is_async
    assert said in caplog.text
    assert asked == ([] if gpus is None else [args.get("device", "cuda")])


def test_async_scheduling_may_be_told_either_way():
    for flags, is_async in (
        ((), None),
        (("--async-scheduling",), True),
        (("--no-async-scheduling",), False),
    ):
        assert parse(*flags).scheduler.async_scheduling is is_async


@pytest.mark.parametrize("told", ["auto", "eager", "compiled"])
def test_the_environment_says_what_the_automatic_mode_is_and_nothing_else(
    tmp_path, monkeypatch, told
):
    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setenv("NANO_COMPILE_MODE", told)
    assert resolve(EngineConfig.from_args({"model": str(folder)})).compile.mode == told
    args = {"model": str(folder), "compile_mode": "compiled"}
    assert resolve(EngineConfig.from_args(args)).compile.mode == "compiled"
    monkeypatch.setenv("NANO_COMPILE_MODE", "fast")
    with pytest.raises(ConfigError, match="NANO_COMPILE_MODE must be auto, eager or compiled"):
        resolve(EngineConfig.from_args({"model": str(folder)}))
    monkeypatch.delenv("NANO_COMPILE_MODE")
    assert resolve(EngineConfig.from_args({"model": str(folder)})).compile.mode == "auto"
