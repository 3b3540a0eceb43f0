"""Tests of data have a cache of their own and no data of the user's."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMISFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SEMISFL_DATA", raising=False)
