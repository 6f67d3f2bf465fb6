"""The check's sections, in their order, each with its share of the time and its own failures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nano.device import make_device
from nano.gpu_check.attention_checks import check_attention
from nano.gpu_check.box import Box, DeviceLost
from nano.gpu_check.clock import facts_of, make_clock
from nano.gpu_check.deadline import GRACE_SECONDS, Deadline, TimeUp
from nano.gpu_check.models import Models
from nano.gpu_check.report import Report
from nano.gpu_check.sampling_checks import check_sampling
from nano.gpu_check.sizes import FULL, QUICK, TINY
from nano.gpu_check.speculation_timings import measure_speculation
from nano.gpu_check.sync_checks import check_syncs
from nano.gpu_check.timings import measure_box, measure_steps
from nano.gpu_check.token_checks import check_tokens


@dataclass(frozen=True, slots=True)
class Section:
    """What it leaves of its share is for those behind it."""

    name: str
    share: float  # of the time, as a weight
    run: Callable[[Box], None]


SECTIONS = (
    Section("limits", 1, measure_box),
    Section("attention", 8, check_attention),
    Section("sampling", 2, check_sampling),
    Section("tokens", 12, check_tokens),
    Section("syncs", 4, check_syncs),
    Section("steps", 14, measure_steps),
    Section("speculation", 6, measure_speculation),
)


def make_box(
    device_name: str,
    folder: Path,
    *,
    is_quick: bool = False,
    model: Path | None = None,
    backends: Sequence[str] | None = None,
    left_out: Sequence[str] = (),
    seconds: float | None = None,
) -> Box:
    """folder: for models that are made. Raises `ConfigError` without such a device."""
    device = make_device(device_name)
    gpu_sizes = QUICK if is_quick else FULL
    sizes = TINY if device.kind == "cpu" else gpu_sizes
    if model is not None:  # it takes the place of every shape: once is enough
        sizes = replace(
            sizes, token_models=sizes.token_models[-1:], timed_models=sizes.timed_models[:1]
        )
    return Box(
        device=device,
        device_name=device_name,
        clock=make_clock(device.torch_device),
        sizes=sizes,
        report=Report(facts_of(device.torch_device)),
        deadline=Deadline(seconds or sizes.seconds),
        models=Models(folder, device.torch_device, model),
        backends_to_check=tuple(backends or sizes.backends),
        left_out=frozenset(left_out),
    )


def run_sections(
    box: Box, sections: Sequence[Section] = SECTIONS, grace: float = GRACE_SECONDS
) -> None:
    """All sections, within `box.deadline`. What one raises ends it and no other.

    Ctrl-C ends all; what was found until then stays.
    """
    whole = box.deadline
    try:
        for i, section in enumerate(sections):
            box.report.section = section.name
            share = section.share / sum(later.share for later in sections[i:])
            box.deadline = whole.child(whole.left * share)
            with box.deadline.enforced(grace):
                _run(box, section)
    except KeyboardInterrupt:
        box.report.is_interrupted = True
        box.report.say("interrupted")
    except DeviceLost as error:
        box.report.broke("the device answers no more: what would follow is left out", error)
    finally:
        box.deadline = whole


def _run(box: Box, section: Section) -> None:
    try:
        box.attempt("all of it", partial(section.run, box), seconds=0.0, mode=section.name)
    except TimeUp as error:
        box.report.leave_out("the rest", str(error))
