"""``docs/cli.md`` matches the commands' help."""

from outrider.cli.reference import PAGE, reference


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "the page is out of date: run `python -m outrider.cli.reference`"
    )


def test_page_names_every_option() -> None:
    page = reference()
    for text in ("## outrider train", "`--num-speculative-tokens N`", "`--seed N`", "Default: `0`"):
        assert text in page
