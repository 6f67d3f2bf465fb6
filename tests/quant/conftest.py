import pytest

from nano.native.build import load_threads


@pytest.fixture
def set_num_threads():
    pool = load_threads()
    before = pool.nano_num_threads()
    yield pool.nano_set_num_threads
    pool.nano_set_num_threads(before)
