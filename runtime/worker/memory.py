"""How many KV pages fit, and what they cost."""

import os

ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int16": 2, "int8": 1}
DEFAULT_TOKENS = 65_536  # room for so many tokens, unless told otherwise ...
DEFAULT_SHARE = 0.25  # ... and no more than this share of the memory that is free


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Keys and values of one token in all layers; int16 and int8 have a float32 scale for each head besides."""
    scale_bytes = 4 if dtype in ("int16", "int8") else 0
    return 2 * num_layers * num_kv_heads * (head_dim * ITEM_BYTES[dtype] + scale_bytes)


def choose_num_pages(page_bytes: int, page_size: int, *, num_pages: int | None, budget_bytes: int | None) -> int:
    """How many pages to allocate: what was asked for, what the budget holds, or a share of the free memory.

    Raises MemoryError, with the sizes, if it does not fit.
    """
    free = free_memory()
    if num_pages is not None:
        if num_pages * page_bytes > free:
            raise MemoryError(
                f"{num_pages} KV pages of {page_size} tokens need {_gib(num_pages * page_bytes)}, but {_gib(free)} are free: "
                f"at most {free // page_bytes} pages fit; lower num_pages, or choose a smaller kv_dtype"
            )
        return num_pages
    limit = (
        budget_bytes
        if budget_bytes is not None
        else min(int(free * DEFAULT_SHARE), -(-DEFAULT_TOKENS // page_size) * page_bytes)
    )
    if not page_bytes <= limit <= free:
        raise MemoryError(
            f"the KV pool may take {_gib(limit)} of {_gib(free)} free memory, and one page of {page_size} tokens takes "
            f"{_gib(page_bytes)}: lower the page size, choose a smaller kv_dtype, or set memory_bytes to what there is"
        )
    return limit // page_bytes


def free_memory() -> int:
    """Bytes that can be had without swapping, as the kernel estimates it; limits of a container count too."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, _container_room())


def _container_room() -> int:
    """What a cgroup (v2) still lets this process take."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return max(0, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return 1 << 62


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**20 else f"{num_bytes} bytes"
