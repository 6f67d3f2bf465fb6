"""Which device a name means, how arrays reach one, and what its memory is divided into.

No GPU is needed: what is measured or queued there is injected.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from nano.device import CpuDevice, make_device
from nano.device.cuda import DeviceChoice
from nano.device.memory import MemoryBudget, MemoryMeter, MemoryUse
from nano.device.reading import Reading
from nano.device.staging import PinnedMemory, Staging
from nano.errors import ConfigError

GIB = 2**30
has_gpu = torch.backends.cuda.is_built() and torch.cuda.is_available()


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("cuda", DeviceChoice(0)),
        ("cuda:0", DeviceChoice(0)),
        ("cuda:13", DeviceChoice(13)),
        ("MIG-5c8d5b7e-1b0f", DeviceChoice(uuid="MIG-5c8d5b7e-1b0f")),
        ("GPU-0a1b", DeviceChoice(uuid="GPU-0a1b")),
    ],
)
def test_a_gpu_is_named_by_its_place_or_its_uuid(name, choice):
    assert DeviceChoice.parse(name) == choice


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "tpu", "", "CPU"])
def test_another_name_is_refused_with_those_that_are_not(name):
    with pytest.raises(ConfigError, match=r"device must be 'cpu', 'cuda', 'cuda:<index>'.*got '"):
        make_device(name)


def test_a_gpu_that_cannot_be_had_is_refused_with_the_reason(monkeypatch):
    assert "is built without CUDA" in DeviceChoice(0).refusal("cuda", [], False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "no GPU is visible (is there a driver?)" in DeviceChoice(0).refusal("cuda", [], True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES='')" in DeviceChoice(0).refusal("cuda", [], True)
    reason = DeviceChoice(2).refusal("cuda:2", ["A", "B"], True)
    assert reason == "device=cuda:2: only 2 visible: cuda:0 A, cuda:1 B"
    assert DeviceChoice(1).refusal("cuda:1", ["A", "B"], True) is None


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused():
    with pytest.raises(ConfigError, match="device=cuda"):
        make_device("cuda")


def test_the_cpu_captures_nothing_and_shares_what_it_is_given():
    device = make_device("cpu", 1)
    assert isinstance(device, CpuDevice)
    assert not device.supports_graphs
    array = np.arange(3)
    assert device.to_device(array).data_ptr() == array.ctypes.data


class Queue:
    """Copies that the device has been asked for, and how many of them it has done."""

    def __init__(self) -> None:
        self.num_recorded = self.num_done = self.num_waits = 0
        self.allocated: list[Tensor] = []

    def allocate(self, size: int) -> Tensor:
        self.allocated.append(torch.empty(size, dtype=torch.uint8))
        return self.allocated[-1]

    def make_event(self) -> "Mark":
        return Mark(self)

    def memory(self) -> PinnedMemory:
        return PinnedMemory(self.allocate, self.make_event)

    def staging(self) -> Staging:
        return Staging(torch.device("cpu"), self.memory())


class Mark:
    def __init__(self, queue: Queue):
        self.queue = queue
        self.place = 0

    def record(self) -> None:
        self.queue.num_recorded += 1
        self.place = self.queue.num_recorded

    def query(self) -> bool:
        return self.place <= self.queue.num_done

    def synchronize(self) -> None:
        self.queue.num_done = max(self.queue.num_done, self.place)
        self.queue.num_waits += 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(7, dtype=np.int32),
        np.arange(24, dtype=np.int64).reshape(4, 6)[:3, 1:4],
        np.array([True, False, True]),
        np.zeros((0, 5), np.int32),
        np.array(2.5, np.float32),
    ],
    ids=["int32", "a view", "bool", "empty", "scalar"],
)
def test_an_array_arrives_as_it_was(array):
    copy = Queue().staging().to_device(array)
    assert copy.is_contiguous()
    assert copy.shape == array.shape
    np.testing.assert_array_equal(copy.numpy(), array)
    assert copy.numpy().dtype == array.dtype


def test_a_pinned_buffer_is_written_again_only_when_its_copy_is_done():
    queue = Queue()
    staging = queue.staging()
    for value in range(3):  # the device is late
        staging.to_device(np.full(5, value, np.int64))
    assert [int(buffer[0]) for buffer in queue.allocated] == [0, 1, 2]
    queue.num_done = 1
    staging.to_device(np.full(5, 7, np.int64))
    assert [int(buffer[0]) for buffer in queue.allocated] == [7, 1, 2]
    staging.to_device(np.full(5, 8, np.int64))
    assert [int(buffer[0]) for buffer in queue.allocated] == [7, 1, 2, 8]


def test_a_device_that_keeps_up_needs_one_buffer_of_each_size():
    queue = Queue()
    staging = queue.staging()
    for size in (10, 5000, 700, 4097, 1, 8000):
        queue.num_done = queue.num_recorded
        staging.to_device(np.ones(size, np.uint8))
    assert [len(buffer) for buffer in queue.allocated] == [4096, 8192]


def test_the_caller_may_rewrite_its_array_at_once():
    array = np.arange(4)
    copy = Queue().staging().to_device(array)
    array[:] = 0
    assert copy.tolist() == [0, 1, 2, 3]


TENSORS = [
    torch.arange(7, dtype=torch.int32),
    torch.arange(24).view(4, 6)[:3, 1:4],
    torch.tensor([True, False, True]),
    torch.zeros(0, 5),
    torch.tensor(2.5, dtype=torch.float64),
]


def test_the_cpu_has_its_results_at_hand():
    arrays = CpuDevice(1).to_host(TENSORS).wait()
    assert arrays[0].ctypes.data == TENSORS[0].data_ptr()


def test_tensors_are_read_as_they_were_and_in_one_wait():
    queue = Queue()
    copy = Reading(queue.memory()).to_host(TENSORS)
    assert queue.num_recorded == 1
    assert queue.num_waits == 0
    arrays = copy.wait()
    for array, tensor in zip(arrays, TENSORS, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())
        assert array.dtype == tensor.numpy().dtype
    assert all(again is array for again, array in zip(copy.wait(), arrays, strict=True))
    assert queue.num_waits == 1


def test_what_was_read_stays_when_its_buffer_is_written_again():
    queue = Queue()
    reading = Reading(queue.memory())
    first, second = (reading.to_host([torch.full((5,), value)]) for value in (1, 2))
    assert len(queue.allocated) == 2  # both are in flight
    kept = first.wait()
    third = reading.to_host([torch.full((5,), 3)])
    assert len(queue.allocated) == 2
    assert [copy.wait()[0].tolist() for copy in (first, second, third)] == [
        [1] * 5,
        [2] * 5,
        [3] * 5,
    ]
    assert kept[0].tolist() == [1] * 5


def test_reading_nothing_is_reading_nothing():
    assert Reading(Queue().memory()).to_host([]).wait() == []


USE = MemoryUse(others=2 * GIB, weights=16 * GIB, activations=3 * GIB, graphs=GIB)


def test_the_cache_gets_its_share_of_what_the_rest_leaves():
    budget = MemoryBudget(80 * GIB, USE, 0.9)
    assert budget.rest == 58 * GIB
    assert budget.kv_cache == int(58 * GIB * 0.9)
    budget.require(52 * GIB, "anything")


def test_the_table_has_every_number_of_the_arithmetic():
    table = MemoryBudget(80 * GIB, USE, 0.5).table()
    rows = [line.split() for line in table.splitlines()]
    sizes = [float(row[-2]) for row in rows]
    assert sizes == [80, 2, 16, 3, 1, 58, 29]
    assert "KV cache (50% of it)" in table
    assert len({len(line) for line in table.splitlines()}) == 1


def test_what_does_not_fit_is_refused_with_the_table():
    budget = MemoryBudget(24 * GIB, dataclasses.replace(USE, weights=15 * GIB), 0.9)
    with pytest.raises(ConfigError, match=r"no room for a request of 8192 tokens: 4\.000 GiB") as e:
        budget.require(4 * GIB, "a request of 8192 tokens")
    assert "gpu_memory_utilization=0.9 leaves 2.700 GiB" in str(e.value)
    assert budget.table() in str(e.value)


def test_weights_that_leave_nothing_leave_an_empty_cache():
    budget = MemoryBudget(16 * GIB, USE, 0.9)
    assert budget.rest == -6 * GIB
    assert budget.kv_cache == 0
    with pytest.raises(ConfigError, match=r"-6\.000 GiB"):
        budget.require(1, "one block")


class FakeMemory:
    """A device on which `allocate` takes memory, some of it from the driver for good."""

    def __init__(self, total: int, others: int):
        self._total, self._taken = total, others
        self._allocated = self._peak = 0

    def allocate(self, size: int) -> None:
        self._allocated += size
        self._taken += size
        self._peak = max(self._peak, self._allocated)

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._taken

    def allocated(self) -> int:
        return self._allocated

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._allocated


def test_each_use_is_measured_where_it_arises():
    memory = FakeMemory(1000, others=50)
    meter = MemoryMeter(memory)
    with meter.growth("weights"):
        memory.allocate(300)
        memory.allocate(70)  # a file's buffer
        memory.allocate(-70)
    with meter.peak("activations", apart_from=30):
        memory.allocate(30)  # the KV of the made-up step
        memory.allocate(100)
        memory.allocate(-130)
    with meter.growth("graphs"):
        memory.allocate(40)
    budget = meter.budget(0.5)
    assert budget.use == MemoryUse(others=50, weights=300, activations=100, graphs=40)
    assert budget.kv_cache == 255


def test_memory_that_others_give_back_meanwhile_is_no_negative_use():
    memory = FakeMemory(1000, others=50)
    meter = MemoryMeter(memory)
    with meter.growth("weights"):
        memory.allocate(-20)
    assert meter.budget(1.0).use.weights == 0
