import pytest

from anabranch.runtime.worker import memory
from anabranch.runtime.worker.memory import choose_num_pages, free_memory, kv_bytes_per_token

GIB = 1 << 30


@pytest.fixture
def four_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 4 * GIB)


def test_a_token_costs_keys_and_values_in_every_layer() -> None:
    shape = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
    assert kv_bytes_per_token(**shape, dtype="f16") == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(**shape, dtype="int16") == 2 * 30 * 3 * (64 * 2 + 4)
    assert kv_bytes_per_token(**shape, dtype="int8") == 2 * 30 * 3 * (64 + 4)


@pytest.mark.usefixtures("four_gib")
def test_the_pool_takes_what_was_asked_a_budget_or_a_share() -> None:
    page = 1 << 20
    assert choose_num_pages(page, 16, num_pages=7, budget_bytes=None) == 7
    assert choose_num_pages(page, 16, num_pages=None, budget_bytes=10 * page + 5) == 10
    assert choose_num_pages(page, 16, num_pages=None, budget_bytes=None) == 1024  # a quarter of what is free
    assert choose_num_pages(1 << 10, 16, num_pages=None, budget_bytes=None) == 4096  # 65,536 tokens


@pytest.mark.usefixtures("four_gib")
def test_what_does_not_fit_is_refused_with_the_sizes() -> None:
    with pytest.raises(
        MemoryError, match=r"5000 KV pages of 16 tokens need 4.88 GiB, but 4.00 GiB are free: at most 4096 pages fit"
    ):
        choose_num_pages(1 << 20, 16, num_pages=5000, budget_bytes=None)
    with pytest.raises(MemoryError, match=r"may take 8.00 GiB of 4.00 GiB"):
        choose_num_pages(1 << 20, 16, num_pages=None, budget_bytes=8 * GIB)
    with pytest.raises(MemoryError, match=r"one page of 16 tokens takes 2.00 GiB"):
        choose_num_pages(2 * GIB, 16, num_pages=None, budget_bytes=None)


def test_free_memory_is_what_the_kernel_says() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
