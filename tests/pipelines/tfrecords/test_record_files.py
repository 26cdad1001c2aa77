import numpy as np
import pytest

from tfopt.pipelines.tfrecords.record_files import compression_of, header_offsets, is_header, record_offsets

FRAMED = [b"", b"a", b"bb" * 700, b"\x00" * 40]


def test_headers_are_found_where_records_begin_and_nowhere_else(plain_file):
    contents = plain_file(FRAMED).read_bytes()
    assert header_offsets(contents).tolist() == [0, 16, 33, 33 + 16 + 1400]
    assert header_offsets(contents[:11]).tolist() == []


def test_a_header_with_any_bit_flipped_is_none(plain_file):
    head = plain_file(FRAMED[2:]).read_bytes()[:12]
    assert is_header(head)
    for bit in range(96):
        assert not is_header((int.from_bytes(head) ^ 1 << bit).to_bytes(12))
    assert not is_header(head[:11])


def test_offsets_are_where_records_begin_and_the_last_ends(plain_file):
    ends = np.cumsum([len(record) + 16 for record in FRAMED])
    assert record_offsets(str(plain_file(FRAMED))).tolist() == [0, *ends]


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_compression_is_told_from_the_first_bytes(plain_file, compression):
    assert compression_of(plain_file(FRAMED, compression=compression).read_bytes()[:12]) == compression
