"""Communicators over scripted servers: llama.cpp's in pairs, ours in any number."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from longwire.client.collectives import Communicator, communicate
from longwire.client.device import RemoteDevice
from longwire.errors import ConnectionLost, RemoteFailure
from longwire.native.contract import HostDevice
from longwire.native.plugin import Registry
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit, WireType
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.links import Listening, Ticket
from longwire.wire.lx import HAS_PEERS
from longwire.wire.tensors import Tensor
from support.ggml import COMPUTE, F16, Ggml, change
from support.rig import Rig
from support.scripted import PATIENCE_S, Answers, Instead, refusal

Make = Callable[..., Rig]
ONE = m.U8.pack(1)
NONE = m.U8.pack(0)
TICKET = Ticket(b"i" * 16, b"s" * 32)
LISTENING = {Command.LX_LISTEN: Listening(51052, TICKET).encode()}
NO_ROOM = refusal("LimitExceeded", "8 communicators")


@contextmanager
def waiting_rank_0() -> Iterator[tuple[Endpoint, Callable[[bytes], bytes]]]:
    """A server that answers no COMM_INIT before somebody has come to its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def waits(body: bytes) -> bytes:
            peer, _ = listener.accept()
            peer.close()
            return NONE

        yield Endpoint("127.0.0.1", listener.getsockname()[1] - 1000), waits


class Ranks:
    """Devices in rank order, each with a buffer, and tensors in those."""

    def __init__(self, ggml: Ggml, context: int, devices: list[RemoteDevice]) -> None:
        self.ggml, self.context, self.devices = ggml, context, devices
        self.connections = list(dict.fromkeys(d.connection for d in devices))
        self._stack = ExitStack()
        self.buffers = [self._buffer(device) for device in devices]

    def close(self) -> None:
        self._stack.close()

    def _buffer(self, device: RemoteDevice) -> int:
        library = self.ggml.library
        kind = library.ggml_backend_dev_buffer_type(device.plugin.address)
        buffer: int = library.ggml_backend_buft_alloc_buffer(kind, 1 << 16)
        library.ggml_backend_buffer_get_base(buffer)
        self._stack.callback(library.ggml_backend_buffer_free, buffer)
        return buffer

    def tensors(self, *ne: int, type: int = 0, compute: bool = True) -> list[int]:
        """One on each device."""
        made = [self.ggml.tensor(self.context, *ne, type=type) for _ in self.devices]
        for buffer, tensor in zip(self.buffers, made, strict=True):
            self.ggml.place(buffer, tensor)
            change(tensor, "flags", COMPUTE if compute else 0)
        return made

    def communicator(self) -> Communicator:
        made = communicate(self.devices)
        assert made is not None
        return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def theirs(rig: Make, ggml: Ggml, context: int, stack: ExitStack) -> Callable[..., Any]:
    """Two servers of llama.cpp's; `theirs(answers of rank 0, of rank 1)`."""

    def make(
        *answers: Answers,
        dialect: Dialect = V8,
        first: Endpoint | None = None,
        second: Endpoint | None = None,
    ) -> tuple[Ranks, list[Rig]]:
        endpoints = first or Endpoint("10.0.0.1", 50052), second or Endpoint("b", 2)
        known = answers or ({Command.COMM_INIT: ONE},) * 2
        rigs = [
            rig(a, dialect, index=2 - i, endpoint=e)
            for i, (a, e) in enumerate(zip(known, endpoints, strict=True))
        ]
        ranks = Ranks(ggml, context, [r.device for r in rigs])
        stack.callback(ranks.close)
        for r in rigs:
            r.forget()
        return ranks, rigs

    return make


@pytest.fixture
def ours(rig: Make, ggml: Ggml, context: int, stack: ExitStack) -> Callable[..., Any]:
    """`ours(1, 2)`: two servers of ours, the second one with two devices."""

    def make(*counts: int, answers: Any = None) -> tuple[Ranks, list[Rig]]:
        rigs, devices = [], []
        for number, count in enumerate(counts):
            links = iter(range(10 * number + 1, 10 * number + 10))

            def link(body: bytes, links: Iterator[int] = links) -> bytes:
                return m.U32.pack(next(links))

            known = {Command.LX_ACCEPT: link, Command.LX_CONNECT: link, **LISTENING}
            known |= (answers or {}).get(number, {})
            endpoint = Endpoint(f"10.0.0.{number + 1}", 50052)
            r = rig(known, V8, endpoint=endpoint, lx_flags=HAS_PEERS)
            rigs.append(r)
            devices.append(r.device)
            for index in range(1, count):
                registry = Registry(ggml.engine)
                device = RemoteDevice(registry, f"RPC9{index}", index, r.session)
                devices.append(device)
        ranks = Ranks(ggml, context, devices)
        stack.callback(ranks.close)
        for r in rigs:
            r.forget()
        return ranks, rigs

    return make


