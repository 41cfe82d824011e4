"""Where ranks meet: nobody goes before all are there, and who waits knows for whom."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwright.errors import LaunchError
from shardwright.launch.meeting import Absence, Arrival, MeetingPoint, meet
from shardwright.launch.service import LOOPBACK, CoordinationService


def arrival(rank: int, size: int = 3, round_: int = 1, job: str = "", host: str = "here") -> Arrival:
    return Arrival(job=job, size=size, rank=rank, round=round_, host=host)


class GivesUp(Exception):
    pass


def wait_for(place: MeetingPoint, who: Arrival, until) -> Absence | str:
    """Meet until `until(absence)` is true; what was heard then."""
    heard: list[Absence | str] = []

    def on_wait(absence: Absence | str, waited_s: float) -> None:
        heard.append(absence)
        if until(absence) or waited_s > 20:
            raise GivesUp

    with pytest.raises(GivesUp):
        meet(place.address, who, on_wait)
    return heard[-1]


def patient(absence: Absence | str, waited_s: float) -> None:
    assert waited_s < 30


def test_all_go_at_once_with_a_service_of_their_own_each_round() -> None:
    with (
        CoordinationService(LOOPBACK, 3) as first,
        MeetingPoint(LOOPBACK, 3, first=first) as place,
        ThreadPoolExecutor(3) as pool,
    ):
        coordinators = []
        for round_ in (1, 2, 3):
            futures = [
                pool.submit(meet, place.address, arrival(rank, round_=round_, host="ab"[rank > 1]), patient)
                for rank in range(3)
            ]
            answers = {future.result(30) for future in futures}
            assert len(answers) == 1
            ((coordinator, hosts),) = answers
            assert hosts == (0, 0, 1)
            coordinators.append(coordinator)
        assert coordinators[0] == first.address
        assert len(set(coordinators)) == 3


def test_who_waits_hears_who_is_missing_and_who_left() -> None:
    with MeetingPoint(LOOPBACK, 3) as place:
        assert wait_for(place, arrival(0), lambda absence: isinstance(absence, Absence)) == Absence((1, 2), (0,))
        leaves = threading.Event()
        thread = threading.Thread(target=wait_for, args=(place, arrival(2), lambda absence: leaves.is_set()))
        thread.start()
        assert wait_for(place, arrival(0), lambda absence: absence == Absence((1,), (0, 2)))
        leaves.set()
        thread.join(10)
        assert wait_for(place, arrival(0), lambda absence: absence == Absence((1,), (0,), (2,)))


@pytest.mark.parametrize(
    ("stranger", "problem"),
    [
        (arrival(1, job="other"), "it is of the job 'other'"),
        (arrival(1, size=2), "there are 2 ranks, rank 0 says 3"),
        (arrival(3), "there is no rank 3 of 3"),
        (arrival(1, round_=2), "it joins for time 2"),
        (arrival(0), "another process is rank 0 already"),
    ],
)
def test_who_does_not_belong_is_refused_in_words(stranger: Arrival, problem: str) -> None:
    with MeetingPoint(LOOPBACK, 3) as place:
        leaves = threading.Event()
        thread = threading.Thread(target=wait_for, args=(place, arrival(0), lambda absence: leaves.is_set()))
        thread.start()
        try:
            assert wait_for(place, arrival(2), lambda absence: absence == Absence((1,), (0, 2)))
            with pytest.raises(LaunchError, match=problem):
                meet(place.address, stranger, patient)
        finally:
            leaves.set()
            thread.join(10)


@pytest.mark.parametrize(
    "hello", [b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000 + b"\n", b'{"rank": 0}\n', b"\x00\xff\n", b""]
)
def test_strangers_words_end_nothing(hello: bytes) -> None:
    with MeetingPoint(LOOPBACK, 1) as place:
        port = int(place.address.rpartition(":")[2])
        with socket.create_connection((LOOPBACK, port), timeout=5) as connection:
            connection.sendall(hello)
        assert meet(place.address, arrival(0, size=1), patient)[1] == (0,)


def test_a_port_that_is_taken_and_one_where_something_else_answers() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match="cannot meet at this port") as caught:
            MeetingPoint(LOOPBACK, 2, port)
        assert caught.value.where == f"{LOOPBACK}:{port}"

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1 << 12)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LaunchError, match="no meeting point"):
            meet(f"{LOOPBACK}:{port}", arrival(1), patient)
