import pytest

from semisfl.settings.counts import amount, plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (2, "labelled image", "2 labelled images"),
        (1, "class", "1 class"),
        (1000, "class", "1000 classes"),
    ],
)
def test_one_is_not_many(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_amounts_have_three_digits_and_no_exponent() -> None:
    sizes = (0, 999, 1234, 99_960, 999_600_000, 1.2e15)
    assert [amount(size) for size in sizes] == [
        *("0 B", "999 B", "1.23 kB", "100 kB", "1 GB", "1200 TB"),
    ]