def decoded(body: bytes) -> tuple[int, Tensor]:
    device, record = m.CommAllreduce.decode(body)
    return device, Tensor.decode(record)


def summed(r: Rig) -> list[Tensor]:
    """The first tensor of every all-reduce of LX."""
    bodies = r.server.of(Command.LX_ALLREDUCE)
    return [Tensor.decode(LxAllreduce.decode(body).tensors[0]) for body in bodies]


class TestPair:
    def test_both_are_told_at_once(self, theirs: Callable[..., Any]) -> None:
        asked = threading.Barrier(2)

        def answer(body: bytes) -> bytes:
            asked.wait(PATIENCE_S)
            return ONE

        ranks, rigs = theirs(*[{Command.COMM_INIT: answer}] * 2)
        assert ranks.communicator().size == 2
        inits = [m.CommInit.decode(r.server.of(Command.COMM_INIT)[0]) for r in rigs]
        assert inits == [
            m.CommInit(2, 0, 2, 51052, b""),
            m.CommInit(1, 1, 2, 51052, b"10.0.0.1"),
        ]

    def test_a_sum_is_posted_to_both(self, theirs: Callable[..., Any]) -> None:
        ranks, rigs = theirs()
        communicator = ranks.communicator()
        tensors = ranks.tensors(8, 3)
        trips = [r.connection.traffic.round_trips for r in rigs]
        assert communicator.allreduce(tensors) is True
        assert [r.connection.traffic.round_trips for r in rigs] == trips
        for r, index in zip(rigs, (2, 1), strict=True):
            assert r.settle() == ["COMM_INIT", "COMM_ALLREDUCE"]
            device, tensor = decoded(r.server.of(Command.COMM_ALLREDUCE)[0])
            assert device == index and tensor.ne == (8, 3, 1, 1)
            assert tensor.buffer and tensor.data

    def test_leaving(self, theirs: Callable[..., Any]) -> None:
        ranks, rigs = theirs()
        ranks.communicator().free()
        for r, index in zip(rigs, (2, 1), strict=True):
            r.settle()
            assert r.server.of(Command.COMM_FREE) == [m.U32.pack(index)]

    def test_a_tensor_that_is_no_part_is_not_summed(
        self, theirs: Callable[..., Any]
    ) -> None:
        ranks, rigs = theirs()
        communicator = ranks.communicator()
        assert communicator.allreduce(ranks.tensors(8, compute=False)) is False
        assert rigs[0].settle() == ["COMM_INIT"]

    @pytest.mark.parametrize("refuses", [0, 1])
    def test_without_the_other_there_is_none(
        self,
        theirs: Callable[..., Any],
        caplog: pytest.LogCaptureFixture,
        refuses: int,
    ) -> None:
        answers = [{Command.COMM_INIT: NONE if i == refuses else ONE} for i in (0, 1)]
        ranks, rigs = theirs(*answers, first=Endpoint("127.0.0.1", 1))
        assert communicate(ranks.devices) is None
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1 and "did not find" in warnings[0].message
        for r in rigs:
            # Nobody has anything to free.
            assert r.settle() == ["COMM_INIT"]

    def test_a_rank_0_that_waits_for_ever_is_released(
        self, theirs: Callable[..., Any]
    ) -> None:
        with waiting_rank_0() as (first, waits):
            ranks, _ = theirs(
                {Command.COMM_INIT: waits}, {Command.COMM_INIT: NONE}, first=first
            )
            assert communicate(ranks.devices) is None
            ranks.devices[0].connection.check()

    def test_a_rank_1_that_is_lost_releases_rank_0(
        self, theirs: Callable[..., Any]
    ) -> None:
        with waiting_rank_0() as (first, waits):
            ranks, rigs = theirs(
                {Command.COMM_INIT: waits},
                {Command.COMM_INIT: Instead.CLOSE},
                first=first,
            )
            with pytest.raises(ConnectionLost):
                communicate(ranks.devices)
            # Nor is its answer left for whoever asks next.
            assert rigs[0].pair.stream.owed == 0
            assert rigs[0].settle() == ["COMM_INIT"]

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"dialect": V7}, "protocol 7"),
            ({"second": Endpoint("10.0.0.1", 50052)}, "another server"),
            ({"first": Endpoint("10.0.0.1", 64536)}, "no port 1000 above"),
            ({"first": Endpoint("h" * 63 + ".a", 50052)}, "too long"),
        ],
    )
    def test_what_cannot_be_is_not_asked_for(
        self,
        theirs: Callable[..., Any],
        caplog: pytest.LogCaptureFixture,
        settings: Any,
        reason: str,
    ) -> None:
        ranks, rigs = theirs({}, {}, **settings)
        assert communicate(ranks.devices) is None
        assert reason in caplog.text
        assert rigs[0].settle() == []

    def test_three_are_too_many(
        self, theirs: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks, _ = theirs()
        assert communicate([*ranks.devices, ranks.devices[0]]) is None
        assert "pairs" in caplog.text


class TestGroup:
    def test_each_is_linked_with_each(self, ours: Callable[..., Any]) -> None:
        ranks, rigs = ours(1, 1, 1)
        communicator = ranks.communicator()
        inits = [LxCommInit.decode(r.server.of(Command.LX_COMM_INIT)[0]) for r in rigs]
        assert len({init.comm for init in inits}) == 1
        assert {init.wire for init in inits} == {WireType.F32}
        assert [init.own for init in inits] == [0, 1, 2]
        assert [init.links for init in inits] == [(0, 1, 2), (11, 0, 12), (21, 22, 0)]
        assert [init.devices for init in inits] == [(0,), (0,), (0,)]
        tensors = ranks.tensors(8)
        assert communicator.allreduce(tensors) is True
        for r in rigs:
            r.settle()
            (body,) = r.server.of(Command.LX_ALLREDUCE)
            sum_ = LxAllreduce.decode(body)
            assert (sum_.comm, sum_.absent) == (inits[0].comm, 0)
            assert len(sum_.tensors) == 1
        communicator.free()
        r.settle()
        assert r.server.of(Command.LX_COMM_FREE) == [m.U32.pack(inits[0].comm)]

    def test_devices_of_one_server_need_no_link(self, ours: Callable[..., Any]) -> None:
        ranks, (r,) = ours(3)
        communicator = ranks.communicator()
        init = LxCommInit.decode(r.server.of(Command.LX_COMM_INIT)[0])
        assert (init.own, init.links, init.devices) == (0, (0,), (0, 1, 2))
        tensors = ranks.tensors(8)
        change(tensors[1], "flags", 0)
        assert communicator.allreduce(tensors) is True
        assert r.settle() == ["LX_COMM_INIT", "LX_ALLREDUCE"]
        sum_ = LxAllreduce.decode(r.server.of(Command.LX_ALLREDUCE)[0])
        assert sum_.absent == 0b010 and len(set(sum_.tensors)) == 3

    def test_places_go_by_rank(self, ours: Callable[..., Any]) -> None:
        ranks, rigs = ours(2, 1)
        a, b, c = ranks.devices
        ranks.devices = [c, a, b]
        communicator = ranks.communicator()
        inits = [LxCommInit.decode(r.server.of(Command.LX_COMM_INIT)[0]) for r in rigs]
        assert [init.own for init in inits] == [1, 0]
        assert inits[0].devices == (0, 1)
        ranks.buffers = [ranks.buffers[i] for i in (2, 0, 1)]
        tensors = ranks.tensors(8)
        change(tensors[2], "flags", 0)
        communicator.allreduce(tensors)
        rigs[0].settle()
        assert (
            LxAllreduce.decode(rigs[0].server.of(Command.LX_ALLREDUCE)[0]).absent == 2
        )

    def test_a_link_that_cannot_be_takes_the_others_along(
        self, ours: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        alone = {Command.LX_CONNECT: NO_ROOM, Command.LX_ACCEPT: NO_ROOM}
        ranks, rigs = ours(1, 1, 1, answers={2: alone})
        assert communicate(ranks.devices) is None
        assert "8 communicators" in caplog.text
        for r in rigs[:2]:
            r.settle()
            # Each end of the one link there was; the other's, which nobody came to.
            ends = [m.U32.unpack(b)[0] for b in r.server.of(Command.LX_UNLINK)]
            assert ends[-1] % 10 == 1
            r.connection.check()
        assert "LX_UNLINK" not in rigs[2].settle()

    def test_a_refused_communicator_is_none_for_all(
        self, ours: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks, rigs = ours(1, 1, 1, answers={1: {Command.LX_COMM_INIT: NO_ROOM}})
        assert communicate(ranks.devices) is None
        assert "8 communicators" in caplog.text
        ends = ("LX_COMM_INIT", "LX_COMM_FREE", "LX_UNLINK")
        done = [[name for name in r.settle() if name in ends] for r in rigs]
        # A communicator takes its links along.
        assert done[0] == ["LX_COMM_INIT", "LX_COMM_FREE"]
        assert done[1] == ["LX_COMM_INIT", "LX_UNLINK", "LX_UNLINK"]
        assert done[2] == ["LX_UNLINK", "LX_UNLINK"]
        for r in rigs:
            r.connection.check()

    def test_leaving_is_said_once(self, ours: Callable[..., Any]) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        communicator.failed(RemoteFailure("a", "LX_ALLREDUCE", "failed"))
        communicator.free()
        assert rigs[0].settle().count("LX_COMM_FREE") == 1

    def test_a_lost_member_frees_the_others(self, ours: Callable[..., Any]) -> None:
        """They may be waiting for it."""
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        rigs[0].connection.close()
        with pytest.raises(ConnectionLost) as caught:
            communicator.allreduce(tensors)
        communicator.failed(caught.value)
        assert "LX_COMM_FREE" in rigs[1].settle()

    def test_a_freed_one_sums_nothing(self, ours: Callable[..., Any]) -> None:
        """Not even what it has summed before: ggml would take that for done."""
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        known, fresh = ranks.tensors(8), ranks.tensors(9)
        assert communicator.allreduce(known) is True
        communicator.free()
        assert communicator.allreduce(known) is False
        assert communicator.allreduce(fresh) is False
        assert rigs[0].settle()[-1] == "LX_COMM_FREE"

    def test_after_a_refusal_the_servers_are_linked_anew(
        self, ours: Callable[..., Any]
    ) -> None:
        """Who has not done a command has broken its links."""
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        assert communicator.allreduce(tensors) is True
        self._refuse(rigs[1])
        assert communicator.allreduce(tensors) is False
        rigs[1].connection.refusal = None
        for _ in range(2):
            assert communicator.allreduce(tensors) is True
        ours_only = (name for name in rigs[1].settle() if name.startswith("LX_"))
        names = [name for name in ours_only if name != "LX_PING"]
        assert names == [
            *("LX_CONNECT", "LX_COMM_INIT", "LX_ALLREDUCE"),
            *("LX_COMM_FREE", "LX_CONNECT", "LX_COMM_INIT"),
            *("LX_ALLREDUCE", "LX_ALLREDUCE"),
        ]
        bodies = rigs[1].server.of(Command.LX_ALLREDUCE)
        assert len({LxAllreduce.decode(body).comm for body in bodies}) == 2

    def test_after_a_refusal_without_a_way_ggml_sums(
        self, ours: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        self._refuse(rigs[1])
        rigs[1].connection.refusal = None
        rigs[0].server.answers[Command.LX_COMM_INIT] = NO_ROOM
        for _ in range(3):
            assert communicator.allreduce(tensors) is False
        assert caplog.text.count("through this machine") == 1
        assert rigs[0].settle().count("LX_COMM_INIT") == 2
        communicator.free()

    def _refuse(self, rig: Rig) -> None:
        rig.server.answers[Command.DEVICE_COUNT] = NO_ROOM
        with pytest.raises(RemoteFailure):
            rig.connection.ask(Command.DEVICE_COUNT, b"")
        del rig.server.answers[Command.DEVICE_COUNT]

    def test_after_a_refusal_nothing_is_summed(self, ours: Callable[..., Any]) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        rigs[1].connection.refusal = RemoteFailure("b", "GRAPH_COMPUTE", "failed")
        assert communicator.allreduce(tensors) is False
        assert "LX_ALLREDUCE" not in rigs[0].settle()

    def test_a_fault_here_ends_all_connections(self, ours: Callable[..., Any]) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        communicator.failed(KeyError("a bug"))
        assert not any(r.connection.healthy for r in rigs)


class TestTensors:
    def test_others_than_f32(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        assert not ranks.communicator().allreduce(ranks.tensors(8, type=F16))

    def test_unequal_counts(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        tensors = [ranks.tensors(8)[0], ranks.tensors(9)[1]]
        assert not ranks.communicator().allreduce(tensors)

    def test_gaps(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        tensors = ranks.tensors(8, 2)
        change(tensors[1], "nb", [4, 64, 128, 128])
        assert not ranks.communicator().allreduce(tensors)

    def test_strides_that_move_nothing_do_not_count(
        self, ours: Callable[..., Any]
    ) -> None:
        ranks, _ = ours(1, 1)
        tensors = ranks.tensors(8, 1, 2)
        change(tensors[1], "nb", [4, 999, 32, 64])
        assert ranks.communicator().allreduce(tensors)

    def test_none(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        assert not ranks.communicator().allreduce([ranks.tensors(8)[0], 0])

    def test_another_members(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        one, other = ranks.tensors(8)
        assert not ranks.communicator().allreduce([other, one])

    def test_nobodys(self, ours: Callable[..., Any]) -> None:
        ranks, _ = ours(1, 1)
        one, _ = ranks.tensors(8)
        loose = ranks.ggml.tensor(ranks.context, 8)
        assert not ranks.communicator().allreduce([one, loose])

    def test_nothing_is_summed_without_a_message(
        self, ours: Callable[..., Any]
    ) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        assert communicator.allreduce(ranks.tensors(0))
        assert "LX_ALLREDUCE" not in rigs[0].settle()

    def test_a_changed_tensor_is_looked_at_again(
        self, ours: Callable[..., Any]
    ) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        assert communicator.allreduce(tensors) and communicator.allreduce(tensors)
        for tensor in tensors:
            change(tensor, "ne", [4, 1, 1, 1])
            change(tensor, "nb", [4, 16, 16, 16])
        assert communicator.allreduce(tensors)
        change(tensors[0], "type", F16)
        assert not communicator.allreduce(tensors)
        rigs[0].settle()
        assert [tensor.ne[0] for tensor in summed(rigs[0])] == [8, 8, 4]

    def test_a_buffer_that_came_in_anothers_place(
        self, ours: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks, rigs = ours(1, 1)
        communicator = ranks.communicator()
        tensors = ranks.tensors(8)
        assert communicator.allreduce(tensors)
        # The same address and another handle, as after a free and an allocation.
        plugin = ranks.devices[0].plugin
        (old,) = plugin.buffers.values()
        allocated = ranks.devices[0].alloc_buffer(1 << 16)
        assert allocated is not None
        new = allocated[0]
        new.address = old.address
        plugin.buffers[old.address] = new
        ranks.devices[0].session.records.forget()
        assert communicator.allreduce(tensors)
        rigs[0].settle()
        bodies = rigs[0].server.of(Command.LX_ALLREDUCE)
        handles = [
            Tensor.decode(LxAllreduce.decode(b).tensors[0]).buffer for b in bodies
        ]
        assert handles[0] == old.handle != handles[1] == new.handle


def test_what_is_not_remote_stays_with_ggml(
    ours: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    ranks, _ = ours(1)
    devices: list[HostDevice | None] = [*ranks.devices, None]
    assert communicate(devices) is None
    assert "not all of them are remote" in caplog.text


def test_the_environment_turns_it_off(
    ours: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GGML_RPC_NO_COMM", "")
    ranks, rigs = ours(1, 1)
    assert communicate(ranks.devices) is None
    assert "GGML_RPC_NO_COMM" in caplog.text
    assert rigs[0].settle() == []


def test_servers_begin_while_a_step_is_queued(ours: Callable[..., Any]) -> None:
    ranks, rigs = ours(1, 1)
    communicator = ranks.communicator()
    tensors = ranks.tensors(8)
    for r in rigs:
        r.forget()
    sent: list[int] = []
    for _ in range(17):
        communicator.allreduce(tensors)
        sent.append(len(rigs[0].pair.stream.sends))
    assert sent[0] == 1, "the first sum of a step leaves at once"
    assert 1 < sent[-1] < 8, "those behind it leave in some writes"
    assert len(rigs[1].pair.stream.sends) == sent[-1]


def test_nobody_waits_while_a_sum_is_held_back(ours: Callable[..., Any]) -> None:
    ranks, rigs = ours(1, 1)
    communicator = ranks.communicator()
    tensors = ranks.tensors(8)
    communicator.allreduce(tensors)
    communicator.allreduce(tensors)
    rigs[1].connection.ask(Command.DEVICE_COUNT, b"")
    sends = [len(write) for write in rigs[0].pair.stream.sends]
    assert sends[-1] == 1 and rigs[0].pair.stream.sends[-1][0].command == (
        Command.LX_ALLREDUCE
    )


def test_large_data_finds_a_server_that_listens(ours: Callable[..., Any]) -> None:
    """It waits for another one: its commands leave before the data does."""
    ranks, rigs = ours(1, 1)
    communicator = ranks.communicator()
    tensors = ranks.tensors(8)
    communicator.allreduce(tensors)
    communicator.allreduce(tensors)
    before = len(rigs[0].pair.stream.sends)
    record = rigs[1].session.records.of(tensors[1])
    head = m.SetTensor(record, 0, 0).encode()
    rigs[1].connection.post(Command.SET_TENSOR, head, bytes(1 << 17))
    assert len(rigs[0].pair.stream.sends) == before + 1
