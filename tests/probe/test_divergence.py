import struct

import pytest

from kimigguf.probe.divergence import Logits, in_words, parse, read_header

SAID = """
0.02.678.513 I kl_divergence: computing over 8 chunks, n_ctx=256, batch_size=2048, n_seq=8

chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence            Same top p
   1      27.7744 ±    6.9214       0.14021 ±    0.07233       0.35696 ±    0.02848    70.079 ±  4.079 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  55.233915 ±   5.377686
Mean PPL(base)                :  40.975543 ±   4.193557
Cor(ln(PPL(Q)), ln(PPL(base))):  95.20%
Mean ln(PPL(Q)/PPL(base))     :   0.298602 ±   0.031335
Mean PPL(Q)/PPL(base)         :   1.347973 ±   0.042239
Mean PPL(Q)-PPL(base)         :  14.258372 ±   1.888975

====== KL divergence statistics ======
Mean    KLD:   0.450413 ±   0.010607
Maximum KLD:   3.470160
99.9%   KLD:   2.779868
99.0%   KLD:   1.586614
Median  KLD:   0.409351
Minimum KLD:   0.000778

====== Token probability statistics ======
Mean    Δp: -6.154 ± 0.435 %
RMS Δp    : 15.171 ± 0.781 %
Same top p: 62.008 ± 1.523 %
"""
"""What llama-perplexity (build 11434) said of SmolLM2 in Q2_K against its Q4_1, shortened."""


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
