from anabranch.runtime.bench.step import run, table


def test_the_step_bench_measures_every_size_and_says_so() -> None:
    result = run(small=True)
    assert {"rows_1_depth_1_us", "rows_32_depth_2_of_budget", "order_10k_us"} <= set(result)
    assert all(value > 0 for value in result.values())
    text = table(result)
    assert text.count("\n") == 5 and "waiting" in text
