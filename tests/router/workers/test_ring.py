"""A ring's readers get what was written, in order and unchanged, or they miss all that there is."""

from mmap import mmap

from hypothesis import given
from hypothesis import strategies as st

from router.workers.ring import HEAD_BYTES, Ring

RING, RECORD = 200, 8
STEPS = st.lists(st.one_of(st.binary(max_size=250), st.sampled_from([1, 2])), max_size=40)


def rings(workers: int = 3) -> tuple[mmap, list[Ring]]:
    memory = mmap(-1, workers * (HEAD_BYTES + RING))
    return memory, [Ring(memory, workers, number) for number in range(workers)]


@given(STEPS)
def test_a_reader_gets_all_that_was_written_since_or_nothing(steps: list[bytes | int]) -> None:
    _, [writer, *readers] = rings()
    written: list[bytes] = []
    read_to = [0, 0]
    for step in [*steps, 1, 2]:
        if isinstance(step, bytes):
            writer.write(step)
            written += [step] if len(step) + RECORD <= RING else []
            continue
        new, read_to[step - 1] = written[read_to[step - 1] :], len(written)
        fits = sum(len(message) + RECORD for message in new) <= RING
        assert list(readers[step - 1].read()) == (new if fits else [])
    assert not list(writer.read()), "what it has written itself is no news"


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_what_is_being_overwritten_is_never_taken_for_a_message(messages: list[bytes], data: st.DataObject) -> None:
    memory, [writer, reader, _] = rings()
    for message in messages:
        writer.write(message)
    for _ in range(data.draw(st.integers(1, 30))):
        memory[HEAD_BYTES + data.draw(st.integers(0, RING - 1))] = data.draw(st.integers(0, 255))
    found = list(reader.read())
    assert found == messages[: len(found)]
    writer.write(b"next")
    assert list(reader.read()) == [b"next"]


def test_a_worker_that_starts_anew_goes_on_with_its_ring_and_hears_nothing_old() -> None:
    memory, [writer, reader, other] = rings()
    writer.write(b"before")
    other.write(b"from another")
    again = Ring(memory, 3, 0)
    again.write(b"after")
    assert list(reader.read()) == [b"before", b"after", b"from another"]
    assert not list(again.read())
    other.write(b"new")
    assert list(again.read()) == [b"new"]
