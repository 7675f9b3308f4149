"""Fixtures for several test files."""

import pytest
from running import random_walk, write_shard


def make_data(folder):
    folder.mkdir()
    write_shard(folder / "train_000000.bin", random_walk(20000))
    write_shard(folder / "val_000000.bin", random_walk(3000, seed=1))
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")
