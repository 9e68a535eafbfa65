"""What ``status`` knows of a running server."""

from kimigguf.engines.observe import metrics


def test_prometheus_numbers_are_read_by_name() -> None:
    page = (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens\n# TYPE llamacpp:prompt_tokens_total counter\n"
        "llamacpp:prompt_tokens_total 345\nllamacpp:predicted_tokens_seconds 5.25\nbroken\n"
    )
    assert metrics(page) == {"prompt_tokens_total": 345.0, "predicted_tokens_seconds": 5.25}
