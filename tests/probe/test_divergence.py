import struct
from dataclasses import replace

import pytest
from fakes.perplexity import SAID

from kimigguf.probe.divergence import Logits, in_words, parse, ratio_note, read_header


def test_the_closing_statistics_are_read_and_not_those_of_a_chunk() -> None:
    found = parse(SAID)
    assert found is not None
    assert (found.mean.mean, found.mean.error) == (0.450413, 0.010607)
    assert (found.median, found.percentile_99, found.maximum) == (0.409351, 1.586614, 3.470160)
    assert found.same_top.mean == pytest.approx(0.62008)
    assert found.same_top.error == pytest.approx(0.01523)
    assert found.probability_rms.mean == pytest.approx(0.15171)
    assert found.candidate_perplexity.mean == 55.233915
    assert found.reference_perplexity.mean == 40.975543
    assert found.perplexity_ratio.mean == 1.347973
    assert found.correlation == pytest.approx(0.952)


@pytest.mark.parametrize(
    ("divergence", "ratio", "explained"), [(0.0, 3.6926, True), (0.0, 1.001, False), (2.3, 3.7, False)]
)
def test_perplexities_that_differ_where_the_models_do_not_are_explained(
    divergence: float, ratio: float, *, explained: bool
) -> None:
    found = parse(SAID)
    assert found is not None
    mean, odd = replace(found.mean, mean=divergence), replace(found.perplexity_ratio, mean=ratio)
    note = ratio_note(replace(found, mean=mean, perplexity_ratio=odd))
    assert (note is not None and "go by the divergence" in note) == explained


@pytest.mark.parametrize("missing", ["Mean    KLD", "Same top p", "Mean PPL(Q)/PPL(base)", "99.0%   KLD"])
def test_a_report_that_lacks_a_number_is_no_report(missing: str) -> None:
    assert parse(SAID.replace(missing, "Something else")) is None
    assert parse("") is None


def test_numbers_that_are_none_are_no_numbers() -> None:
    assert parse(SAID.replace("0.450413 ±   0.010607", "-nan ±   nan")) is None
    unsure = parse(SAID.replace("95.20%", "-nan%"))
    assert unsure is not None
    assert unsure.correlation is None


def test_the_size_of_the_logits_is_known_before_they_are_written() -> None:
    """Eight chunks of 256 tokens of SmolLM2 were 99,893,204 bytes; a chunk of 512 of Kimi K3 is about 84 MB."""
    assert Logits(context_tokens=256, vocabulary=49152, chunks=8).size_bytes == 99_893_204
    assert Logits(context_tokens=512, vocabulary=163_840, chunks=1).size_bytes == pytest.approx(83.6e6, rel=0.01)


def test_a_file_that_holds_something_else_is_told() -> None:
    header = struct.pack("<8sIii", b"_logits_", 256, 49152, 8)
    assert read_header(header + b"more") == Logits(context_tokens=256, vocabulary=49152, chunks=8)
    assert read_header(header[:-1]) is None
    assert read_header(b"GGUF" + header[4:]) is None
    assert read_header(struct.pack("<8sIii", b"_logits_", 256, 0, 8)) is None


def test_a_divergence_is_put_into_the_fields_own_words() -> None:
    assert [in_words(kld) for kld in (0.001, 0.02, 0.07, 0.4)] == ["near lossless", "good", "noticeable", "significant"]
