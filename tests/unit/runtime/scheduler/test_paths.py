from anabranch.runtime.scheduler.paths import ROOT, child_path, retry_path


def test_paths_of_a_deep_and_wide_tree_differ() -> None:
    level, seen = [ROOT], {ROOT}
    for _ in range(3):
        level = [child_path(path, index) for path in level for index in range(12)]
        seen.update(level)
    assert len(seen) == 1 + 12 + 144 + 1728


def test_a_retry_differs_from_every_child_and_from_earlier_retries() -> None:
    retries = [retry_path(5, index) for index in range(100)]
    children = [child_path(5, index) for index in range(100)]
    assert len({5, *retries, *children}) == 201


def test_paths_are_64_bits_and_never_change() -> None:
    """Streams must be the same after an update: these numbers are part of the promise."""
    assert child_path(ROOT, 0) == 0x46B73E79F0C37C00
    assert child_path(ROOT, 1) == 0x5D60B960E0946BA0
    assert retry_path(ROOT, 0) == 0xFB2668132C051C67
    assert all(0 <= child_path(path, 3) < 2**64 for path in (0, 1, 2**64 - 1))
