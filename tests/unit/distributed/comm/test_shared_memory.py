"""What the messages of shared memory carry."""

from gsplit.distributed.comm.shared_memory import _MESSAGE, _fit


def test_a_purpose_of_any_length_fits_and_stays_distinct() -> None:
    purposes = ["counts", "é" * 300, "é" * 299 + "e", "a" * 200, "a" * 201, "a" * 202]
    sent = [_MESSAGE.unpack(_MESSAGE.pack(0, 0, 0, 0, 0, 0, _fit(each)))[-1].rstrip(b"\0") for each in purposes]
    assert sent == [_fit(each) for each in purposes]
    assert len(set(sent)) == len(purposes)
    assert sent[0] == b"counts" and sent[3] == b"a" * 200
