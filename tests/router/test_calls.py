"""The way of a request through the router is short: what it passes is counted, and the number may only be lowered."""

from pathlib import Path

from tests.bench.front import EVENT, PLAIN, STREAM, FrontOnWires, bodies
from tests.bench.measure import OURS, calls

CALLS = {False: 127, True: 166}  # of functions of ours, from a client's first byte to its last; with 16 events
WRITES = {False: 2, True: 19}  # to the replica, and to the client: the head with what came with it, and each event
FILES = 31  # of router/


async def test_a_warm_chat_passes_few_functions_and_files() -> None:
    for stream, most in CALLS.items():
        front = FrontOnWires()
        try:
            answer = STREAM if stream else [PLAIN]
            passed: list[list[str]] = []
            for body in bodies(800, stream, 0)[:30]:
                with calls() as made:
                    writes = front.ask(body, answer)
                assert writes == WRITES[stream]
                passed.append([file for file in made if any(map(Path(file).is_relative_to, OURS))])
        finally:
            await front.close()
        ours = min(passed, key=len)  # others pass what is due now and then, such as a tick of the clock
        assert len(ours) <= most, f"{len(ours)} calls"
        files = {file for file in ours if Path(file).is_relative_to(OURS[-1])}
        assert len(files) <= FILES, f"{len(files)} files"


async def test_events_are_the_same_however_a_replica_frames_them() -> None:
    chunk, upper = (form % (len(EVENT), EVENT) for form in (b"%x\r\n%b\r\n", b"%X\r\n%b\r\n"))
    half = b"%x\r\n%b\r\n" % (100, EVENT[:100]) + b"%x\r\n%b" % (len(EVENT) - 100, EVENT[100:150])
    told = EVENT.replace(b"yyyyyyyyyyyy", b'completion_tokens":7', 1)
    reads = [chunk, chunk, chunk, upper, chunk, chunk * 2, chunk, half, EVENT[150:] + b"\r\n", chunk, chunk]
    reads += [chunk[:3], chunk[3:], chunk, b"%x\r\n%b\r\n" % (len(told), told), chunk, chunk[:-1], chunk[-1:], chunk]
    front = FrontOnWires()
    try:
        written: list[bytes] = []
        front.client.write = written.append  # type: ignore[method-assign, assignment]
        front.client.written.append(b"it is kept there")
        front.ask(bodies(800, True, 0)[0], [STREAM[0], *reads, STREAM[-1]])
    finally:
        await front.close()
    assert sum(each == chunk for each in written) >= 6
    sizes, parts = (b"".join(written).partition(b"\r\n\r\n")[2].split(b"\r\n")[start::2] for start in (0, 1))
    assert [int(size or b"0", 16) for size in sizes] == [*map(len, parts), 0]
    assert b"".join(parts) == EVENT * 13 + told + EVENT * 3
