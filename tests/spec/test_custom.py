import inspect
import logging
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano.errors import ConfigError
from nano.spec.custom import CustomProposer
from nano.spec.options import ProposerOptions
from tests.spec.texts import array_of, new_request

VOCAB_SIZE = 100
HERE = __name__


class Asked:
    """Answers what a test puts into `answer`, and remembers what it was asked."""

    answer: Any = ()

    def __init__(self, options: ProposerOptions):
        self.options = options
        self.calls: list[Any] = []

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        self.calls.append((request_id, token_ids.tolist(), num_tokens))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Forgetful(Asked):
    def forget(self, request_id: str) -> None:
        self.calls.append(request_id)
        raise KeyError(request_id)


class Meddling(Asked):
    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        token_ids[0] = 0
        return [1]


class Unwilling(Asked):
    def __init__(self, options: ProposerOptions):
        raise OSError("no corpus")


class NoProposer:
    pass


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest imports this file under a name of its own making."""
    monkeypatch.setitem(sys.modules, "some_package.proposers", sys.modules[__name__])


def make(class_name: str) -> CustomProposer:
    path = f"some_package.proposers:{class_name}"
    options = ProposerOptions(method="custom_class", model=path, num_speculative_tokens=7)
    return CustomProposer(path, options, VOCAB_SIZE)


@pytest.mark.parametrize("separator", [":", "."])
def test_a_class_is_found_by_its_import_path_and_asked_for_drafts(
    separator: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Asked, "answer", [3, np.int64(4), 99])
    path = f"some_package.proposers{separator}Asked"
    options = ProposerOptions(method="custom_class", model=path)
    proposer = CustomProposer(path, options, VOCAB_SIZE)
    proposer.start(new_request([1, 2]))
    proposer.advance("a", array_of([1, 2]))
    drafts = proposer.propose("a", array_of([1, 2]), 5)
    assert drafts == [3, 4, 99]
    assert {type(token_id) for token_id in drafts} == {int}
    assert proposer._proposer.options is options
    assert proposer._proposer.calls == [("a", [1, 2], 5)]
    proposer.forget("a", has_ended=True)


def test_more_drafts_than_asked_for_are_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Asked, "answer", [1, 2, 3])
    assert make("Asked").propose("a", array_of([1]), 1) == [1]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "12",
        (1, 2),
        [1, 100],
        [-1],
        [1.0],
        [True],
        [[1]],
        [None],
        ValueError("out of ideas"),
    ],
    ids=repr,
)
def test_rubbish_counts_as_no_drafts_and_is_reported_once(
    answer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "nano")
    monkeypatch.setattr(logging.getLogger("nano"), "propagate", True)
    proposer = make("Asked")
    monkeypatch.setattr(Asked, "answer", answer)
    for _ in range(3):
        assert proposer.propose("a", array_of([1]), 5) == []
    assert len(caplog.records) == 1
    assert "some_package.proposers:Asked" in caplog.text
    monkeypatch.setattr(Asked, "answer", [1])
    assert proposer.propose("a", array_of([1]), 5) == [1]


def test_the_tokens_of_a_request_cannot_be_changed():
    token_ids = array_of([5, 6])
    assert make("Meddling").propose("a", token_ids, 5) == []
    assert token_ids.tolist() == [5, 6]
    token_ids[0] = 7  # whoever owns them still may


def test_forget_is_called_if_there_is_one_and_its_errors_are_contained():
    proposer = make("Forgetful")
    proposer.forget("a", has_ended=False)
    assert proposer._proposer.calls == ["a"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("Asked", "is not of the form"),
        (":Asked", "is not of the form"),
        ("some_package.proposers:", "is not of the form"),
        ("no_such_package.proposers:Asked", "cannot be imported: ModuleNotFoundError"),
        ("some_package.proposers:Missing", "has no class 'Missing'"),
        ("some_package.proposers:VOCAB_SIZE", "has no class 'VOCAB_SIZE'"),
        ("some_package.proposers:NoProposer", "has no method propose"),
        ("some_package.proposers:Unwilling", "cannot be made: OSError"),
    ],
)
def test_a_path_without_a_proposer_is_refused_with_the_reason(path: str, reason: str):
    options = ProposerOptions(method="custom_class", model=path)
    with pytest.raises(ConfigError, match=reason) as refused:
        CustomProposer(path, options, VOCAB_SIZE)
    assert repr(path) in str(refused.value)


def test_a_module_that_fails_while_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_proposer.py").write_text("raise RuntimeError('half written')")
    monkeypatch.syspath_prepend(tmp_path)
    options = ProposerOptions(method="custom_class", model="broken_proposer:Proposer")
    with pytest.raises(ConfigError, match="half written"):
        CustomProposer("broken_proposer:Proposer", options, VOCAB_SIZE)


def test_the_example_of_the_docstring_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documented = inspect.getdoc(CustomProposer) or ""
    example = documented[documented.index("    import numpy") : documented.index("is used by")]
    (tmp_path / "successors.py").write_text(textwrap.dedent(example))
    monkeypatch.syspath_prepend(tmp_path)
    options = ProposerOptions(method="custom_class", model="successors:Successors")
    proposer = CustomProposer("successors:Successors", options, VOCAB_SIZE)
    assert proposer.propose("a", array_of([1, 2, 3]), 4) == []
    assert proposer.propose("a", array_of([1, 2, 3, 5, 1]), 4) == [2, 3, 5, 1]
    assert proposer.propose("b", array_of([1]), 4) == []
    proposer.forget("a", has_ended=True)
    assert proposer.propose("a", array_of([1]), 4) == []
