"""Box: the machine under test, and what every section of the check shares."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nano.device import Device
from nano.errors import CheckpointError, ConfigError
from nano.gpu_check.clock import Clock
from nano.gpu_check.deadline import Deadline
from nano.gpu_check.limits import Limits
from nano.gpu_check.models import Models
from nano.gpu_check.report import Report
from nano.gpu_check.sizes import Sizes

_PREFERENCE = ("flashinfer", "triton", "cpu", "torch")


class DeviceLost(Exception):
    """The device answers nothing any more: nothing that follows would mean anything."""


@dataclass(slots=True)
class Box:
    """`device_name` is what engines are told; `deadline` is the running section's own."""

    device: Device
    device_name: str
    clock: Clock
    sizes: Sizes
    report: Report
    deadline: Deadline
    models: Models
    backends_to_check: tuple[str, ...]
    left_out: frozenset[str] = frozenset()  # sections and modes, as told
    limits: Limits | None = None
    _works: set[tuple[str, str]] = field(default_factory=set)  # backend, dtype

    @property
    def is_gpu(self) -> bool:
        return self.device.kind != "cpu"

    def backend_for(self, dtype: str) -> str:
        """What engines of `dtype` ("auto": the models' own) compute attention with: the best of
        those that the check has seen work."""
        asked = str(self.sizes.model_dtype).removeprefix("torch.") if dtype == "auto" else dtype
        return next((name for name in _PREFERENCE if (name, asked) in self._works), "auto")

    def note_backend(self, name: str, dtype: str) -> None:
        """It serves layers of `dtype`, over a cache of the same."""
        self._works.add((name, dtype))

    def attempt(
        self, label: str, work: Callable[[], None], *, seconds: float, mode: str = ""
    ) -> None:
        """Do what takes about so many seconds, if there is time and nobody left `mode` out.

        What it raises is reported, and nobody else's trouble. Raises `DeviceLost`.
        """
        if mode in self.left_out:
            self.report.leave_out(label, "as told")
        elif not self.deadline.has(seconds):
            self.report.leave_out(label, "no time left")
        else:
            try:
                work()
            except (ConfigError, CheckpointError) as refusal:
                self.report.refuse(label, refusal)
            except Exception as error:  # kernels and compilers may raise anything
                self.report.broke(label, error)
                self.require_alive()

    def require_alive(self) -> None:
        """After an error nobody expected. Raises `DeviceLost` if the device does not go on."""
        try:
            self.device.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error
