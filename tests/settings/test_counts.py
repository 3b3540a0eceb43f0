import pytest

from semisfl.settings.counts import counted


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
    assert counted(count, noun) == text
